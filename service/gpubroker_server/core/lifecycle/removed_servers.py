"""Models of servers that are no longer in the settings: nobody loads, unloads or looks at them any more."""

from collections.abc import Collection

from gpubroker_server.core.domain.decisions import Decision, Outcome, withdrawn, write_move
from gpubroker_server.core.domain.lease import LeaseState, quarantine
from gpubroker_server.core.domain.orders import Ending, Failure
from gpubroker_server.core.domain.task import Move, Task, TaskState
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.world.fold import Fold
from gpubroker_server.core.world.unconfirmed_ends import Proof
from gpubroker_server.core.world.world import World


def give_up(world: World, servers: Collection[str], now: Instant) -> list[Decision]:
    """`servers`: those that there are. What others have may be in memory still: it counts until somebody says
    that it is gone, or the server is back and does. What is under notice has its deadline."""
    decisions = []
    for task in world.homes.live():
        assert task.model is not None
        if task.model.server in servers or task.state is TaskState.STOPPING:
            continue
        if not task.model.model and task.is_active:
            decisions.append(_released(world, task, now))
        else:
            decisions.append(_given_up(world, task, task.model.server, now))
    return decisions


def _released(world: World, task: Task, now: Instant) -> Decision:
    """What a server takes itself is the word of its operator, who has taken it back."""
    fold = Fold(world, task.id, now)
    fold.release_leases(task.fence, 0, Proof.HOLDER)
    fold.move(Move.SUCCEEDED, "server_removed", finished_at=now)
    decision = fold.decision()
    assert decision is not None, "it has just ended"
    return decision


def _given_up(world: World, task: Task, server: str, now: Instant) -> Decision:
    message = (
        f"its server {server} is no longer in triton.servers; what it has in memory counts as used until an "
        "operator says that it is gone (gpubroker quarantine), or the server is back in the settings"
    )
    held = [lease for lease in world.leases_of(task) if lease.state is not LeaseState.QUARANTINED]
    return Decision(
        task.id,
        "server_removed",
        tasks=(write_move(task, Move.FAILED, finished_at=now),),
        leases=tuple(quarantine(lease, now) for lease in held if task.is_active),
        pledges=withdrawn(world.pledges.get(task.id, {})),
        outcome=Outcome(task.id, task.fence, Ending.LOST, now, failure=Failure("server_removed", message)),
    )
