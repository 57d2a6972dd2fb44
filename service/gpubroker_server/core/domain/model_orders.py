"""What the leader asks of servers of models, and what it sees there. Plain values, both ways.

A server cannot refuse an order of a leader whose term is over. What it has is therefore never taken from an
order's answer: it is what its index says, read again and again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import DeviceKey, Fence, Instant, Mib, Seconds, TaskId


class Stage(StrEnum):
    """Where a model is, as the server's index says."""

    ABSENT = "absent"
    """Never loaded, or unloaded, or its last load failed: it holds nothing, as far as the server knows."""
    LOADING = "loading"
    READY = "ready"
    UNLOADING = "unloading"
    """It takes no new requests, and still has those that it took before."""


@dataclass(frozen=True, slots=True)
class IndexedModel:
    """One model of the repository. Of several versions the one that is furthest from being absent counts:
    READY before UNLOADING before LOADING before ABSENT."""

    model: str
    stage: Stage
    versions: tuple[str, ...] = ()
    """Those that are READY, sorted."""
    reason: str = ""
    """Why it is not there, in the server's words; empty for what was never loaded or was unloaded."""


@dataclass(frozen=True, slots=True)
class LoadOrder:
    task: TaskId
    fence: Fence
    server: str
    model: str
    devices: tuple[tuple[DeviceKey, Mib], ...]


@dataclass(frozen=True, slots=True)
class UnloadOrder:
    """Requests that it has may end, for `grace_seconds` at most."""

    task: TaskId
    fence: Fence
    server: str
    model: str
    grace_seconds: Seconds


@dataclass(frozen=True, slots=True)
class CheckOrder:
    """Requests to a model that is there have failed as those to one do whose process is gone: if it is, the
    model is loaded anew, on the devices that it has."""

    task: TaskId
    fence: Fence
    server: str
    model: str
    devices: tuple[tuple[DeviceKey, Mib], ...]


ModelOrder = LoadOrder | UnloadOrder | CheckOrder


@dataclass(frozen=True, slots=True)
class ServerSeen:
    """The index of a server, with what is on its way there: for those nothing is to be concluded from it.

    Two of one server are told in the order in which they were read.
    """

    server: str
    at: Instant
    models: Mapping[str, IndexedModel]
    under_way: frozenset[tuple[TaskId, Fence]] = frozenset()
    """Claims with an order that has not been answered."""

    def stage_of(self, model: str) -> Stage:
        """The server itself is there: it has answered."""
        if not model:
            return Stage.READY
        return self.models[model].stage if model in self.models else Stage.ABSENT

    def versions_of(self, model: str) -> tuple[str, ...]:
        return self.models[model].versions if model in self.models else ()


def load_order(task: Task, devices: tuple[tuple[DeviceKey, Mib], ...]) -> LoadOrder:
    assert task.model is not None
    return LoadOrder(task.id, task.fence, task.model.server, task.model.model, devices)


def check_order(task: Task, devices: tuple[tuple[DeviceKey, Mib], ...]) -> CheckOrder:
    assert task.model is not None
    return CheckOrder(task.id, task.fence, task.model.server, task.model.model, devices)


def unload_order(task: Task, grace_seconds: Seconds) -> UnloadOrder:
    assert task.model is not None
    return UnloadOrder(task.id, task.fence, task.model.server, task.model.model, grace_seconds)


@dataclass(frozen=True, slots=True)
class InferOrder:
    """Have it answered. What is asked is attached by dispatch on its way."""

    task: TaskId
    fence: Fence
    server: str
    model: str
    rank: int = 0


@dataclass(frozen=True, slots=True)
class DropOrder:
    """Nobody wants the answer any more. What the server has begun it ends for nobody."""

    task: TaskId
    fence: Fence


InferenceOrder = InferOrder | DropOrder
