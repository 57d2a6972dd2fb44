"""What a call over gRPC is about: the scope it needs, and what must be looked at in its message."""

from collections.abc import Mapping
from dataclasses import dataclass

from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.proxy.aims import Asked
from gpubroker_server.ports.protowire import Malformed, fields, last_of


@dataclass(frozen=True, slots=True)
class CallAim:
    name: str
    """Under which it is counted."""
    scope: Scope | None = Scope.MODELS_INFER
    """None: open to everybody."""
    is_stream: bool = False
    takes_slot: bool = False
    """Of the model that its message names."""
    shares_memory: bool = False
    """The client would have the server read its memory, which needs both on one machine."""
    sets: bool = False
    """Changes settings, if its message holds any."""
    loads: bool = False
    unloads: bool = False
    model_at: int = 0
    """Number of the field that names the model it is about; 0: it is about none."""
    needs_model: bool = False
    """It waits until that is there; of an unload, until it is gone."""
    asked: Asked = Asked.ONE
    """If there are several servers."""
    reads: bool = False
    """And changes nothing, so that it may be asked twice."""


def model_named_in(message: bytes, number: int) -> str:
    """Empty if it names none, or is no message: its server says so."""
    try:
        named = next((value for at, value in fields(message) if at == number), b"")
    except Malformed:
        return ""
    return "" if isinstance(named, int) else named.decode(errors="replace")


def call_aim_of(method: str) -> CallAim:
    return _AIMS.get(method, _UNKNOWN)


_SERVICE = "/inference.GRPCInferenceService/"
_ASKING = ("ServerMetadata", "SystemSharedMemoryStatus", "CudaSharedMemoryStatus")
_OF_MODELS = ("ModelReady", "ModelMetadata", "ModelConfig")
_KNOWN = [
    *(CallAim(name, None, asked=Asked.ANY, reads=True) for name in ("ServerLive", "ServerReady")),
    *(CallAim(name, reads=True) for name in _ASKING),
    *(CallAim(name, model_at=1, reads=True) for name in _OF_MODELS),
    CallAim("ModelStatistics", model_at=1, asked=Asked.STATISTICS, reads=True),
    CallAim("RepositoryIndex", asked=Asked.INDEX, reads=True),
    CallAim("ModelInfer", takes_slot=True, model_at=1, needs_model=True),
    CallAim("ModelStreamInfer", is_stream=True, model_at=1, needs_model=True),
    CallAim("TraceSetting", sets=True, model_at=2, asked=Asked.EACH),
    CallAim("LogSettings", sets=True, asked=Asked.EACH),
    CallAim("RepositoryModelLoad", Scope.MODELS_MANAGE, loads=True, model_at=2, needs_model=True),
    CallAim(
        "RepositoryModelUnload",
        Scope.MODELS_MANAGE,
        unloads=True,
        model_at=2,
        needs_model=True,
        asked=Asked.EACH,
    ),
    *(
        CallAim(f"{kind}SharedMemory{deed}", shares_memory=True)
        for kind in ("System", "Cuda")
        for deed in ("Register", "Unregister")
    ),
]
_AIMS: Mapping[str, CallAim] = {
    **{_SERVICE + aim.name: aim for aim in _KNOWN},
    "/grpc.health.v1.Health/Check": CallAim("Health/Check", None, asked=Asked.ANY, reads=True),
}
_UNKNOWN = CallAim("unmatched", Scope.MODELS_MANAGE, is_stream=True)
"""Triton may know more than we do: a stream may be of one message each way, and what could change something
needs the right to do so."""

_MODEL_NAME = 1
_MODEL_VERSION = 2
_SETTINGS = 1
_LOAD_PARAMETERS = 3
_KEY = 1
_FILE = b"file:"


def model_in(message: bytes) -> bytes:
    """Of a ModelInferRequest; empty if there is none."""
    return text_in(message, _MODEL_NAME)


def about(aim: CallAim, message: bytes) -> tuple[bytes, bytes]:
    """Model and version that the message names; empty where it names none."""
    if not aim.model_at:
        return b"", b""
    version = text_in(message, _MODEL_VERSION) if aim.model_at == _MODEL_NAME else b""
    return text_in(message, aim.model_at), version


def text_in(message: bytes, number: int) -> bytes:
    try:
        return last_of(message, number)
    except Malformed:
        return b""


def changes_settings(message: bytes) -> bool:
    """Of a TraceSettingRequest or LogSettingsRequest. What is no message may change anything."""
    try:
        return any(number == _SETTINGS for number, _ in fields(message))
    except Malformed:
        return True


def brings_files(message: bytes) -> bool:
    """Of a RepositoryModelLoadRequest."""
    try:
        parameters = [value for number, value in fields(message) if number == _LOAD_PARAMETERS]
        return any(_is_file(parameter) for parameter in parameters)
    except Malformed:
        return True


def _is_file(parameter: int | bytes) -> bool:
    """Of a pair in the map of parameters. Of several keys the last one counts, and each is looked at."""
    if isinstance(parameter, int):
        return True
    keys = (value for number, value in fields(parameter) if number == _KEY)
    return any(isinstance(key, int) or key.startswith(_FILE) for key in keys)
