"""Translate paths of Triton's HTTP protocol and methods of its gRPC protocol to operations.

A path is matched as it came, still encoded, because Triton does so; only a model's name is decoded. An
unknown path is passed on, so that Triton answers with 404 or 405. An unknown method over gRPC is not passed
on: clients call some methods, such as reflection, without a token.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final
from urllib.parse import unquote_to_bytes

from gpubroker_server.http.identity import Scope
from gpubroker_server.inference.operation import FanOut, Operation, Target


class TritonOperation(Operation, frozen=True):
    shares_memory: bool = False
    """True if the client wants the server to read the client's memory, which needs both on one machine."""
    is_stream: bool = False
    """True for a call over gRPC with many messages each way."""
    sets: bool = False
    """True for a call over gRPC that changes settings if its message holds any."""
    model_field: int = 0
    """The number of the field that names the model in a message over gRPC; 0 if the call names no model."""


_MODEL: Final = re.compile(
    rb"/v2/models/([^/]+)(?:/versions/([0-9]+))?"
    rb"(?:/(infer|generate|generate_stream|ready|config|stats|trace/setting))?"
)
_INFERS: Final = frozenset({"infer", "generate", "generate_stream"})
_REPOSITORY: Final = re.compile(rb"/v2/repository(?:/[^/]+)?/(?:models/([^/]+)/(load|unload)|index)")
_SHARED_MEMORY: Final = re.compile(rb"/v2/(systemsharedmemory|cudasharedmemory)(?:/region/[^/]+)?/(\w+)")
_HEALTH: Final = frozenset({b"/v2/health/live", b"/v2/health/ready"})
_SETTINGS: Final = frozenset({b"/v2/logging", b"/v2/trace/setting"})
_END_OF_PATH: Final = re.compile(rb"[?#]")
_READING: Final = frozenset({b"GET", b"HEAD"})

_LONGEST_CACHED: Final = 256
"""Longest path in bytes that is cached. Clients choose the paths, and long ones would fill the memory."""


def is_triton_path(target: bytes) -> bool:
    """Return True for `/v2` and every path below it, with or without a query."""
    return target.startswith(b"/v2") and target[3:4] in (b"", b"/", b"?")


def http_target(method: bytes, target: bytes) -> Target:
    path = _END_OF_PATH.split(target, 1)[0]
    return _cached_target(method, path) if len(path) <= _LONGEST_CACHED else _http_target(method, path)


def _http_target(method: bytes, path: bytes) -> Target:
    changes, reads = method != b"GET", method in _READING
    if path in _HEALTH:
        return Target(Operation(path.decode(), None, FanOut.ANY, reads))
    if path in _SETTINGS:
        fan_out = FanOut.EACH if changes else None
        return Target(Operation(path.decode(), _reading_or_managing(changes), fan_out, reads))
    if path == b"/v2/models/stats":
        return Target(Operation(path.decode(), fan_out=FanOut.STATISTICS, reads=reads))
    if path == b"/v2":
        return Target(Operation(path.decode(), reads=reads))
    if found := _MODEL.fullmatch(path):
        action = (found[3] or b"").decode()
        operation = _model_operation(changes, reads, action)
        return Target(operation, unquote_to_bytes(found[1]), found[2] or b"", b"%" in found[1])
    if found := _REPOSITORY.fullmatch(path):
        if found[1] is None:
            return Target(Operation("/v2/repository/index", fan_out=FanOut.INDEX, reads=reads))
        is_load = found[2] == b"load"
        operation = Operation(
            f"/v2/repository/models/{{model}}/{found[2].decode()}",
            Scope.MODELS_MANAGE,
            None if is_load else FanOut.EACH,
            reads,
            needs_model=is_load,
            loads=is_load,
            unloads=not is_load,
        )
        return Target(operation, unquote_to_bytes(found[1]))
    if found := _SHARED_MEMORY.fullmatch(path):
        is_status = found[2] == b"status"
        name = f"/v2/{found[1].decode()}/{'status' if is_status else 'register'}"
        return Target(TritonOperation(name, reads=reads, shares_memory=not is_status))
    # Triton may know more paths. A request that could change something needs the right to do so.
    return Target(Operation("/v2/unmatched", _reading_or_managing(changes), reads=reads))


def _model_operation(changes: bool, reads: bool, action: str) -> Operation:
    infers = changes and action in _INFERS
    sets = changes and action == "trace/setting"
    return Operation(
        "/v2/models/{model}" + (f"/{action}" if action else ""),
        _reading_or_managing(sets),
        FanOut.EACH if sets else FanOut.STATISTICS if action == "stats" else None,
        reads,
        takes_slot=infers,
        needs_model=infers,
    )


_cached_target = lru_cache(4096)(_http_target)


def _reading_or_managing(changes: bool) -> Scope:
    return Scope.MODELS_MANAGE if changes else Scope.MODELS_INFER


def grpc_operation(method: str) -> TritonOperation:
    return _BY_METHOD.get(method, UNKNOWN)


_SERVICE: Final = "/inference.GRPCInferenceService/"
_OPERATIONS: Final = [
    *(TritonOperation(name, None, FanOut.ANY, reads=True) for name in ("ServerLive", "ServerReady")),
    *(
        TritonOperation(name, reads=True)
        for name in ("ServerMetadata", "SystemSharedMemoryStatus", "CudaSharedMemoryStatus")
    ),
    *(
        TritonOperation(name, reads=True, model_field=1)
        for name in ("ModelReady", "ModelMetadata", "ModelConfig")
    ),
    TritonOperation("ModelStatistics", fan_out=FanOut.STATISTICS, reads=True, model_field=1),
    TritonOperation("RepositoryIndex", fan_out=FanOut.INDEX, reads=True),
    TritonOperation("ModelInfer", takes_slot=True, needs_model=True, model_field=1),
    TritonOperation("ModelStreamInfer", is_stream=True, takes_slot=True, needs_model=True, model_field=1),
    TritonOperation("TraceSetting", fan_out=FanOut.EACH, sets=True, model_field=2),
    TritonOperation("LogSettings", fan_out=FanOut.EACH, sets=True),
    TritonOperation("RepositoryModelLoad", Scope.MODELS_MANAGE, needs_model=True, loads=True, model_field=2),
    TritonOperation("RepositoryModelUnload", Scope.MODELS_MANAGE, FanOut.EACH, unloads=True, model_field=2),
    *(
        TritonOperation(f"{kind}SharedMemory{action}", shares_memory=True)
        for kind in ("System", "Cuda")
        for action in ("Register", "Unregister")
    ),
]
_BY_METHOD: Final[Mapping[str, TritonOperation]] = {
    **{_SERVICE + operation.name: operation for operation in _OPERATIONS},
    "/grpc.health.v1.Health/Check": TritonOperation("Health/Check", None, FanOut.ANY, reads=True),
}
UNKNOWN: Final = TritonOperation("unmatched")
"""The operation of every other method. Triton has no others, so none is passed on."""
