"""The port to a model server that loads, unloads and lists its models.

For each server, the caller has at most one load or unload under way. A missing answer does not prove that a
call failed: only the index says what is in memory.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from gpubroker_server.core.domain.model_orders import IndexedModel as IndexedModel
from gpubroker_server.core.domain.model_orders import ModelState as ModelState
from gpubroker_server.core.domain.units import DeviceKey, Seconds


class Index(Struct, frozen=True):
    """The models of a server, read in one call."""

    models: Mapping[str, IndexedModel]
    incarnation: str = ""
    """A text that identifies the server's process and differs after each start; empty where it cannot be
    seen."""


class Described(Struct, frozen=True):
    """The facts about a model before it is loaded, for a first estimate of its size."""

    file_bytes: int | None = None
    """The size of the model's files in the repository in bytes; None where the files cannot be seen."""
    steps: tuple[str, ...] = ()
    """The models that are loaded with this one, if it is an ensemble."""
    versions: tuple[str, ...] = ()
    """The versions that would be loaded, in the order of an index; empty where they cannot be seen."""
    revision: str = ""
    """A text that changes with the model's files; empty where they cannot be seen."""
    on_cpu: bool = False
    """True if the model takes no GPU memory, as its configuration says."""
    seen: tuple[str, ...] = ()
    """UUIDs of the GPUs that the server sees; empty if it doesn't list them."""


class HostFault(StrEnum):
    """The reason why a call to a model server failed."""

    UNREACHABLE = "unreachable"
    """The server could not be reached, and nothing was sent."""
    UNKNOWN = "unknown"
    """The request may have been carried out: the answer was lost, or did not come within the time given."""
    NOT_FOUND = "not_found"
    """The repository has no such model, or the model's files cannot be read."""
    OUT_OF_MEMORY = "out_of_memory"
    """The model's backend could not allocate its memory, or the server's own memory limit forbids it."""
    FAILED = "failed"
    """The call failed for another reason; the text of the exception is the server's message."""
    NOT_ALLOWED = "not_allowed"
    """The server does not load on request: it runs without `--model-control-mode=explicit`."""
    OTHER_GPUS = "other_gpus"
    """The server sees other GPUs than the ones of the model's lease; nothing was loaded."""


class HostRefused(Exception):
    """Raised by a call that failed. `fault` says why."""

    def __init__(self, fault: HostFault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


class ModelHost(Protocol):
    """One model server. Each call raises HostRefused if it fails, and waits at most `within_seconds`."""

    @property
    def name(self) -> str: ...

    @property
    def address(self) -> str:
        """An address that identifies the server, whatever name the settings use for it."""

    async def load(self, model: str, devices: Sequence[DeviceKey], within_seconds: Seconds) -> None:
        """Load the model and return when it is ready; return at once if it is ready already. `devices` are
        the devices of the model's lease, which must be exactly the GPUs that the server sees."""

    async def unload(self, model: str, within_seconds: Seconds) -> None:
        """Unload the model, and with an ensemble its steps. Return when the server has accepted the call,
        which it also does for a model that it does not have. The model may still answer requests and hold
        memory: the index says when it is gone."""

    async def index(self, within_seconds: Seconds) -> Index: ...

    async def describe(self, model: str, within_seconds: Seconds) -> Described: ...

    async def answers(self, model: str, within_seconds: Seconds) -> bool:
        """Return True if a model that is ready answers requests.

        A model whose process was killed stays READY, and another load does not start its process again. To
        repair it, unload it, wait until it is gone, and load it. After a request to the dead process, the
        model may stay UNLOADING for ever (Triton 24.10), and can be loaded all the same. This method sends a
        request to the model, so call it only if other requests have failed.
        """

    async def most_rows(self, model: str, within_seconds: Seconds) -> int:
        """Return how many rows a request to a loaded model may have at most; 0 if requests to this model have
        no batch dimension."""

    async def try_out(
        self, model: str, rows: int, shapes: Mapping[str, Sequence[int]], within_seconds: Seconds
    ) -> None:
        """Send a loaded model a request whose values are zeros. Raises HostRefused FAILED with the model's
        error message.

        `rows` is 0 for a model whose requests have no batch dimension. `shapes` maps an input to its shape
        without rows. An input that is not in `shapes` has the shape of the model's metadata, with 1 for each
        dimension that may have any length.
        """

    async def close(self) -> None: ...
