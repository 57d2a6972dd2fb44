"""Orders to model servers and to the sender of inferences, and the reports that come back, as plain values.

A model server cannot refuse an order of an older term. So the models that a server has loaded are never
concluded from the answer to an order, but from the server's index, which is read again and again.
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
    """One model of a server's repository. For a model with several versions, `stage` is the first of READY,
    UNLOADING, LOADING and ABSENT that a version is in."""

    model: str
    stage: ModelState
    versions: tuple[str, ...] = ()
    reason: str = ""
    """The reason that the server gives for a failed load; empty if the model was never loaded or was
    unloaded."""


class _AtServer(Struct, frozen=True):
    task: TaskId
    fence: Fence
    server: str
    model: str


class _ModelOrder(_AtServer, frozen=True, kw_only=True):
    steps: tuple[str, ...] = ()
    """The models that are loaded and unloaded with an ensemble."""

    def concerns(self, other: "_ModelOrder") -> bool:
        """Return True if both orders change the same model of one server."""
        own_models, other_models = {self.model, *self.steps}, {other.model, *other.steps}
        return self.server == other.server and not own_models.isdisjoint(other_models)


class LoadOrder(_ModelOrder, frozen=True):
    devices: tuple[tuple[DeviceKey, Mib], ...]
    sized: bool = False
    """True if the model's size is known, so that other models of known size may be loaded on its devices
    meanwhile."""


class UnloadOrder(_ModelOrder, frozen=True):
    """Unload the model. Requests that are under way may take up to `grace_seconds`."""

    grace_seconds: Seconds


class CheckOrder(_ModelOrder, frozen=True):
    """Check whether the model's process is gone, as failing requests suggest; if so, load the model again on
    its devices."""

    devices: tuple[tuple[DeviceKey, Mib], ...]
    sized: bool = False


ModelOrder = LoadOrder | UnloadOrder | CheckOrder


def is_in_the_way(under_way: ModelOrder, order: ModelOrder) -> bool:
    """Return True if `order` has to wait for `under_way`: both change the same model; or both load on one
    device, and the size of one of the models has yet to be measured there."""
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
    """Models that had a request within `triton.yields_to_tasks_seconds`."""


class ServerGone(Struct, frozen=True):
    """The process of a model server, as in `Model.process`, is gone."""

    process: str


class ServerIndex(Struct, frozen=True):
    """The index of a server. Reports of one server arrive in the order in which they were read."""

    server: str
    at: Instant
    models: Mapping[str, IndexedModel]
    under_way: frozenset[tuple[TaskId, Fence]] = frozenset()
    """Claims with an unanswered order. The index says nothing reliable about them."""
    address: str = ""
    process: str = ""
    """The server process that has answered, as in `Model.process`."""

    def stage_of(self, model: str) -> ModelState:
        """Return the state of a model. The server itself (an empty name) is READY, because it has
        answered."""
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
    """Send one inference to its server. Dispatch adds the input."""

    rank: int = 0


class DropOrder(Struct, frozen=True):
    """Drop the answer to an inference. The server finishes what it has begun."""

    task: TaskId
    fence: Fence


InferenceOrder = InferOrder | DropOrder


ServerReport = ServerIndex | ServerGone | ModelsInUse
"""A report about a model server, not about a run."""
