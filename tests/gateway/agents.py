"""Node agents for the gateway's tests: every order arrives, and the test says what becomes of it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpubroker_server.core.domain.device import Device, DiskOrder, Node
from gpubroker_server.core.domain.environment import Environment
from gpubroker_server.core.domain.leader_term import LeaderTerm
from gpubroker_server.core.domain.model_orders import DropOrder, InferOrder
from gpubroker_server.core.domain.orders import (
    LogName,
    NodeReport,
    Order,
    PrepareOrder,
    Report,
    ReportedDevice,
    RunId,
)
from gpubroker_server.core.domain.units import Instant, Lineage, NodeName, TaskId
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.executor import RunPayload
from gpubroker_server.ports.task_objects import ObjectAnswer


class Agents:
    """An Executor that keeps the orders it is given, and reports nothing by itself."""

    is_connected = True

    def __init__(self) -> None:
        self.sent: list[Order] = []
        self.payloads: dict[TaskId, RunPayload] = {}
        self.looked: list[DiskOrder] = []
        self.prepared: list[tuple[PrepareOrder, Environment, bytes]] = []

    async def connect(self) -> None:
        """They are connected."""

    async def start(self, leader_term: LeaderTerm, lineage: Lineage) -> None:
        """They answer when a test says so."""

    async def send(self, orders: Sequence[Order], payloads: Mapping[TaskId, RunPayload]) -> None:
        self.sent += orders
        self.payloads.update(payloads)

    async def flush(self) -> None:
        """Orders arrive at once."""

    async def stand_back(self) -> None:
        """There is one leader."""

    def ask(self, nodes: Sequence[NodeName]) -> None:
        """They answer when a test says so."""

    def measure(self, nodes: Sequence[NodeName]) -> None:
        """A test measures."""

    def read_logs(self, node: NodeName, logs: Mapping[LogName, int]) -> None:
        """A test writes the logs."""

    def look_at_disks(self, order: DiskOrder) -> None:
        self.looked.append(order)

    def prepare(self, order: PrepareOrder, definition: Environment, project: bytes) -> None:
        self.prepared.append((order, definition, project))

    def answer(self, answer: ObjectAnswer) -> None:
        """No run asks for an object."""

    async def reports(self) -> Sequence[Report]:
        raise AssertionError("the turns of this leader are made by its test, which brings the reports")

    def status(self) -> Mapping[str, Any]:
        return {"state": "connected", "address": "here", "message": ""}

    async def close(self, *, stop_cluster: bool) -> None:
        """There is nothing to close."""


class Servers:
    """The part of InferenceDispatcher that a cycle of the leader needs. The test answers what is sent."""

    def __init__(self) -> None:
        self.sent: list[InferOrder] = []

    def send(self, order: InferOrder, _stored: bytes) -> None:
        self.sent.append(order)

    def drop(self, _order: DropOrder) -> None:
        """A test does not answer it."""


def answer_of(world: World, at: Instant, node: Node, devices: Iterable[Device]) -> NodeReport:
    """Return the answer of the agent of a node with these devices.

    The agent knows every run that has a lease there, and has not looked for its process.
    """
    claims = (
        holding.lease
        for key in world.by_node.get(node.name, ())
        for holding in world.ledgers[key].holdings.values()
    )
    runs: set[RunId] = {(TaskId(lease.holder), lease.fence, lease.rank) for lease in claims}
    found = tuple(
        ReportedDevice(one.uuid, one.kind, one.index, one.physical_mb, one.simulated, one.parent, one.split)
        for one in devices
    )
    return NodeReport(node, found, tuple(sorted(runs)), at)
