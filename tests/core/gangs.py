"""Gangs in one line, and an agent that says what each rank does."""

from collections.abc import Sequence
from typing import Any

from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.holders import MemberState
from gpubroker_server.core.domain.lease import LeaseState, Proof
from gpubroker_server.core.domain.orders import (
    Ended,
    Ending,
    Failure,
    Gone,
    GoOrder,
    NodeLost,
    Order,
    Ready,
    Started,
    StopOrder,
)
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Task, members_of
from gpubroker_server.core.domain.units import Instant, NodeName, TaskId
from gpubroker_server.core.lifecycle.runs import apply_reports
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.world.world import World

from tests.builders import GIB, NOW, a_demand, a_device, a_task, a_world, commit

POLICY = Policy()


def bundles(count: int, **fields: Any) -> tuple[Demand, ...]:
    """So many ranks alike."""
    return (a_demand(**fields),) * count


def a_gang(id: str = "gang", *parts: Demand, **fields: Any) -> Task:
    """A pending gang; takes the fields of Task, and `strategy` and `min_ranks`."""
    return a_task(id, bundles=parts, **fields)


def admit_all(world: World, policy: Policy = POLICY, now: float = NOW) -> list[Decision]:
    decisions = list(plan_cycle(world, policy, Instant(now)).decisions)
    commit(world, decisions)
    return decisions


def where(world: World, id: str = "gang") -> list[str]:
    """The node of each rank; empty if it is not placed."""
    return [member.node for member in members_of(world.tasks[TaskId(id)])]


class Agents:
    """What the agents of all nodes tell the leader of one gang."""

    def __init__(self, world: World, id: str = "gang", policy: Policy = POLICY) -> None:
        self.world = world
        self.id = TaskId(id)
        self.policy = policy
        self.fence = world.tasks[self.id].fence
        self.now = Instant(NOW)

    @property
    def task(self) -> Task:
        return self.world.tasks[self.id]

    def tell(self, *reports: Any) -> Sequence[Order]:
        """What the leader orders because of that."""
        decisions = apply_reports(self.world, reports, self.now, self.policy)
        commit(self.world, decisions)
        orders: list[Any] = [order for decision in decisions for order in decision.orders]
        return orders

    def started(self, rank: int) -> Started:
        return Started(self.id, self.fence, self.now, pid=1, rank=rank)

    def ready(self, rank: int) -> Ready:
        return Ready(self.id, self.fence, self.now, f"10.0.0.{rank}:4000", rank)

    def ended(self, rank: int, ending: Ending = Ending.SUCCEEDED) -> Ended:
        result = b"%d" % rank if ending is Ending.SUCCEEDED else None
        failure = Failure("exception", "boom") if ending is Ending.FAILED else None
        return Ended(self.id, self.fence, self.now, ending, result, failure=failure, rank=rank)

    def gone(self, rank: int, proof: Proof = Proof.PROCESS_ABSENT) -> Gone:
        return Gone(self.id, self.fence, self.now, proof, rank=rank)

    def node_lost(self, node: str) -> NodeLost:
        return NodeLost(NodeName(node), f"{node}-1", self.now, "dead")

    def run(self) -> None:
        """All ranks get ready and begin."""
        ranks = [member.rank for member in members_of(self.task)]
        orders = self.tell(*map(self.started, ranks), *map(self.ready, ranks))
        assert sum(isinstance(order, GoOrder) for order in orders) == len(ranks)


def a_cluster(*parts: Any) -> World:
    """Two nodes of two devices."""
    devices = [a_device(f"gpu{index}", node) for node in ("n1", "n2") for index in (0, 1)]
    return a_world(*devices, *parts)


def admitted(**fields: Any) -> Agents:
    """Ranks 0 and 1 on n1, rank 2 on n2."""
    world = a_cluster(a_gang("gang", *bundles(3, gpu_mb=50 * GIB, cpu=2.0), **fields))
    admit_all(world)
    assert where(world) == ["n1", "n1", "n2"]
    return Agents(world)


def running(**fields: Any) -> Agents:
    gang = admitted(**fields)
    gang.run()
    return gang


def states(task: Task) -> list[MemberState]:
    return [member.state for member in members_of(task)]


def leases(gang: Agents) -> dict[int, LeaseState]:
    """Rank -> state of its lease, without those that are released."""
    found = gang.world.leases.get((gang.id, gang.fence), {}).values()
    return {lease.rank: lease.state for lease in found}


def stopped(orders: Any) -> list[int]:
    return sorted(order.rank for order in orders if isinstance(order, StopOrder))


def outcome_of(gang: Agents, *reports: Any) -> Any:
    """The newest outcome in what the reports decide."""
    decisions = apply_reports(gang.world, reports, gang.now, gang.policy)
    commit(gang.world, decisions)
    return [decision.outcome for decision in decisions][-1]
