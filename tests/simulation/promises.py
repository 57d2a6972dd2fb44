"""Whether the logged end of a pledge is the true one."""

from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.lease import LeaseState, Pledge, PledgeEnd
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.ranks import nodes_of
from gpubroker_server.core.domain.task import Move
from gpubroker_server.core.domain.units import TaskId, node_key, node_of
from gpubroker_server.core.world.world import World


def is_true(
    pledge: Pledge, end: PledgeEnd, decision: Decision, world: World, policy: Policy, now: float
) -> bool:
    """`world`: before the decision is carried out."""
    written = {write.task.id: write for write in decision.tasks}
    mine = written.get(pledge.preemptor)
    match end:
        case PledgeEnd.CONSUMED:
            taken = {lease.device for lease in decision.leases if lease.holder == pledge.preemptor}
            if mine is not None:
                taken |= {node_key(node) for node in nodes_of(mine.task)}
            return mine is not None and mine.what in (Move.ADMITTED, Move.STARTED) and pledge.device in taken
        case PledgeEnd.TAKEN:
            return world.tasks[TaskId(decision.subject)].priority > pledge.priority
        case PledgeEnd.DISSOLVED:
            return _failed(pledge, decision, world, policy, now)
        case PledgeEnd.WITHDRAWN:
            task = world.tasks.get(pledge.preemptor)
            waits = task is not None and (task.id in world.queue or task.is_moving)
            return mine is not None or not waits


def _failed(pledge: Pledge, decision: Decision, world: World, policy: Policy, now: float) -> bool:
    """What was to come did not come in time, or a device went with its node."""
    mine = world.pledges[pledge.preemptor]
    if decision.why in ("node_lost", "node_seen"):
        return any(node_of(device) == decision.subject for device in mine)
    late = max(other.deadline_at for other in mine.values()) + policy.pledge_patience_seconds
    leases = [lease for claim in world.leases.values() for lease in claim.values()]
    stuck = {ls.device for ls in leases if ls.state in (LeaseState.QUARANTINED, LeaseState.RELEASING)}
    return now >= late or bool(stuck & mine.keys())
