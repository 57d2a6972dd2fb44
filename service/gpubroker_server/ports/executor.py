"""Port to what runs tasks."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from gpubroker_server.core.domain.device import DiskOrder
from gpubroker_server.core.domain.leader_term import LeaderTerm
from gpubroker_server.core.domain.orders import LogName, Order, Report, TermRefused
from gpubroker_server.core.domain.submission import RunSpec
from gpubroker_server.core.domain.units import Lineage, NodeName, TaskId
from gpubroker_server.ports.task_objects import ObjectAnswer, ObjectQuestion


class RunPayload(Struct, frozen=True):
    """The data that a run needs beside its StartOrder."""

    spec: RunSpec
    arguments: bytes
    resume_state: bytes | None
    resume_uri: str | None
    attempt: int
    name: str
    tenant: str
    timeout_seconds: float | None


class Executor(Protocol):
    """Sends orders to node agents and receives their reports. No call waits for user code."""

    async def connect(self) -> None:
        """Connect, so that `start` has only to announce the term. Sends no orders and receives no reports."""

    async def start(self, leader_term: LeaderTerm, lineage: Lineage) -> None:
        """Connect and announce the term; agents answer with NodeSeen reports.

        Drops reports and orders of earlier terms.
        """

    async def send(self, orders: Sequence[Order], payloads: Mapping[TaskId, RunPayload]) -> None:
        """Send committed orders. An order that cannot be delivered comes back as a report. Nothing is sent
        after the term."""

    async def flush(self) -> None:
        """Wait until agents have taken all orders, except agents that do not answer. Call it with a
        timeout."""

    async def stand_back(self) -> None:
        """End the term: send no orders and receive no reports, but stay connected."""

    def ask(self, nodes: Sequence[NodeName]) -> None:
        """Announce the term to these nodes again; agents answer with NodeSeen."""

    def measure(self, nodes: Sequence[NodeName]) -> None:
        """Have these nodes measure their devices now; agents answer with Sampled."""

    def read_logs(self, node: NodeName, logs: Mapping[LogName, int]) -> None:
        """Have this node tell what these logs have from a byte on; its agent answers with Logged."""

    def look_at_disks(self, order: DiskOrder) -> None:
        """Have this node look for what may be deleted, or delete it; the answer is a DiskReport."""

    def answer(self, answer: ObjectAnswer) -> None:
        """Tell a run what it asked about an object. If this is lost, its agent asks again."""

    async def reports(self) -> Sequence[Report | TermRefused | ObjectQuestion]:
        """Return all reports since the last call, in order per run; waits for at least one."""

    @property
    def is_connected(self) -> bool:
        """True if it hears its nodes. This is asked in every cycle."""

    def status(self) -> Mapping[str, Any]:
        """Return the status that people read, with something of each node. Keys: state, address, message;
        `agents`, if there are any: release by node; `home`, of Ray: which local Ray, or empty."""

    async def close(self, *, stop_cluster: bool) -> None: ...
