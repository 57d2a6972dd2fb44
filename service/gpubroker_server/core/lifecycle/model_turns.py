"""Turns of models: a model that no request needs makes room for others that wait, and a model that is asked
all the time makes room for others of its priority when its turn is over.

An idle model makes room at once for a task or model of its priority, and for any model that a request asks
for. For a task of lower priority it makes room some time after its last request. Gateways know which models
are in use. They are asked only while something waits that could have the memory.
"""

from collections.abc import Iterator, Sequence
from math import inf

from msgspec import Struct
from msgspec.structs import replace

from gpubroker_server.core.domain.decisions import Decision, write_move
from gpubroker_server.core.domain.demand import Demand, may_use_device, may_use_node
from gpubroker_server.core.domain.device import Device, Node
from gpubroker_server.core.domain.model_orders import ModelsInUse
from gpubroker_server.core.domain.models import min_residency_seconds, turn_seconds
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.ranks import needs_gpus
from gpubroker_server.core.domain.task import Move, Task, TaskState, model_of
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.lifecycle.model_lifecycle import is_asked_since_it_left, standing
from gpubroker_server.core.world.queue import EquivalenceClass
from gpubroker_server.core.world.world import World


class _Rivals(Struct, frozen=True):
    """The waiting tasks and models that could have the memory of one model."""

    equal: bool = False
    """True if a task or a model of the model's priority waits."""
    lower_model: int | None = None
    """The lowest priority of the models that a request asks for, if it is below the model's."""
    lower_task: int | None = None
    """The lowest priority of all that wait, if it is below the model's."""


def is_contended(world: World, now: Instant, policy: Policy) -> bool:
    """Return True if something waits for which a model would make room if it were idle, or if a model makes
    room."""
    return any(
        model_of(task).yields
        or rivals.equal
        or rivals.lower_model is not None
        or (rivals.lower_task is not None and now >= yields_to_tasks_at(world, task, policy))
        for task, rivals in _contests(world)
    )


def turns(world: World, in_use: ModelsInUse, now: Instant, policy: Policy) -> list[Decision]:
    """Return a decision for each model that makes room for others from now on, or no longer does."""
    wanted_later = {equivalence.demand.answered_by for equivalence in world.queue.classes.values()}
    decisions: list[Decision] = []
    for task, rivals in _contests(world):
        assert task.started_at is not None
        terms = model_of(task)
        name = terms.model
        room_for: list[int] = []
        if name in in_use.names or name in wanted_later or world.models.asking(name):
            if rivals.equal and now >= turn_ends_at(task, terms.asked_priority, policy, is_model=True):
                room_for.append(terms.asked_priority)
        else:
            if rivals.equal:
                room_for.append(terms.asked_priority)
            if rivals.lower_model is not None and now >= _yields_to_models_at(task, policy):
                room_for.append(rivals.lower_model)
            is_idle = name not in in_use.recent and now >= yields_to_tasks_at(world, task, policy)
            if rivals.lower_task is not None and is_idle:
                room_for.append(rivals.lower_task)
        after = _making_room(task, min(room_for, default=None))
        if after is not task:
            write = write_move(task, Move.CHANGED, holder=after.holder, priority=standing(after, now))
            decisions.append(Decision(task.id, "turn", tasks=(write,)))
    return decisions


def _making_room(task: Task, least_priority: int | None) -> Task:
    """Return the model as one that makes room from this priority on, or for nothing with None. If it does so
    already, return the task itself."""
    terms = model_of(task)
    if least_priority is None:
        return replace(task, holder=replace(terms, yields=False)) if terms.yields else task
    if terms.yields and terms.yields_to == least_priority:
        return task
    return replace(task, holder=replace(terms, yields=True, yields_to=least_priority))


def yields_to_tasks_at(world: World, task: Task, policy: Policy) -> Instant:
    """Return when a loaded model makes room for tasks of lower priority, if no request comes and gateways
    know of no request since their last report."""
    used_at = max(model_of(task).usage.at, world.models.answered_at(model_of(task).model))
    return Instant(max(used_at, task.started_at or used_at) + policy.yields_to_tasks_seconds)


def _yields_to_models_at(task: Task, policy: Policy) -> Instant:
    """Return when an idle model may make room for a model of lower priority: after its minimum residency.

    A model that has left before and was asked again keeps its memory for a turn. Otherwise requests for the
    lower model that come in its short pauses would have the two loaded over and over.
    """
    assert task.started_at is not None
    terms = model_of(task)
    seconds = min_residency_seconds(terms.load_seconds, policy.min_residency_seconds)
    if terms.left_at is not None:
        seconds = max(seconds, turn_seconds(terms.load_seconds))
    return Instant(task.started_at + seconds)


def _contests(world: World) -> Iterator[tuple[Task, _Rivals]]:
    """Yield each model in memory that may make room, with its rivals."""
    held = [task for task in world.models.live() if _takes_turns(task)]
    if not held:
        return
    waiting = [equivalence for equivalence in world.queue.classes.values() if needs_gpus(equivalence.demand)]
    models = [task for task in world.models.live() if _is_asked_for(task, world)] if waiting else []
    for task in held:
        yield task, _rivals_of(task, waiting, models, world)


def _rivals_of(task: Task, waiting: list[EquivalenceClass], models: list[Task], world: World) -> _Rivals:
    if (place := _place_of(task, world)) is None:
        return _Rivals()
    asked_priority = model_of(task).asked_priority
    rivals = [equivalence for equivalence in waiting if _could_have(equivalence.demand, *place)]
    priorities = {priority for rival in rivals for groups in rival.bands.values() for priority in groups}
    lower_models = (model.priority for model in models if _could_have(model.demand, *place))
    return _Rivals(
        equal=asked_priority in priorities,
        lower_model=min((at for at in lower_models if at < asked_priority), default=None),
        lower_task=min((at for at in priorities if at < asked_priority), default=None),
    )


def never_leaves(task: Task) -> bool:
    """Return True for a pinned model and for a server's base cost."""
    terms = model_of(task)
    return terms.pinned or not terms.model


def turn_ends_at(task: Task, priority: int, policy: Policy, *, is_model: bool) -> float:
    """Return when a loaded model makes room at the latest for a waiter of its own priority, or at the
    earliest for a model of a lower one; infinite for any other waiter."""
    terms = model_of(task)
    if task.started_at is None or never_leaves(task) or priority > terms.asked_priority:
        return inf
    if priority == terms.asked_priority:
        return task.started_at + turn_seconds(terms.load_seconds)
    return _yields_to_models_at(task, policy) if is_model else inf


def pinned_in_the_way(world: World, demand: Demand) -> list[Task]:
    """Return the pinned models whose memory such a task could have if they left."""
    loaded = (task for task in world.models.live() if task.state is TaskState.RUNNING)
    pinned = (task for task in loaded if model_of(task).pinned)
    return [task for task in pinned if (place := _place_of(task, world)) and _could_have(demand, *place)]


def _takes_turns(task: Task) -> bool:
    return task.state is TaskState.RUNNING and not never_leaves(task)


def _place_of(task: Task, world: World) -> tuple[Node, list[Device]] | None:
    node = None if task.node is None else world.nodes.get(task.node)
    if node is None:
        return None
    return node, [world.ledgers[lease.device].device for lease in world.leases_of(task)]


def _is_asked_for(task: Task, world: World) -> bool:
    """Return True for a model that waits for memory, for which no room is being made yet, and for which a
    request has come since it was last in memory."""
    is_waiting = task.id in world.queue and task.id not in world.pledges
    return is_waiting and is_asked_since_it_left(task)


def _could_have(demand: Demand, node: Node, devices: Sequence[Device]) -> bool:
    """Return True if such a task may be placed on one of these devices of the node."""
    return any(
        may_use_node(part, node) and any(may_use_device(part, device) for device in devices)
        for part in demand.bundles or (demand,)
    )
