"""The door of the leader to what a server of models has in memory. One call, one answer; nobody is told
anything unasked.

Whether, when and one after the other is the caller's affair: of one server it makes one call that changes
something at a time. An answer that did not come proves nothing: what is in memory, the index says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from gpubroker_server.core.domain.models.model_orders import Indexed as Indexed
from gpubroker_server.core.domain.models.model_orders import Stage as Stage
from gpubroker_server.core.domain.units import DeviceKey, Instant, Mib, Seconds


@dataclass(frozen=True, slots=True)
class Index:
    """What a server has, read in one call."""

    models: Mapping[str, Indexed]
    incarnation: str = ""
    """Another one after each start of the server, where that can be told; empty if not."""


@dataclass(frozen=True, slots=True)
class Described:
    """What is known of a model before it is loaded, for a first guess at its size."""

    file_bytes: int | None = None
    """Of its files in the repository; None where they cannot be seen."""
    steps: tuple[str, ...] = ()
    """Of an ensemble the models that are loaded with it; empty for all others."""
    instances: int = 1
    most_batch: int = 1
    """So many requests each instance takes together."""
    versions: tuple[str, ...] = ()
    """Those that a load brings, sorted as in an index; empty where nobody can tell."""

    @property
    def slots(self) -> int:
        """So many requests are worked on at once."""
        return self.instances * self.most_batch


@dataclass(frozen=True, slots=True)
class Used:
    """Of one model since the server started, over all its versions."""

    requests: int = 0
    """Answered, well or not."""
    last_at: Instant | None = None
    memory_mb: Mib | None = None
    """As the server says (`memory_usage` of a GPU); None where it says nothing."""


class HostFault(StrEnum):
    UNREACHABLE = "unreachable"
    """Nothing was sent."""
    UNKNOWN = "unknown"
    """It may have been done: the answer was lost, or did not come within the time given."""
    NOT_FOUND = "not_found"
    """There is no such model in the repository, or it cannot be read."""
    OUT_OF_MEMORY = "out_of_memory"
    """Its backend could not get the memory, or the server's own limit said no."""
    FAILED = "failed"
    """The load failed for another reason; `str(fault)` has the server's words."""
    NOT_ALLOWED = "not_allowed"
    """The server does not load on request: it runs without `--model-control-mode=explicit`."""


class HostRefused(Exception):
    """A call that did not do what it was to do."""

    def __init__(self, fault: HostFault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


class ModelHost(Protocol):
    """One server of models. Each call raises HostRefused, and none waits longer than it is given."""

    @property
    def name(self) -> str: ...

    async def load(self, model: str, devices: Sequence[DeviceKey], within_seconds: Seconds) -> None:
        """Back when the model is ready; at once if it is already. `devices`: where its room is, for servers
        that can be told."""
        ...

    async def unload(self, model: str, within_seconds: Seconds) -> None:
        """Back when the server has taken it, for an ensemble with its steps; also for a model that is not
        there. Its requests and its memory may take longer: the index says when it is gone."""
        ...

    async def index(self, within_seconds: Seconds) -> Index: ...

    async def describe(self, model: str, within_seconds: Seconds) -> Described: ...

    async def statistics(self, within_seconds: Seconds) -> Mapping[str, Used]:
        """Of all models that are ready, by name."""
        ...

    async def answers(self, model: str, within_seconds: Seconds) -> bool:
        """Whether a model that says it is ready does anything: one whose process was killed is ready for
        ever, and loading it changes nothing. It is cured by unload, a wait until it is gone, and load; but
        one that was asked after its process had died may say UNLOADING for ever (Triton 24.10), and is
        loaded all the same. This is a request to the model: ask only where others have failed."""
        ...

    async def close(self) -> None: ...
