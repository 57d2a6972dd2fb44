"""Turns of models: a model that no request needs makes room at once for an equal that waits, and one that is
asked all the time does so when its turn is over.

Gateways know which models are in use. They are asked only while something waits that could have the memory.
"""

from collections.abc import Iterator, Set

from msgspec.structs import replace

from gpubroker_server.core.domain.decisions import Decision, write_move
from gpubroker_server.core.domain.demand import may_use_node
from gpubroker_server.core.domain.models import turn_seconds
from gpubroker_server.core.domain.ranks import needs_gpus
from gpubroker_server.core.domain.task import Move, Task, TaskState, model_of
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.lifecycle.model_lifecycle import standing
from gpubroker_server.core.world.queue import EquivalenceClass
from gpubroker_server.core.world.world import World


def is_contended(world: World) -> bool:
    """Return True if an equal waits for a model's memory, or none waits any more for that of one that
    yields."""
    return any(has_rival or yields for _, has_rival, yields in _turns(world))


def turns(world: World, in_use: Set[str], now: Instant) -> list[Decision]:
    """The models that yield to their equals from now on, or no longer do."""
    wanted_later = {equivalence.demand.answered_by for equivalence in world.queue.classes.values()}
    decisions: list[Decision] = []
    for task, has_rival, yielded in _turns(world):
        assert task.started_at is not None
        terms = model_of(task)
        name = terms.model
        is_idle = not (name in in_use or name in wanted_later or world.models.asking(name))
        is_over = now - task.started_at >= turn_seconds(terms.load_seconds)
        yields = has_rival and (is_idle or is_over)
        if yields != yielded:
            after = replace(task, holder=replace(terms, yields=yields))
            write = write_move(task, Move.CHANGED, holder=after.holder, priority=standing(after, now))
            decisions.append(Decision(task.id, "turn", tasks=(write,)))
    return decisions


def _turns(world: World) -> Iterator[tuple[Task, bool, bool]]:
    """(model in memory, whether an equal waits that could have its memory, whether it yields now)"""
    held = [task for task in world.models.live() if _takes_turns(task)]
    waiting = (
        [equivalence for equivalence in world.queue.classes.values() if needs_gpus(equivalence.demand)]
        if held
        else []
    )
    for task in held:
        has_rival = any(_is_rival(equivalence, task, world) for equivalence in waiting)
        yield task, has_rival, model_of(task).yields


def _takes_turns(task: Task) -> bool:
    """True of a loaded model, unless it never leaves: pinned models and a server's base cost do not."""
    terms = model_of(task)
    return task.state is TaskState.RUNNING and bool(terms.model) and not terms.pinned


def _is_rival(equivalence: EquivalenceClass, task: Task, world: World) -> bool:
    asked_priority = model_of(task).asked_priority
    has_equal = any(asked_priority in groups for groups in equivalence.bands.values())
    node = None if task.node is None else world.nodes.get(task.node)
    return has_equal and node is not None and may_use_node(equivalence.demand, node)
