"""Loads, unloads and lists the models of a Triton server. All of this goes over gRPC, because a load over
HTTP would block one of the server's few HTTP threads, and so delay health checks."""

import asyncio
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import structlog
from google.protobuf.message import DecodeError
from msgspec.structs import replace

from gpubroker_server.adapters.triton.grpc_backend import RpcBackend, TritonRpcServer
from gpubroker_server.adapters.triton.model_config import ModelConfig, config_in, config_of
from gpubroker_server.adapters.triton.server_process import ListeningProcess
from gpubroker_server.adapters.triton.web import model_config, visible_gpus, with_dynamic_batching
from gpubroker_server.core.domain.units import DeviceKey, Seconds
from gpubroker_server.core.serving.batching import BatchRules
from gpubroker_server.ports.backends import CallFailed, ModelBackend, Trouble
from gpubroker_server.ports.models import (
    Described,
    HostFault,
    HostRefused,
    Index,
    IndexedModel,
    ModelHost,
    ModelState,
)
from gpubroker_server.ports.triton_messages import messages

log = structlog.get_logger("gpubroker.triton")

_SERVICE: Final = "/inference.GRPCInferenceService/"

_STAGE_OF_STATE: Final = {
    "READY": ModelState.READY,
    "UNLOADING": ModelState.UNLOADING,
    "LOADING": ModelState.LOADING,
}
_STAGE_ORDER: Final = (ModelState.READY, ModelState.UNLOADING, ModelState.LOADING, ModelState.ABSENT)
"""The stages by precedence. A model is in the first of these stages in which one of its versions is."""

_UNLOADED_REASON: Final = "unloaded"

_UNCERTAIN: Final = frozenset({1, 4, 14})
"""The gRPC codes after which a call may still have been carried out: CANCELLED, DEADLINE_EXCEEDED and
UNAVAILABLE."""

_CODE_NOT_FOUND: Final = 5

_NOT_ALLOWED: Final = "explicit model load / unload is not allowed"
_NOT_FOUND: Final = ("failed to poll from model repository", "no version is available", "invalid model name")
_OUT_OF_MEMORY_WORDS: Final = (
    "out of memory",
    "out_of_memory",
    "outofmemory",
    "alloc_failed",
    "failed to allocate",
    "memory limit set for",
)
"""Lowercase words in the messages of backends that lack memory. Triton has no code for this fault."""

_VERSION_PREFIX: Final = re.compile(r"version \d+ is at [A-Z]+ state: ")
"""The text that precedes the message of each version's backend in Triton's message."""

_PYTHON_TRACE: Final = "\n\nAt:\n"
"""The text that precedes the traceback in the message of a Python model's exception. The words of such an
exception are the model's own, so they do not prove a lack of memory."""

_NOT_HEALTHY: Final = "is not healthy"
"""The end of Triton's message about a model whose process is gone."""

_VALUE_BYTES: Final = {
    "BOOL": 1, "UINT8": 1, "INT8": 1, "UINT16": 2, "INT16": 2, "FP16": 2, "BF16": 2, "UINT32": 4, "INT32": 4,
    "FP32": 4, "UINT64": 8, "INT64": 8, "FP64": 8, "BYTES": 4,
}  # fmt: skip
"""The bytes that one value of each datatype takes. An empty value of BYTES has only its length, of 4
bytes."""

_UNLOAD_POLL_SECONDS: Final = 0.05


class _Files(NamedTuple):
    """The facts about a model that its folder shows. The fields have the meaning that they have in
    `Described`."""

    config: ModelConfig | None = None
    file_bytes: int | None = None
    versions: tuple[str, ...] = ()
    revision: str = ""


class _Grouping(NamedTuple):
    """The configuration that is sent with a load of these files, so that Triton batches requests
    dynamically."""

    revision: str = ""
    config: str = ""


class TritonHost(ModelHost):
    def __init__(
        self,
        server: TritonRpcServer,
        repository: Path | None = None,
        metrics: ModelBackend | None = None,
        web: ModelBackend | None = None,
        batches: Mapping[str, BatchRules] | None = None,
    ) -> None:
        """`repository` is the folder in which this machine sees the server's models. `metrics` is the
        server's metrics port, which shows the GPUs that the server sees. `web` is the server's HTTP port,
        which shows the whole configuration of a model. `batches` has the rules of the models whose requests
        Triton should batch dynamically."""
        self._server = RpcBackend(replace(server, silence_seconds=Seconds(math.inf)))
        self._repository = repository
        self._metrics = metrics
        self._web = web
        self._batches = batches or {}
        self._grouping: dict[str, _Grouping] = {}
        self._process = ListeningProcess(server.address)

    @property
    def name(self) -> str:
        return self._server.name

    @property
    def address(self) -> str:
        return self._process.address

    async def load(self, model: str, devices: Sequence[DeviceKey], within_seconds: Seconds) -> None:
        await self._check_gpus(model, devices, within_seconds)
        if model in self._batches and self._web is not None:
            await self._load_grouping(model, self._web, self._batches[model], within_seconds)
        else:
            await self._load(model, "", within_seconds)

    async def unload(self, model: str, within_seconds: Seconds) -> None:
        request = messages.RepositoryModelUnloadRequest(model_name=model)
        request.parameters["unload_dependents"].bool_param = True
        await self._ask("RepositoryModelUnload", request, within_seconds)

    async def index(self, within_seconds: Seconds) -> Index:
        answer = await self._ask("RepositoryIndex", None, within_seconds, messages.RepositoryIndexResponse)
        incarnation = await asyncio.to_thread(self._process.incarnation)
        return Index(_indexed(answer.models), incarnation)

    async def describe(self, model: str, within_seconds: Seconds) -> Described:
        files = await asyncio.to_thread(self._files_of, model)
        config = files.config or await self._config_from_server(model, within_seconds)
        seen = await self._gpus_seen(within_seconds)
        return Described(files.file_bytes, config.steps, files.versions, files.revision, config.on_cpu, seen)

    async def answers(self, model: str, within_seconds: Seconds) -> bool:
        """Send a request with zeros for all inputs. Only a request shows that a model's process was killed,
        because the server still calls the model ready."""
        return _NOT_HEALTHY not in await self._error_of(model, 0, {}, within_seconds)

    async def most_rows(self, model: str, within_seconds: Seconds) -> int:
        request = messages.ModelConfigRequest(name=model)
        answer = await self._ask("ModelConfig", request, within_seconds, messages.ModelConfigResponse)
        return int(answer.config.max_batch_size)

    async def try_out(
        self, model: str, rows: int, shapes: Mapping[str, Sequence[int]], within_seconds: Seconds
    ) -> None:
        if error := await self._error_of(model, rows, shapes, within_seconds):
            raise HostRefused(HostFault.FAILED, error)

    async def _error_of(
        self, model: str, rows: int, shapes: Mapping[str, Sequence[int]], within_seconds: Seconds
    ) -> str:
        """Send a request with zeros and return its error; empty if it is answered. Raises HostRefused."""
        request = messages.ModelMetadataRequest(name=model)
        metadata = await self._ask("ModelMetadata", request, within_seconds, messages.ModelMetadataResponse)
        if unknown := sorted(set(shapes) - {tensor.name for tensor in metadata.inputs}):
            names = ", ".join(tensor.name for tensor in metadata.inputs)
            return f"{model} has no input {unknown[0]}; inputs: {names}"
        call = self._server.open(_SERVICE + "ModelStreamInfer", (), within_seconds)
        try:
            await call.write(_zeros_for(model, metadata.inputs, rows, shapes))
            await call.end()
            first = answer = await call.read()
            while answer is not None:  # a stream that is not read to its end may prevent the unload
                answer = await call.read()
        except CallFailed as failed:
            raise _refused(failed, model) from None
        finally:
            call.cancel()
        # An empty stream shows that the model's process lives, and so does an error of the model's own code.
        error: str = messages.ModelStreamInferResponse.FromString(first or b"").error_message
        return error

    async def close(self) -> None:
        await self._server.close()
        for backend in (self._metrics, self._web):
            if backend is not None:
                await backend.close()

    async def _gpus_seen(self, within_seconds: Seconds) -> tuple[str, ...]:
        return () if self._metrics is None else await visible_gpus(self._metrics, within_seconds)

    async def _check_gpus(self, model: str, devices: Sequence[DeviceKey], within_seconds: Seconds) -> None:
        """Check that the server sees the GPUs of the lease and no others: it may have been restarted with
        other GPUs since the lease was given. Raises HostRefused."""
        leased = {device.rpartition("/")[2] for device in devices}
        seen = await self._gpus_seen(within_seconds) if leased else ()
        if seen and leased != {*seen}:
            raise HostRefused(
                HostFault.OTHER_GPUS,
                f"{self.name} sees {', '.join(seen)}, and the lease of {model} is on "
                f"{', '.join(sorted(leased))}: start the server with its GPUs alone in CUDA_VISIBLE_DEVICES",
            )

    async def _load(self, model: str, config: str, within_seconds: Seconds) -> None:
        """Load a model with this configuration, or with the one in the repository if `config` is empty."""
        request = messages.RepositoryModelLoadRequest(model_name=model)
        if config:
            request.parameters["config"].string_param = config
        await self._ask("RepositoryModelLoad", request, within_seconds)

    async def _load_grouping(
        self, model: str, web: ModelBackend, rules: BatchRules, within_seconds: Seconds
    ) -> None:
        """Load the model with dynamic batching, if it takes batches and its configuration does not enable
        dynamic batching itself.

        The server shows the whole configuration of loaded models only, so the first load is without dynamic
        batching. A second load on top of it would have two copies in memory, so the model is unloaded before
        it. Later loads of the same files need only one load.
        """
        until = asyncio.get_running_loop().time() + within_seconds
        revision = (await asyncio.to_thread(self._files_of, model)).revision
        grouping = self._grouping.get(model, _Grouping())
        if not revision or grouping.revision != revision:
            await self._load(model, "", _left(until))
            config = with_dynamic_batching(await model_config(web, model, _left(until)), rules)
            grouping = self._grouping[model] = _Grouping(revision, config)
            if not config:
                why = "it takes no batches, or its configuration says how its requests are scheduled"
                log.warning("triton.batch does not group the direct requests of a model",
                            server=self.name, model=model, fault=why)  # fmt: skip
                return
            await self.unload(model, _left(until))
            await self._until_gone(model, until)
        try:
            await self._load(model, grouping.config, _left(until))
        except HostRefused as refused:
            if refused.fault is not HostFault.FAILED or not grouping.config:
                raise
            log.warning("a model is loaded without dynamic batching, because the load with it fails",
                        server=self.name, model=model, fault=str(refused))  # fmt: skip
            self._grouping[model] = _Grouping(revision)
            await self._load(model, "", _left(until))

    async def _until_gone(self, model: str, until: float) -> None:
        while True:
            indexed = (await self.index(_left(until))).models.get(model)
            if indexed is None or indexed.stage is ModelState.ABSENT:
                return
            if asyncio.get_running_loop().time() >= until:
                raise HostRefused(HostFault.UNKNOWN, f"{self.name} has not unloaded {model} in time")
            await asyncio.sleep(_UNLOAD_POLL_SECONDS)

    async def _ask(self, method: str, request: Any, within_seconds: Seconds, answer: Any = None) -> Any:
        """Call a method of the server and return its answer. `answer` is the class of the answer's message;
        None if the answer is ignored. Raises HostRefused."""
        message = b"" if request is None else request.SerializeToString()
        try:
            reply = await self._server.ask(_SERVICE + method, message, (), within_seconds)
            return None if answer is None else answer.FromString(reply.message)
        except CallFailed as failed:
            raise _refused(failed, method) from None
        except DecodeError as fault:
            raise HostRefused(
                HostFault.UNKNOWN, f"{self.name} answered {method} with bytes that are no message: {fault}"
            ) from None

    def _files_of(self, model: str) -> _Files:
        """Return the facts that the model's folder in the repository shows, as far as this machine sees the
        repository. Raises HostRefused NOT_FOUND."""
        if self._repository is None:
            return _Files()
        folder = self._repository / model
        try:
            files = {file: file.stat() for file in folder.rglob("*") if file.is_file()}
        except OSError:
            return _Files()
        if not folder.is_dir():
            raise HostRefused(HostFault.NOT_FOUND, f"{self.name} has no model {model} in {self._repository}")
        size = sum(status.st_size for status in files.values())
        revision = _revision_of(files)
        file = folder / "config.pbtxt"
        try:
            if not file.exists():  # the server derives the whole configuration
                return _Files(None, size, ModelConfig().versions_in(folder), revision)
            config = config_in(file)
            return _Files(config, size, config.versions_in(folder), revision)
        except (OSError, ValueError):
            return _Files(None, size, revision=revision)

    async def _config_from_server(self, model: str, within_seconds: Seconds) -> ModelConfig:
        """Return the configuration that the server has of a loaded model, or an empty one for a model that is
        not loaded. Raises HostRefused."""
        request = messages.ModelConfigRequest(name=model)
        try:
            answer = await self._ask("ModelConfig", request, within_seconds, messages.ModelConfigResponse)
            return config_of(answer.config)
        except HostRefused as refused:
            if refused.fault in (HostFault.UNREACHABLE, HostFault.UNKNOWN):
                raise
        if model not in (await self.index(within_seconds)).models:
            raise HostRefused(HostFault.NOT_FOUND, f"{self.name} has no model {model}")
        return ModelConfig()


def _left(until: float) -> Seconds:
    return Seconds(max(0.001, until - asyncio.get_running_loop().time()))


def _revision_of(files: Mapping[Path, os.stat_result]) -> str:
    """Return a text that changes with the files. Files in a `__pycache__` do not count, because a load itself
    may write them."""
    statuses = [status for file, status in files.items() if file.parent.name != "__pycache__"]
    newest = max((status.st_mtime_ns for status in statuses), default=0)
    return f"{len(statuses)}:{sum(status.st_size for status in statuses)}:{newest}"


def _refused(failed: CallFailed, message: str) -> HostRefused:
    detail = failed.detail
    if failed.trouble is Trouble.UNREACHABLE:
        return HostRefused(HostFault.UNREACHABLE, detail)
    if _NOT_ALLOWED in detail:
        return HostRefused(HostFault.NOT_ALLOWED, detail)
    if failed.code in _UNCERTAIN:
        return HostRefused(HostFault.UNKNOWN, f"{message}: {detail}")
    if failed.code == _CODE_NOT_FOUND or any(words in detail for words in _NOT_FOUND):
        return HostRefused(HostFault.NOT_FOUND, detail)
    return HostRefused(fault_of_load(detail), detail)


def fault_of_load(detail: str) -> HostFault:
    """Return the fault for which a server refused a load. `detail` is the server's message, which names the
    model and may quote the model's own messages."""
    _, *of_versions = _VERSION_PREFIX.split(detail)
    for words in of_versions or [detail]:
        if _PYTHON_TRACE not in words and any(sign in words.lower() for sign in _OUT_OF_MEMORY_WORDS):
            return HostFault.OUT_OF_MEMORY
    return HostFault.FAILED


def _indexed(rows: Any) -> dict[str, IndexedModel]:
    """Return the models of an index, which has a row for each version."""
    models: dict[str, IndexedModel] = {}
    for row in rows:
        stage = _STAGE_OF_STATE.get(row.state, ModelState.ABSENT)
        earlier = models.get(row.name, IndexedModel(row.name, ModelState.ABSENT))
        versions = (row.version,) if stage is ModelState.READY else ()
        models[row.name] = IndexedModel(
            row.name,
            min(earlier.stage, stage, key=_STAGE_ORDER.index),
            tuple(sorted((*earlier.versions, *versions))),
            earlier.reason or ("" if row.reason == _UNLOADED_REASON else row.reason),
        )
    return models


def _zeros_for(model: str, inputs: Any, rows: int, shapes: Mapping[str, Sequence[int]]) -> bytes:
    """Return a request with zeros for all inputs. A dimension of variable length gets the length 1. If
    `rows` is not 0, it is the length of the first dimension."""
    request = messages.ModelInferRequest(model_name=model)
    for tensor in inputs:
        own = tensor.shape[1:] if rows else tensor.shape
        shape = [*([rows] if rows else []), *(max(1, length) for length in shapes.get(tensor.name, own))]
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
        request.raw_input_contents.append(bytes(_VALUE_BYTES.get(tensor.datatype, 1) * math.prod(shape)))
    message: bytes = request.SerializeToString()
    return message
