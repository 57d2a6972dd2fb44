"""The port to what a model server has in memory: load, unload, index.

The caller makes one call that changes something at a time for each server. A missing answer proves nothing:
the index says what is in memory.
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
    """The server's process: another text after each start; empty where that cannot be seen."""


class Described(Struct, frozen=True):
    """The facts about a model before it is loaded, for a first estimate of its size."""

    file_bytes: int | None = None
    """Size of its files in the repository; None where they cannot be seen."""
    steps: tuple[str, ...] = ()
    """The models that are loaded with it, if it is an ensemble."""
    versions: tuple[str, ...] = ()
    """The versions that a load brings, sorted as in an index; empty where they cannot be seen."""
    revision: str = ""
    """A text that changes with the model's files; empty where they cannot be seen."""
    on_cpu: bool = False
    """True if the model takes no GPU memory, as its configuration says."""
    seen: tuple[str, ...] = ()
    """UUIDs of the GPUs that the server sees; empty where it doesn't say."""


class HostFault(StrEnum):
    UNREACHABLE = "unreachable"
    """Nothing was sent."""
    UNKNOWN = "unknown"
    """The request may have been carried out: the answer was lost, or did not come within the time given."""
    NOT_FOUND = "not_found"
    """The repository has no such model, or it cannot be read."""
    OUT_OF_MEMORY = "out_of_memory"
    """The model's backend could not get the memory, or the server's own limit said no."""
    FAILED = "failed"
    """The load failed for another reason; `str(fault)` has the server's words."""
    NOT_ALLOWED = "not_allowed"
    """The server does not load on request: it runs without `--model-control-mode=explicit`."""
    OTHER_GPUS = "other_gpus"
    """The server sees other GPUs than those of the lease; nothing was loaded."""


class HostRefused(Exception):
    """A call that did not do what it was asked to do."""

    def __init__(self, fault: HostFault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


class ModelHost(Protocol):
    """One model server. Each call raises HostRefused, and none waits longer than it is given."""

    @property
    def name(self) -> str: ...

    @property
    def address(self) -> str:
        """The address by which the server is known under whatever name."""

    async def load(self, model: str, devices: Sequence[DeviceKey], within_seconds: Seconds) -> None:
        """Returns when the model is ready; at once if it is already. `devices`: where its lease is, which has
        to be all GPUs that the server sees."""

    async def unload(self, model: str, within_seconds: Seconds) -> None:
        """Returns when the server has accepted it, for an ensemble with its steps; also for a model that is
        not there. Its requests and its memory may take longer: the index says when it is gone."""

    async def index(self, within_seconds: Seconds) -> Index: ...

    async def describe(self, model: str, within_seconds: Seconds) -> Described: ...

    async def answers(self, model: str, within_seconds: Seconds) -> bool:
        """Return True if a model that is ready answers. A model whose process was killed stays ready, and
        loading it changes nothing; the cure is unload, wait until it is gone, load. After a request to the
        dead process it may stay UNLOADING for ever (Triton 24.10); a load works all the same. This sends a
        request to the model: call it only where other requests have failed."""

    async def most_rows(self, model: str, within_seconds: Seconds) -> int:
        """Return the most rows of a request to a loaded model; 0 if its requests have no dimension for
        rows."""

    async def try_out(
        self, model: str, rows: int, shapes: Mapping[str, Sequence[int]], within_seconds: Seconds
    ) -> None:
        """Send a loaded model a request with zeros. `rows` is 0 where requests have no dimension for them.
        `shapes`: of single inputs, without rows; elsewhere the model's own, and 1 where any length will do.
        HostRefused FAILED has the model's words."""

    async def close(self) -> None: ...
