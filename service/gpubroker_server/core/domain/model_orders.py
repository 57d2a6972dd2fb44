"""Orders to model servers and to the sender of inferences, and what is reported back. Plain values.

A model server cannot refuse an order of an older term. So what it has loaded is never concluded from an
order's answer, but from its index, which is read again and again.
"""

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct

from gpubroker_server.core.domain.task import Task, model_of
from gpubroker_server.core.domain.units import DeviceKey, Fence, Instant, Mib, Seconds, TaskId


class ModelState(StrEnum):
    ABSENT = "absent"
    """The model was never loaded, was unloaded, or its last load failed: as far as the server knows, it holds
    nothing."""
    LOADING = "loading"
    READY = "ready"
    UNLOADING = "unloading"
    """The model takes no new requests and still has earlier ones."""


class IndexedModel(Struct, frozen=True):
    """One model of the repository. With several versions, the first of READY, UNLOADING, LOADING, ABSENT that
    one is in."""

    model: str
    stage: ModelState
    versions: tuple[str, ...] = ()
    reason: str = ""
    """The server's reason for which the model is not loaded; empty if it was never loaded or was unloaded."""


class _AtServer(Struct, frozen=True):
    task: TaskId
    fence: Fence
    server: str
    model: str


class _ModelOrder(_AtServer, frozen=True, kw_only=True):
    steps: tuple[str, ...] = ()
    """The models that are loaded and unloaded with an ensemble."""

    def concerns(self, other: "_ModelOrder") -> bool:
        """Return True if both orders change a model of one server."""
        own_models, other_models = {self.model, *self.steps}, {other.model, *other.steps}
        return self.server == other.server and not own_models.isdisjoint(other_models)


class LoadOrder(_ModelOrder, frozen=True):
    devices: tuple[tuple[DeviceKey, Mib], ...]
    sized: bool = False
    """True if the model's size is known, so that other models of known size may be loaded on its devices
    meanwhile."""


class UnloadOrder(_ModelOrder, frozen=True):
    """Unload the model. Its current requests may take up to `grace_seconds`."""

    grace_seconds: Seconds


class CheckOrder(_ModelOrder, frozen=True):
    """Requests fail as if the model's process were gone: check, and if it is, load it again on its
    devices."""

    devices: tuple[tuple[DeviceKey, Mib], ...]
    sized: bool = False


ModelOrder = LoadOrder | UnloadOrder | CheckOrder


def is_in_the_way(under_way: ModelOrder, order: ModelOrder) -> bool:
    """Return True if an order has to wait for one that is being carried out: they change one model, or load
    on one device, and the size of either model has yet to be measured there."""
    if order.concerns(under_way):
        return True
    if isinstance(order, UnloadOrder) or isinstance(under_way, UnloadOrder):
        return False
    if order.sized and under_way.sized:
        return False
    return not {key for key, _ in order.devices}.isdisjoint(key for key, _ in under_way.devices)


class ModelsInUse(Struct, frozen=True):
    """The models that requests need, as the gateways report them."""

    names: frozenset[str]
    """Models that have a request, under way or waiting, at any gateway."""
    recent: frozenset[str] = frozenset()
    """Models that had one within `triton.yields_to_tasks_seconds`."""


class ServerGone(Struct, frozen=True):
    """The process of a server, as `Model` has it, is no longer there."""

    process: str


class ServerIndex(Struct, frozen=True):
    """The index of a server. Reports of one server arrive in the order in which they were read."""

    server: str
    at: Instant
    models: Mapping[str, IndexedModel]
    under_way: frozenset[tuple[TaskId, Fence]] = frozenset()
    """Claims with an unanswered order: the index says nothing about those."""
    address: str = ""
    process: str = ""
    """The process of `Model` that has answered."""

    def stage_of(self, model: str) -> ModelState:
        """The server itself (no model) is READY: it has answered."""
        if not model:
            return ModelState.READY
        return self.models[model].stage if model in self.models else ModelState.ABSENT

    def versions_of(self, model: str) -> tuple[str, ...]:
        return self.models[model].versions if model in self.models else ()


def load_order(task: Task, devices: tuple[tuple[DeviceKey, Mib], ...]) -> LoadOrder:
    model = model_of(task)
    return LoadOrder(*_about(task), devices, steps=model.steps, sized=model.sized)


def check_order(task: Task, devices: tuple[tuple[DeviceKey, Mib], ...]) -> CheckOrder:
    model = model_of(task)
    return CheckOrder(*_about(task), devices, steps=model.steps, sized=model.sized)


def unload_order(task: Task, grace_seconds: Seconds) -> UnloadOrder:
    return UnloadOrder(*_about(task), grace_seconds, steps=model_of(task).steps)


def _about(task: Task) -> tuple[TaskId, Fence, str, str]:
    model = model_of(task)
    return task.id, task.fence, model.server, model.model


class InferOrder(_AtServer, frozen=True):
    """Send this inference. Dispatch adds its input."""

    rank: int = 0


class DropOrder(Struct, frozen=True):
    """Drop the answer. What the server has begun, it finishes."""

    task: TaskId
    fence: Fence


InferenceOrder = InferOrder | DropOrder


ServerReport = ServerIndex | ServerGone | ModelsInUse
"""A report about a server of models, not about a run."""
