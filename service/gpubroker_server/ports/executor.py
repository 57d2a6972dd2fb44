"""Port to the executor, which runs tasks on nodes."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from gpubroker_server.core.domain.device import DiskOrder
from gpubroker_server.core.domain.environment import Environment
from gpubroker_server.core.domain.leader_term import LeaderTerm
from gpubroker_server.core.domain.orders import LogName, Order, PrepareOrder, Report, TermRefused
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
    environment: str = ""
    """The key of the run's environment; empty for that of the service."""


class Executor(Protocol):
    """Sends orders to node agents and receives their reports. No call waits for user code."""

    async def connect(self) -> None:
        """Connect, so that `start` has only to announce the term. Sends no orders and receives no reports."""

    async def start(self, leader_term: LeaderTerm, lineage: Lineage) -> None:
        """Connect and announce the term; agents answer with NodeSeen reports.

        Drops reports and orders of earlier terms.
        """

    async def send(self, orders: Sequence[Order], payloads: Mapping[TaskId, RunPayload]) -> None:
        """Send committed orders. A report tells of each order that cannot be delivered. No order is sent
        after the end of the term."""

    async def flush(self) -> None:
        """Wait until agents have taken all orders, except agents that do not answer. The caller sets a
        timeout."""

    async def stand_back(self) -> None:
        """End the term: send no orders and receive no reports, but stay connected."""

    def ask(self, nodes: Sequence[NodeName]) -> None:
        """Announce the term to these nodes again; agents answer with NodeSeen."""

    def measure(self, nodes: Sequence[NodeName]) -> None:
        """Have these nodes measure their devices now; agents answer with Sampled."""

    def read_logs(self, node: NodeName, logs: Mapping[LogName, int]) -> None:
        """Have this node send each of these logs from the given byte on; its agent answers with Logged."""

    def look_at_disks(self, order: DiskOrder) -> None:
        """Have this node look for what may be deleted, or delete it; the answer is a DiskReport."""

    def prepare(self, order: PrepareOrder, definition: Environment, project: bytes) -> None:
        """Have this node prepare an environment; its agent answers with EnvironmentReported. `project` is the
        archive of a pyproject.toml and uv.lock, empty if the environment has none."""

    def answer(self, answer: ObjectAnswer) -> None:
        """Send a run the answer to its question about an object. If the answer is lost, the run's agent asks
        again."""

    async def reports(self) -> Sequence[Report | TermRefused | ObjectQuestion]:
        """Wait for at least one report, and return all reports since the last call. Reports of one run are in
        order."""

    @property
    def is_connected(self) -> bool:
        """True if reports of nodes can arrive. The leader reads this in every cycle."""

    def status(self) -> Mapping[str, Any]:
        """Return the status that people read. The keys are `state`, `address` and `message`; `agents` maps a
        node to the release of its agent, if there are agents; `home` names the local Ray, or is empty."""

    async def close(self, *, stop_cluster: bool) -> None: ...
