"""A running elastic gang, and a preemptor that needs ranks that it can lose."""

from collections.abc import Sequence
from typing import Any

from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.device import Node
from gpubroker_server.core.domain.orders import (
    NodeReport,
    Order,
    ReportedDevice,
)
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Instant, Mib, NodeName, TaskId
from gpubroker_server.core.lifecycle.deadlines import ObservationWindow, due
from gpubroker_server.core.lifecycle.reconcile import InventoryRules, reconcile

from tests.builders import (
    GIB,
    NOW,
    a_device,
    a_sample,
    a_task,
    a_world,
    commit,
    submit,
)
from tests.core.gangs import (
    Agents,
    a_cluster,
    a_gang,
    admit_all,
    bundles,
)

BIG = 60 * GIB
LATER = Instant(NOW + 10.0)


def elastic(count: int = 4, least: int = 2, **fields: Any) -> Task:
    demand = {"gpu_mb": BIG, "cpu": 1.0}
    return a_gang("gang", *bundles(count, **demand), priority=10, min_ranks=least, **fields)


def at_work(gang: Task | None = None, *parts: Any) -> Agents:
    """Ranks 0 and 1 on n1, ranks 2 and 3 on n2, all of which have run for ten seconds."""
    world = a_cluster(gang or elastic(), *parts)
    admit_all(world)
    agents = Agents(world)
    agents.run()
    agents.now = LATER
    return agents


def on_one_node(gang: Task | None = None, *parts: Any) -> Agents:
    """Ranks 0 and 1 of four on n1, which is full, for ten seconds."""
    devices = [a_device(f"gpu{index}", "n1") for index in (0, 1)]
    world = a_world(*devices, gang or elastic(), *parts)
    admit_all(world)
    agents = Agents(world)
    agents.run()
    agents.now = LATER
    return agents


def comes(gang: Agents, id: str = "urgent", priority: int = 80, **fields: Any) -> list[Decision]:
    """Another task is submitted and planned."""
    submit(gang.world, a_task(id, priority=priority, **{"gpu_mb": BIG, "gpus": 1, **fields}))
    return plan(gang)


def plan(gang: Agents) -> list[Decision]:
    gang.world.measure(a_sample(device, gang.now) for device in gang.world.ledgers)
    return admit_all(gang.world, gang.policy, gang.now)


def orders_of(decisions: Sequence[Decision], kind: type[Order]) -> list[Any]:
    return [order for decision in decisions for order in decision.orders if isinstance(order, kind)]


def shrunk() -> Agents:
    """Its rank 2, which is on n2, was asked to leave for `urgent`."""
    gang = at_work()
    comes(gang)
    return gang


def wait(gang: Agents, seconds: float) -> list[Decision]:
    """Time passes; the leader has looked all the while, and half a second ago."""
    gang.now = Instant(gang.now + seconds)
    watch = ObservationWindow(since=Instant(NOW - 60.0), last=Instant(gang.now - 0.5))
    decisions = due(gang.world, gang.now, gang.policy, watch)
    commit(gang.world, decisions, gang.now)
    return decisions


def seen(gang: Agents, node: str, *ranks: int) -> list[Order]:
    devices = tuple(ReportedDevice(f"gpu{index}", "H100", index, Mib(80 * GIB), True) for index in (0, 1))
    known = tuple((gang.id, gang.fence, rank) for rank in ranks)
    row: Node = gang.world.nodes[NodeName(node)]
    answer = NodeReport(row, devices, known, gang.now)
    decisions = reconcile(gang.world, answer, gang.now, gang.policy, InventoryRules("test"))
    commit(gang.world, decisions)
    orders: list[Any] = [order for decision in decisions for order in decision.orders]
    return orders


def state_of(gang: Agents, id: str = "urgent") -> TaskState:
    return gang.world.tasks[TaskId(id)].state
