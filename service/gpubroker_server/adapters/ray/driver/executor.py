"""Implements `ports.Executor` on Ray: keeps a driver process, hands it orders, brings reports back."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

import structlog

from gpubroker_server.adapters.clock import boot_seconds
from gpubroker_server.adapters.ray.driver.agents import Agents
from gpubroker_server.adapters.ray.driver.link import DriverLink
from gpubroker_server.adapters.ray.driver.reports import MALFORMED, ReportForm, Told
from gpubroker_server.adapters.ray.head.head import HeadRefused, HeadState, running_head, stop_head
from gpubroker_server.adapters.ray.head.reach import advice, reach
from gpubroker_server.adapters.ray.options import RayOptions
from gpubroker_server.adapters.ray.processes import Watched
from gpubroker_server.adapters.ray.wire import OrderForm, key_of, pack
from gpubroker_server.core.domain.leader_term import Tenure
from gpubroker_server.core.domain.orders import (
    Ended,
    Ending,
    ForgetOrder,
    Gone,
    NodeLost,
    NodeSeen,
    Order,
    Report,
    RunId,
    StartOrder,
    StopOrder,
)
from gpubroker_server.core.domain.task import StopReason
from gpubroker_server.core.domain.units import Fence, Instant, NodeName, Seconds, TaskId, Term
from gpubroker_server.ports.store import Clock, RunPayload

log = structlog.get_logger("gpubroker.ray")

START_PATIENCE_SECONDS = 30.0
FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 5.0
LEAVE_SECONDS = 10.0
FORGET_SECONDS = 0.05
"""To forget a run is never urgent: it travels with the next order, or so much later."""
NOBODY = Term(0)
"""In place of a term, to the driver: another process leads, so say nothing to anybody."""
STANDBY = "standby"
"""The state of an executor that has reached Ray and waits for a term."""
UNANSWERED_BYTES = 256 * 2**20
"""Starts of more than this are not on their way at once; what is beyond comes back as never started."""


class OnItsWay(NamedTuple):
    """A start of which no report has come yet."""

    node: NodeName
    size_bytes: int


class RayExecutor:
    """Survives the loss of its driver process, of an agent and of a local head: it gets new ones.

    Orders for a node that cannot be reached wait until it can; its agent then says which came too late. Every
    start is answered in the end, if only by the word of a later agent that it never arrived.
    """

    def __init__(self, options: RayOptions, clock: Clock) -> None:
        self._options = options
        self._home = options.home  # asked for in every cycle, and looks at the disk
        self._clock = clock
        self._order_form = OrderForm(options.result_limit_bytes, options.checkpoint_limit_bytes)
        self._report_form = ReportForm(options.cluster, clock.now)
        self._broker = uuid4().hex
        self._tenure: Tenure | None = None
        """None while another process leads."""
        self._keeping: asyncio.Task[None] | None = None
        self._finding: asyncio.Future[HeadState] | None = None
        self._driver: DriverLink | None = None
        self._agents = Agents(boot_seconds)
        self._held: dict[NodeName, deque[bytes]] = {}
        self._written: dict[NodeName, list[Any]] = {}
        """Orders that wait for company on their way."""
        self._later: asyncio.TimerHandle | None = None
        self._unanswered: dict[RunId, OnItsWay] = {}
        self._unanswered_bytes = 0
        self._reports: list[Report] = []
        self._untaken_bytes = 0
        """What the driver sent and nobody has fetched; beyond a bound the driver asks agents for no more."""
        self._arrived = asyncio.Event()
        self._ready = asyncio.Event()
        self._left = asyncio.Event()
        self._flushed = asyncio.Event()
        self._state, self._message, self._address = "stopped", "not started", options.address or ""

    async def connect(self) -> None:
        """Have a driver process that has reached Ray; it goes on trying in the background."""
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keep())

    async def start(self, tenure: Tenure) -> None:
        """Back when the first agent has answered, or after 30 s; it goes on trying in the background."""
        await self.stand_back()
        self._tenure = tenure
        if self._state == STANDBY:
            self._state = "starting"
            self._on_connected()
        self._tell("term", tenure.term)
        await self.connect()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_PATIENCE_SECONDS):
                await self._ready.wait()

    async def send(self, orders: Sequence[Order], payloads: Mapping[TaskId, RunPayload]) -> None:
        """Never waits. A start without a payload is left out: its run ended between commit and dispatch."""
        urgent = set()
        for order in orders:
            payload = payloads.get(order.task)
            if isinstance(order, StartOrder) and (payload is None or not self._has_room_for(order, payload)):
                continue
            self._agents.order(order)
            if not isinstance(order, ForgetOrder):
                urgent.add(order.node)
            self._written.setdefault(order.node, []).append(self._order_form.write(order, payload))
        for node in urgent:
            self._dispatch(node)
        if self._written and self._later is None:
            self._later = asyncio.get_running_loop().call_later(FORGET_SECONDS, self._dispatch_rest)

    async def flush(self) -> None:
        self._dispatch_rest()
        self._flushed.clear()
        if self._driver is not None:
            self._tell("flush")
            await self._flushed.wait()

    async def stand_back(self) -> None:
        """What agents have not answered yet they will tell whoever leads next."""
        self._tenure = None
        if self._later is not None:
            self._later.cancel()
            self._later = None
        self._agents.clear()
        for waiting in (self._held, self._written, self._unanswered, self._reports):
            waiting.clear()
        self._unanswered_bytes = 0
        self._ready.clear()
        self._tell("term", NOBODY)
        if self._state == "connected":
            self._on_connected()
        if self._untaken_bytes:
            self._tell("taken", self._untaken_bytes)
            self._untaken_bytes = 0

    def ask(self, nodes: Sequence[NodeName]) -> None:
        for node in nodes:
            self._tell("ask", node)

    async def reports(self) -> Sequence[Report]:
        while not self._reports:
            self._arrived.clear()
            await self._arrived.wait()
        reports, self._reports = self._reports, []
        if self._untaken_bytes:
            self._tell("taken", self._untaken_bytes)
            self._untaken_bytes = 0
        return reports

    def status(self) -> Mapping[str, Any]:
        about = {"state": self._state, "address": self._address, "message": self._message}
        return {**about, "home": self._home, "agents": self._agents.views()}

    async def close(self, *, stop_cluster: bool) -> None:
        """With `stop_cluster` every run is killed and a local head ends; a joined cluster stays up."""
        if stop_cluster and not self._options.is_local and self._driver is not None:
            self._tell("leave")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_SECONDS):
                    await self._left.wait()
        if self._later is not None:
            self._later.cancel()
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        if self._finding is not None:
            await asyncio.gather(self._finding, return_exceptions=True)
        if stop_cluster and self._options.is_local:
            await stop_head(self._options.data_dir)
        self._state, self._message = "stopped", "closed"

    def _has_room_for(self, order: StartOrder, payload: RunPayload) -> bool:
        """Notes a start that is sent, and answers one that is not."""
        size_bytes = len(payload.arguments) + len(payload.resume_state or b"")
        if self._unanswered and self._unanswered_bytes + size_bytes > UNANSWERED_BYTES:
            log.warning("too much is on its way to the agents; this start waits", task=order.task)
            self._never_started(order.task, order.fence, order.rank, self._clock.now())
            return False
        self._answer((order.task, order.fence, order.rank))
        self._unanswered[order.task, order.fence, order.rank] = OnItsWay(order.node, size_bytes)
        self._unanswered_bytes += size_bytes
        return True

    def _answer(self, run: RunId) -> None:
        answered = self._unanswered.pop(run, None)
        if answered is not None:
            self._unanswered_bytes -= answered.size_bytes

    def _dispatch(self, node: NodeName) -> None:
        packed = pack(self._written.pop(node))
        if node in self._agents:
            self._tell_orders(node, packed)
        else:
            self._held.setdefault(node, deque()).append(packed)

    def _tell_orders(self, node: NodeName, packed: bytes) -> None:
        """The driver drops those that it sees only when the time is over."""
        if self._tenure is not None and not self._tenure.is_over(boot_seconds()):
            self._tell("orders", node, packed, self._tenure.until)

    def _dispatch_rest(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None
        for node in list(self._written):
            self._dispatch(node)

    async def _keep(self) -> None:
        """One driver after another, and a local head for it where none was given."""
        pause = FIRST_PAUSE_SECONDS
        self._state, self._message = "starting", "connecting to Ray"
        while True:
            self._ready.clear()
            try:
                self._message = await self._drive(await self._find_head())
                self._state = "reconnecting" if self._agents else "failed"
                log.warning("no Ray driver process; starting another", fault=self._message)
            except (HeadRefused, OSError) as fault:
                self._state, self._message = "failed", advice(fault, self._options)
                log.error("Ray cannot be reached; trying again", fault=self._message)
            except Exception as fault:
                self._state, self._message = "failed", repr(fault)
                log.exception("the Ray driver process is given up; starting another")
            pause = FIRST_PAUSE_SECONDS if self._agents else min(2 * pause, LONGEST_PAUSE_SECONDS)
            self._agents.clear()
            await asyncio.sleep(pause)

    async def _find_head(self) -> HeadState | None:
        """The local one, or None and the given one answers. Raises HeadRefused, OSError.

        Not cut short by `close`: a local head that nobody knows of would stay behind.
        """
        if not self._options.is_local:
            await reach(self._address)
            return None
        self._finding = asyncio.ensure_future(running_head(self._options))
        head = await asyncio.shield(self._finding)
        self._address = head.address
        return head

    async def _drive(self, head: HeadState | None) -> str:
        """Why the driver has ended, when it has. A head that ends takes the driver with it."""
        driver = await DriverLink.open(self._options)
        watched = None
        try:
            watched = Watched(head.process, driver.kill) if head is not None else None
            self._driver, self._untaken_bytes = driver, 0
            driver.tell(*self._opening(head))
            await driver.listen(self._on_message)
            if watched is None or not watched.ended:
                return driver.fault
            self._lose_nodes("the local Ray head ended")
        except ProcessLookupError:
            pass
        finally:
            self._driver = None
            self._flushed.set()
            if watched is not None:
                watched.close()
            await driver.close()
        return "the local Ray head ended"

    def _opening(self, head: HeadState | None) -> tuple[Any, ...]:
        options = self._options
        config = options.agent_config(str(head.keepalive) if head is not None else "").to_json()
        local_node = options.node_name if options.is_local else ""
        return self._address, local_node, config, self._broker, self._term

    @property
    def _term(self) -> Term:
        return NOBODY if self._tenure is None else self._tenure.term

    def _answering(self) -> str:
        return "1 node answers" if len(self._agents) == 1 else f"{len(self._agents)} nodes answer"

    def _on_message(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("reports", packed, asked_at, term):
                if term != self._term:
                    self._tell("taken", len(packed))  # what it says was true in an earlier term
                    return
                self._untaken_bytes += len(packed)
                told = self._report_form.read(packed, boot_seconds() - asked_at)
                for report in told.reports:
                    self._on_report(told, report)
                self._replace_agents()
            case ("connected",):
                self._on_connected()
            case ("trouble", what):
                self._message = what
            case ("left",):
                self._left.set()
            case ("flushed",):
                self._flushed.set()

    def _on_connected(self) -> None:
        if self._tenure is None:
            self._state, self._message = STANDBY, "ready to lead, which another process does"
        else:
            self._message = self._answering() if self._agents else "waiting for node agents"

    def _on_report(self, told: Told, report: Report) -> None:
        key = key_of(report)
        if key is not None:
            self._answer(key)
        self._agents.hear(told.node, report)
        self._say(report)
        match report:
            case NodeSeen():
                self._on_node(report, told.protocol)
            case NodeLost():
                self._agents.lose(report.node)
            case Ended(failure=fault) if fault is not None and fault.kind == MALFORMED:
                self._kill(told.node, report)

    def _kill(self, node: NodeName, ended: Ended) -> None:
        """What it says cannot be read, but it may live."""
        agent = self._agents.incarnations().get(node, "")
        stop = StopOrder(ended.task, ended.fence, node, agent, StopReason.CANCEL, Seconds(0.0), ended.rank)
        self._written.setdefault(node, []).append(self._order_form.write(stop, None))
        self._dispatch(node)

    def _on_node(self, seen: NodeSeen, protocol: int) -> None:
        """This agent starts nothing ordered before it answered: what it does not have has never begun."""
        name = seen.node.name
        there = set(seen.runs)
        for run in [run for run, start in self._unanswered.items() if start.node == name]:
            if run not in there:
                self._answer(run)
                self._never_started(*run, seen.at)
        self._agents.see(seen, protocol)
        for packed in self._held.pop(name, ()):
            self._tell_orders(name, packed)
        self._state, self._message = "connected", self._answering()
        self._ready.set()

    def _replace_agents(self) -> None:
        """What is ordered from now on waits for the next agent of that node."""
        for node in list(self._agents.to_replace()):
            log.info("replacing an agent of an earlier release; nothing is on its node", node=node)
            self._agents.lose(node)
            self._tell("replace", node)

    def _lose_nodes(self, why: str) -> None:
        now = Instant(self._clock.now())
        for name, incarnation in self._agents.incarnations().items():
            self._say(NodeLost(name, incarnation, now, why))

    def _never_started(self, task: TaskId, fence: Fence, rank: int, at: Instant) -> None:
        self._say(Ended(task, fence, at, Ending.NEVER_STARTED, rank=rank))
        self._say(Gone(task, fence, at, "never_started", rank=rank))

    def _say(self, report: Report) -> None:
        self._reports.append(report)
        self._arrived.set()

    def _tell(self, *parts: Any) -> None:
        if self._driver is not None:
            self._driver.tell(*parts)
