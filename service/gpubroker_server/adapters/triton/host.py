"""What a Triton has in memory, asked and changed over gRPC alone: a load over HTTP would hold up whoever
shares one of the server's few threads with it, and requests for health among them."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from gpubroker_server.adapters.triton.grpc_backend import RpcBackend, TritonRpcServer
from gpubroker_server.adapters.triton.incarnation import Incarnations
from gpubroker_server.adapters.triton.model_config import ModelConfig, config_in, config_of
from gpubroker_server.adapters.triton.sample_request import sample_request, verdict_on
from gpubroker_server.core.domain.units import DeviceKey, Instant, Mib, Seconds
from gpubroker_server.ports.backends import CallFailed, Trouble
from gpubroker_server.ports.models import (
    Described,
    HostFault,
    HostRefused,
    Index,
    Indexed,
    ModelHost,
    Stage,
    Used,
)
from gpubroker_server.ports.protowire import Malformed, Message, field

_SERVICE: Final = "/inference.GRPCInferenceService/"
_MIB: Final = 2**20

_STAGES: Final = {"READY": Stage.READY, "UNLOADING": Stage.UNLOADING, "LOADING": Stage.LOADING}
_NEAREST: Final = (Stage.READY, Stage.UNLOADING, Stage.LOADING, Stage.ABSENT)
"""Of several versions the first of these counts."""

_UNLOADED: Final = "unloaded"

_LOST: Final = frozenset({1, 4, 14})
"""CANCELLED, DEADLINE_EXCEEDED, UNAVAILABLE: whether it was done, nobody has said."""

_CODE_NOT_FOUND: Final = 5

_NOT_ALLOWED: Final = "explicit model load / unload is not allowed"
_NOT_FOUND: Final = ("failed to poll from model repository", "no version is available", "invalid model name")
_NO_MEMORY: Final = (
    "out of memory",
    "out_of_memory",
    "outofmemory",
    "alloc_failed",
    "failed to allocate",
    "memory limit set for",
)
"""What backends say, in lowercase: there is no code for it."""

T = TypeVar("T")


class _Files(NamedTuple):
    """What a model's folder tells, as `Described`."""

    config: ModelConfig | None = None
    file_bytes: int | None = None
    versions: tuple[str, ...] = ()


class TritonHost(ModelHost):
    def __init__(self, server: TritonRpcServer, repository: Path | None = None) -> None:
        """`repository`: where this machine sees the server's models."""
        self._server = RpcBackend(replace(server, silence_seconds=Seconds(math.inf)))
        self._repository = repository
        self._incarnations = Incarnations(server.address)

    @property
    def name(self) -> str:
        return self._server.name

    async def load(self, model: str, devices: Sequence[DeviceKey], within_seconds: Seconds) -> None:  # noqa: ARG002  # where is in the model's configuration
        await self._ask("RepositoryModelLoad", field(2, model), within_seconds)

    async def unload(self, model: str, within_seconds: Seconds) -> None:
        with_steps = field(3, field(1, "unload_dependents") + field(2, field(1, 1)))
        await self._ask("RepositoryModelUnload", field(2, model) + with_steps, within_seconds)

    async def index(self, within_seconds: Seconds) -> Index:
        answer = await self._ask("RepositoryIndex", b"", within_seconds)
        incarnation = await asyncio.to_thread(self._incarnations.current)
        return Index(_indexed(answer), incarnation)

    async def describe(self, model: str, within_seconds: Seconds) -> Described:
        seen = await asyncio.to_thread(self._seen, model)
        config = seen.config or await self._told(model, within_seconds)
        return Described(seen.file_bytes, config.steps, config.instances, config.most_batch, seen.versions)

    async def statistics(self, within_seconds: Seconds) -> Mapping[str, Used]:
        answer = await self._ask("ModelStatistics", b"", within_seconds)
        used: dict[str, Used] = {}
        for one in answer.messages(1):
            model = one.text(1)
            used[model] = _sum(used.get(model, Used()), _used(one))
        return used

    async def answers(self, model: str, within_seconds: Seconds) -> bool:
        """Whether it does what it says it is ready for. A process of a model that was killed is not missed by
        its server: only a request finds out. This one has zeros for all inputs, and what the model makes of
        them is its own affair."""
        metadata = await self._ask("ModelMetadata", field(1, model), within_seconds)
        call = self._server.open(_SERVICE + "ModelStreamInfer", (), within_seconds)
        try:
            await call.write(sample_request(model, metadata))
            await call.end()
            first = answer = await call.read()
            while answer is not None:  # a stream that is left before its end may keep the model from leaving
                answer = await call.read()
            return verdict_on(first)
        except CallFailed as failed:
            raise _refused(failed, model) from None
        finally:
            call.cancel()

    async def close(self) -> None:
        await self._server.close()

    async def _ask(self, method: str, message: bytes, within_seconds: Seconds) -> Message:
        try:
            answer = await self._server.ask(_SERVICE + method, message, (), within_seconds)
            return Message(answer.message)
        except CallFailed as failed:
            raise _refused(failed, method) from None
        except Malformed as fault:
            raise HostRefused(
                HostFault.UNKNOWN, f"{self.name} answered {method} with no message: {fault}"
            ) from None

    def _seen(self, model: str) -> "_Files":
        """In the repository, as far as this machine sees it. Raises HostRefused NOT_FOUND."""
        if self._repository is None:
            return _Files()
        folder = self._repository / model
        try:
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        except OSError:
            return _Files()
        if not folder.is_dir():
            raise HostRefused(HostFault.NOT_FOUND, f"{self.name} has no model {model} in {self._repository}")
        file = folder / "config.pbtxt"
        try:
            if not file.exists():  # the server makes out all of it
                return _Files(None, size, ModelConfig().versions_in(folder))
            config = config_in(file)
            return _Files(config, size, config.versions_in(folder))
        except (OSError, ValueError):
            return _Files(None, size)

    async def _told(self, model: str, within_seconds: Seconds) -> ModelConfig:
        """By the server, which knows the configuration of what is loaded and of nothing else."""
        try:
            return config_of((await self._ask("ModelConfig", field(1, model), within_seconds)).message(1))
        except HostRefused as refused:
            if refused.fault in (HostFault.UNREACHABLE, HostFault.UNKNOWN):
                raise
        if model not in (await self.index(within_seconds)).models:
            raise HostRefused(HostFault.NOT_FOUND, f"{self.name} has no model {model}")
        return ModelConfig()


def _refused(failed: CallFailed, what: str) -> HostRefused:
    said = failed.detail
    if failed.trouble is Trouble.UNREACHABLE:
        return HostRefused(HostFault.UNREACHABLE, said)
    if _NOT_ALLOWED in said:
        return HostRefused(HostFault.NOT_ALLOWED, said)
    if failed.code in _LOST:
        return HostRefused(HostFault.UNKNOWN, f"{what}: {said}")
    if failed.code == _CODE_NOT_FOUND or any(words in said for words in _NOT_FOUND):
        return HostRefused(HostFault.NOT_FOUND, said)
    if any(words in said.lower() for words in _NO_MEMORY):
        return HostRefused(HostFault.OUT_OF_MEMORY, said)
    return HostRefused(HostFault.FAILED, said)


def _indexed(answer: Message) -> dict[str, Indexed]:
    models: dict[str, Indexed] = {}
    for one in answer.messages(1):
        model, version, reason = one.text(1), one.text(2), one.text(4)
        stage = _STAGES.get(one.text(3), Stage.ABSENT)
        known = models.get(model, Indexed(model, Stage.ABSENT))
        versions = (version,) if stage is Stage.READY else ()
        models[model] = Indexed(
            model,
            min(known.stage, stage, key=_NEAREST.index),
            tuple(sorted((*known.versions, *versions))),
            known.reason or ("" if reason == _UNLOADED else reason),
        )
    return models


def _used(statistics: Message) -> Used:
    """Of one version."""
    ended = statistics.message(6)
    last_ms = statistics.number(3)
    on_gpus = [one.number(3) for one in statistics.messages(8) if one.text(1) == "GPU"]
    return Used(
        requests=ended.message(1).number(1) + ended.message(2).number(1),
        last_at=Instant(last_ms / 1000) if last_ms else None,
        memory_mb=Mib(math.ceil(sum(on_gpus) / _MIB)) if on_gpus else None,
    )


def _sum(one: Used, other: Used) -> Used:
    """Of two versions of a model."""
    return Used(
        one.requests + other.requests,
        _of_both(max, one.last_at, other.last_at),
        _of_both(lambda a, b: Mib(a + b), one.memory_mb, other.memory_mb),
    )


def _of_both(joined: Callable[[T, T], T], one: T | None, other: T | None) -> T | None:
    known = [value for value in (one, other) if value is not None]
    return reduce(joined, known) if known else None
