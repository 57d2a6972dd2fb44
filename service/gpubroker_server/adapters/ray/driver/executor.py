"""Implements `ports.Executor` on Ray: sends orders through a driver process and brings reports back."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import structlog
from msgspec.structs import replace

from gpubroker_server.adapters.clock import boot_seconds
from gpubroker_server.adapters.ray.driver.agents import NodeAgents
from gpubroker_server.adapters.ray.driver.link import DriverKeeper
from gpubroker_server.adapters.ray.driver.reports import MALFORMED, AgentReports, ReportReader
from gpubroker_server.adapters.ray.driver.worker_calls import RayWorkerCalls
from gpubroker_server.adapters.ray.head.head import stop_head
from gpubroker_server.adapters.ray.options import RayOptions
from gpubroker_server.adapters.ray.wire import (
    GUARDS_DISKS,
    MEASURE,
    PREPARES_ENVIRONMENTS,
    TELLS_LOGS,
    OrderWriter,
    disk_order,
    least_form_for,
    log_order,
    object_order,
    pack,
    prepare_order,
    run_of,
)
from gpubroker_server.core.domain.device import DiskOrder, NodeSample
from gpubroker_server.core.domain.environment import Environment
from gpubroker_server.core.domain.leader_term import LeaderTerm
from gpubroker_server.core.domain.lease import Proof
from gpubroker_server.core.domain.orders import (
    Ended,
    Ending,
    ForgetOrder,
    Gone,
    LogName,
    NodeLost,
    NodeReport,
    NodesListed,
    Order,
    PrepareOrder,
    Report,
    RunId,
    StartOrder,
    StopOrder,
    TermRefused,
)
from gpubroker_server.core.domain.task import StopReason
from gpubroker_server.core.domain.units import Instant, Lineage, NodeName, Seconds, TaskId, Term
from gpubroker_server.ports.executor import RunPayload
from gpubroker_server.ports.store import Clock
from gpubroker_server.ports.task_objects import ObjectAnswer, ObjectQuestion

log = structlog.get_logger("gpubroker.ray")

START_PATIENCE_SECONDS = 30.0
LEAVE_SECONDS = 10.0
FORGET_SECONDS = 0.05
"""The time after which an order to forget a run is sent if no other order took it along. Such an order is not
urgent."""
NO_TERM = Term(0)
"""The term sent to the driver while another process leads: the driver then talks to no agent."""
CONNECTED = "connected"
"""The state of an executor that hears its nodes."""
STANDBY = "standby"
"""The state of an executor that has reached Ray and waits for a term."""
RAY_SAYS_SO = "Ray says that the node is dead"
UNANSWERED_BYTES = 256 * 2**20
"""Starts beyond this size that wait for a report are not sent: they are reported as never started."""


class UnansweredStart(NamedTuple):
    """A start that no report has answered yet."""

    node: NodeName
    size_bytes: int


class RayExecutor:
    """Sends orders to the node agents, and receives their reports. A driver process, an agent or a local
    head that is lost is replaced.

    Orders for a node that cannot be reached wait until it can; its agent then says which of them came too
    late. Every start is answered in the end, at the latest by a later agent that says that the start never
    arrived.
    """

    def __init__(self, options: RayOptions, clock: Clock) -> None:
        self._options = options
        self._home = options.home  # kept, because it is read in every cycle and the property reads the disk
        self._clock = clock
        self._orders = OrderWriter(options.result_limit_bytes, options.checkpoint_limit_bytes)
        self._reader = ReportReader(options.cluster, clock.now)
        self._driver = DriverKeeper(
            options, lambda: (self._lineage, self._term), self._on_message, self._on_driver_end
        )
        self.calls = RayWorkerCalls(self._driver.send, self._driver.room)
        self._leader_term: LeaderTerm | None = None
        """The term of the leader in this process; None while another process leads."""
        self._lineage = Lineage(0)
        self._agents = NodeAgents(boot_seconds)
        self._held: dict[NodeName, deque[bytes]] = {}
        """Orders for agents that have not answered."""
        self._written: dict[NodeName, list[Any]] = {}
        """Orders that wait to be sent together with later ones."""
        self._later: asyncio.TimerHandle | None = None
        self._unanswered: dict[RunId, UnansweredStart] = {}
        self._unanswered_bytes = 0
        self._reports: list[Report | TermRefused | ObjectQuestion] = []
        self._untaken_bytes = 0
        """The bytes of received messages that `reports` has not returned yet. Beyond a bound the driver
        polls no agent."""
        self._arrived = asyncio.Event()
        self._ready = asyncio.Event()
        self._left, self._flushed = asyncio.Event(), asyncio.Event()
        self._asks_for_room = False
        self._state, self._message = "stopped", "not started"
        self._store_used_mb: Mapping[NodeName, int] = {}
        """The MiB in use of each node's object store, as Ray's head has told last."""
        self._head_fault = ""
        """A message about Ray's control service while it does not answer; empty while it does."""

    async def connect(self) -> None:
        """Begin to keep a driver process connected to Ray, in the background."""
        if self._state == "stopped":
            self._state, self._message = "starting", "connecting to Ray"
        self._driver.begin()

    async def start(self, leader_term: LeaderTerm, lineage: Lineage) -> None:
        """Begin the term. Returns when the first agent has answered, or after 30 s; then the search for
        agents goes on in the background."""
        await self.stand_back()
        self._leader_term, self._lineage = leader_term, lineage
        if self._state == STANDBY:
            self._state = "starting"
            self._on_connected()
        self._driver.send("term", lineage, leader_term.term)
        await self.connect()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_PATIENCE_SECONDS):
                await self._ready.wait()

    async def send(self, orders: Sequence[Order], payloads: Mapping[TaskId, RunPayload]) -> None:
        """Send orders without waiting. A start without a payload is skipped, because its run ended between
        commit and dispatch."""
        urgent = set()
        for order in orders:
            payload = payloads.get(order.task)
            if isinstance(order, StartOrder) and (payload is None or not self._can_start(order, payload)):
                continue
            self._agents.on_order(order)
            if not isinstance(order, ForgetOrder):
                urgent.add(order.node)
            self._written.setdefault(order.node, []).append(self._orders.write(order, payload))
        for node in urgent:
            self._dispatch(node)
        if self._written and self._later is None:
            self._later = asyncio.get_running_loop().call_later(FORGET_SECONDS, self._dispatch_rest)

    async def flush(self) -> None:
        self._dispatch_rest()
        self._flushed.clear()
        if self._driver.has_driver:
            self._driver.send("flush")
            await self._flushed.wait()

    async def stand_back(self) -> None:
        """Stop sending orders, and drop orders and reports that are still here. The agents report to the
        next leader again."""
        self._leader_term = None
        self._cancel_dispatch()
        self._agents.clear()
        for waiting in (self._held, self._written, self._unanswered, self._reports):
            waiting.clear()
        self._unanswered_bytes = 0
        self._ready.clear()
        self._driver.send("term", self._lineage, NO_TERM)
        if self.is_connected:
            self._on_connected()
        self._acknowledge()

    def ask(self, nodes: Sequence[NodeName]) -> None:
        for node in nodes:
            self._driver.send("ask", node)

    def measure(self, nodes: Sequence[NodeName]) -> None:
        """Have these nodes measure their devices now. An agent that has not answered yet is left out: it
        measures before it answers."""
        for node in nodes:
            if node in self._agents:
                self._give(node, MEASURE)

    def request_resources(self, bundles: Sequence[Mapping[str, float]]) -> None:
        """Have the autoscaler of a joined cluster keep room for these bundles, used or not, until `close`."""
        self._asks_for_room = True
        self._driver.send("resources", list(bundles))

    def read_logs(self, node: NodeName, logs: Mapping[LogName, int]) -> None:
        """Ask the agent of a node for logs, each from the given byte on. An agent whose protocol lacks logs
        is not asked."""
        if self._agents.protocol(node) >= TELLS_LOGS:
            self._give(node, *(log_order(*log) for log in logs.items()))

    def look_at_disks(self, order: DiskOrder) -> None:
        if self._agents.protocol(order.node) >= GUARDS_DISKS:
            self._give(order.node, disk_order(order))

    def prepare(self, order: PrepareOrder, definition: Environment, project: bytes) -> None:
        # A node whose agent is of an earlier release never has the environment ready.
        if self._agents.protocol(order.node) >= PREPARES_ENVIRONMENTS:
            self._give(order.node, prepare_order(order, definition, project))

    def answer(self, answer: ObjectAnswer) -> None:
        if answer.node in self._agents:  # a later agent of the node asks again
            self._give(answer.node, object_order(answer))

    async def reports(self) -> Sequence[Report | TermRefused | ObjectQuestion]:
        while not self._reports:
            self._arrived.clear()
            await self._arrived.wait()
        reports, self._reports = self._reports, []
        self._acknowledge()
        return reports

    @property
    def is_connected(self) -> bool:
        return self._state == CONNECTED

    def status(self) -> Mapping[str, Any]:
        message = self._head_fault or self._message
        about = {"state": self._state, "address": self._driver.address, "message": message}
        return {**about, "home": self._home, "agents": self._agents.views(), "head_fault": self._head_fault}

    async def close(self, *, stop_cluster: bool) -> None:
        """Leave the cluster. With `stop_cluster` every run is killed and a local head ends; a joined cluster
        stays up."""
        if not self._options.is_local and self._driver.has_driver and (stop_cluster or self._asks_for_room):
            self._driver.send("leave", stop_cluster)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_SECONDS):
                    await self._left.wait()
        self._cancel_dispatch()
        await self._driver.close()
        if stop_cluster and self._options.is_local:
            await stop_head(self._options.data_dir)
        self._state, self._message = "stopped", "closed"

    @property
    def _term(self) -> Term:
        return NO_TERM if self._leader_term is None else self._leader_term.term

    def _give(self, node: NodeName, *written: tuple[Any, ...]) -> None:
        self._written.setdefault(node, []).extend(written)
        self._dispatch(node)

    def _on_message(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("reports", packed, asked_at, term):
                if term != self._term:
                    self._driver.send("taken", len(packed))  # the reports belong to an earlier term
                    return
                self._untaken_bytes += len(packed)
                received = self._reader.read(packed, boot_seconds() - asked_at)
                for report in received.reports:
                    self._on_report(received, report)
                self._agents.note_clock(received.node, received.ahead_seconds)
                self._replace_if_outdated(received.node)
            case ("answer", number, packed):
                self.calls.on_answer(number, packed)
            case ("connected",):
                self.calls.is_connected = True
                self._on_connected()
            case ("stale", node, lineage, known, term) if term == self._term:
                self._message = f"the agent of node {node} knows a later term, {known} of lineage {lineage}"
                self._report(TermRefused(NodeName(node), Lineage(lineage), Term(known)))
                self._ready.set()
            case ("dead", node, incarnation, term) if term == self._term:
                self._agents.lose(node)
                now = Instant(self._clock.now())
                self._report(NodeLost(NodeName(node), incarnation, now, RAY_SAYS_SO, confirmed=True))
            case ("nodes", names) if self._term:
                self._report(NodesListed(frozenset(map(NodeName, names)), self._clock.now()))
            case ("stores", used):
                self._store_used_mb = {NodeName(node): used_mb for node, used_mb in used}
            case ("head", fault):
                self._head_fault = fault
            case ("trouble", trouble):
                self._message = trouble
            case ("left",):
                self._left.set()
            case ("flushed",):
                self._flushed.set()

    def _on_driver_end(self, fault: str, head_ended: bool) -> bool:
        had_agents = bool(self._agents)
        self.calls.on_driver_end(fault)
        self._head_fault = ""  # the state and its message say why
        self._store_used_mb = {}
        if head_ended:
            for name, incarnation in self._agents.incarnations().items():
                self._report(NodeLost(name, incarnation, self._clock.now(), fault, confirmed=True))
        self._agents.clear()
        self._untaken_bytes = 0
        self._ready.clear()
        self._flushed.set()
        self._state, self._message = "reconnecting" if had_agents else "failed", fault
        return had_agents

    def _can_start(self, order: StartOrder, payload: RunPayload) -> bool:
        """Return True if a start may be sent, and note the start; otherwise report that it was never made."""
        run = order.task, order.fence, order.rank
        size_bytes = len(payload.arguments) + len(payload.resume_state or b"")
        reason = ""
        if 0 < self._agents.protocol(order.node) < least_form_for(payload):
            reason = (
                "the agent is of a release that would run this wrong (arrays, objects, worker sets, uploads, "
                "Ray)"
            )
        elif self._unanswered and self._unanswered_bytes + size_bytes > UNANSWERED_BYTES:
            reason = "too much is on its way to the agents"
        if reason:
            log.warning(f"{reason}; this start waits", task=order.task)
            self._report_never_started(run, self._clock.now())
            return False
        self._note_answer(run)
        self._unanswered[run] = UnansweredStart(order.node, size_bytes)
        self._unanswered_bytes += size_bytes
        return True

    def _note_answer(self, run: RunId) -> None:
        answered = self._unanswered.pop(run, None)
        if answered is not None:
            self._unanswered_bytes -= answered.size_bytes

    def _dispatch(self, node: NodeName) -> None:
        packed = pack(self._written.pop(node))
        if node in self._agents:
            self._send_orders(node, packed)
        else:
            self._held.setdefault(node, deque()).append(packed)

    def _send_orders(self, node: NodeName, packed: bytes) -> None:
        """Send orders through the driver, which drops them if they reach it after the end of the term."""
        if self._leader_term is not None and not self._leader_term.is_over(boot_seconds()):
            self._driver.send("orders", node, packed, self._leader_term.until)

    def _dispatch_rest(self) -> None:
        self._cancel_dispatch()
        for node in list(self._written):
            self._dispatch(node)

    def _cancel_dispatch(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None

    def _acknowledge(self) -> None:
        """Tell the driver how many bytes were fetched, so that it may send more."""
        if self._untaken_bytes:
            self._driver.send("taken", self._untaken_bytes)
            self._untaken_bytes = 0

    def _on_connected(self) -> None:
        if self._leader_term is None:
            self._state, self._message = STANDBY, "ready to lead, which another process does"
        else:
            self._message = self._answering() if self._agents else "waiting for node agents"

    def _answering(self) -> str:
        return "1 node answers" if len(self._agents) == 1 else f"{len(self._agents)} nodes answer"

    def _on_report(self, received: AgentReports, report: Report | ObjectQuestion) -> None:
        run = run_of(report)
        if run is not None:
            self._note_answer(run)
        self._agents.on_report(received.node, report)
        if isinstance(report, NodeSample):
            report = replace(report, store_used_mb=self._store_used_mb.get(report.node))
        self._report(report)
        match report:
            case NodeReport():
                self._on_node(report, received.protocol)
            case NodeLost():
                self._agents.lose(report.node)
            case Ended(failure=fault) if fault is not None and fault.kind == MALFORMED:
                self._kill(received.node, report)

    def _kill(self, node: NodeName, ended: Ended) -> None:
        """Kill a run whose report cannot be read, because its process may still be alive."""
        agent = self._agents.incarnations().get(node, "")
        stop = StopOrder(ended.task, ended.fence, node, agent, StopReason.CANCEL, Seconds(0.0), ended.rank)
        self._give(node, self._orders.write(stop, None))

    def _on_node(self, seen: NodeReport, protocol: int) -> None:
        """Note the answer of an agent, and send it the orders that were held for it. The agent starts
        nothing that was ordered before it answered, so a start that it does not list was never made."""
        name = seen.node.name
        listed = set(seen.runs)
        for run in [run for run, start in self._unanswered.items() if start.node == name]:
            if run not in listed:
                self._note_answer(run)
                self._report_never_started(run, seen.at)
        self._agents.see(seen, protocol)
        for packed in self._held.pop(name, ()):
            self._send_orders(name, packed)
        self._state, self._message = CONNECTED, self._answering()
        self._ready.set()

    def _replace_if_outdated(self, node: NodeName) -> None:
        """Replace the agent of a node if it is outdated and idle. From then on, orders wait for the next
        agent of that node."""
        if self._agents.to_replace(node):
            log.info("replacing an agent of an earlier release; nothing is on its node", node=node)
            self._agents.lose(node)
            self._driver.send("replace", node)

    def _report_never_started(self, run: RunId, ended_at: Instant) -> None:
        task, fence, rank = run
        self._report(Ended(task, fence, ended_at, Ending.NEVER_STARTED, rank=rank))
        self._report(Gone(task, fence, ended_at, Proof.NEVER_STARTED, rank=rank))

    def _report(self, report: Report | TermRefused | ObjectQuestion) -> None:
        self._reports.append(report)
        self._arrived.set()
