"""The driver's side of the conversation with one node agent."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import ray
import structlog
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gpubroker_server.adapters.clock import boot_seconds
from gpubroker_server.adapters.ray.agent.node_agent import NodeAgent
from gpubroker_server.adapters.ray.options import AgentConfig
from gpubroker_server.adapters.ray.peers import Peer
from gpubroker_server.adapters.ray.wire import (
    PROTOCOL,
    SPOKEN,
    TRIES_PEERS,
    pack,
    peers_order,
    write_reports,
)

log = structlog.get_logger("gpubroker.driver")

POLL_SECONDS = 20.0
ANSWER_SECONDS = 20.0
"""An agent is replaced if its answer to a poll comes later than this after the end of the poll's timeout.
Its runs go on."""
ANNOUNCE_SECONDS = 60.0
"""The time that an agent gets to start, to find the runs of an earlier agent, and to answer. After an agent
was replaced for its silence, the next one gets twice as long, because on a busy machine it may only be
slow."""
LONGEST_ANNOUNCE_SECONDS = 960.0
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
AGENT_PATIENCE_SECONDS = 20.0
"""The node of an agent that is away for longer is reported lost, even if Ray says that it is alive."""
CALLS_AT_ONCE = 4


class ReportListener(Protocol):
    """Sends messages to the service."""

    async def send(self, *parts: Any) -> None: ...

    async def send_reports(self, packed: bytes, asked_at: float, term: int) -> None:
        """Send reports of an agent. `asked_at` is the time of `boot_seconds` at which the agent was polled.
        `term` is the term of the leader for which it was polled."""

    async def room(self) -> None:
        """Return when there is room for more reports."""


class NodeLink:
    """Finds or starts the agent of one node, announces the term to it, and carries orders there and reports
    back."""

    def __init__(
        self,
        ray_node: str,
        config: AgentConfig,
        broker: str,
        lineage: int,
        term: int,
        listener: ReportListener,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self.ray_node = ray_node
        self.store_bytes = 0
        """The size of the node's object store; 0 if it has none."""
        self._config = config
        self._broker = broker
        self._lineage, self._term = lineage, term
        self._listener = listener
        self._tasks = tasks
        self._agent: Any = None
        """The agent; None while none has answered this term."""
        self._last_agent: Any = None
        """The agent of the last term in which one answered."""
        self._incarnation = ""
        self._protocol = PROTOCOL
        """The newest protocol that both the agent and this release speak."""
        self._queue: deque[bytes] = deque()
        self._peers: Sequence[Peer] = ()
        self._calls: set[asyncio.Task[None]] = set()
        self._reported_lost = False
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._announce_seconds = ANNOUNCE_SECONDS
        self._answered_at = time.monotonic()
        self._talking = tasks.create_task(self._talk())

    def send(self, packed: bytes) -> None:
        """Send orders. While the agent is away, they wait; the agent knows which of them are outdated."""
        self._queue.append(packed)
        self._send_queued()

    def give_peers(self, peers: Sequence[Peer]) -> None:
        """Have the agent try to connect to these peers, now or once it answers."""
        self._peers = peers
        if peers and self._agent is not None and self._protocol >= TRIES_PEERS:
            self.send(pack([peers_order(peers)]))

    async def flush(self) -> None:
        """Return when the agent has received all orders that were sent, or does not answer."""
        while self._calls:
            await asyncio.wait(set(self._calls))

    @property
    def has_peers(self) -> bool:
        return bool(self._peers)

    @property
    def node(self) -> str:
        return self._config.node

    def change_term(self, lineage: int, term: int) -> None:
        """Change the term, and drop the queued orders of the previous one."""
        self._lineage, self._term = lineage, term
        self._last_agent = self._agent or self._last_agent
        self._queue.clear()
        self._incarnation = ""
        self._reported_lost = False
        self._answered_at = time.monotonic()
        self.announce_again()

    def announce_again(self) -> None:
        self._agent = None
        self._talking.cancel()
        self._talking = self._tasks.create_task(self._talk())

    async def replace(self) -> None:
        """End the agent, so that the next one runs the software that is installed now. The node's runs go
        on."""
        agent, self._agent = self._agent, None
        if agent is not None:
            await asyncio.to_thread(ray.kill, agent)
            self.announce_again()

    def close(self) -> None:
        self._talking.cancel()

    async def dismiss(self) -> None:
        """Have the agent end all runs and processes of this service on the node. Nothing happens if this
        process has never led."""
        agent, self._agent = self._agent or self._last_agent, None
        self.close()
        if agent is not None:
            try:
                await agent.leave.remote()
            except RayError:
                log.info("the agent has left", node=self.node)

    async def report_dead(self) -> None:
        """Report that Ray says that the node is dead."""
        if self._incarnation:
            await self._listener.send("dead", self.node, self._incarnation, self._term)

    async def report_lost(self, why: str) -> None:
        if self._incarnation:
            now = time.time()
            packed = write_reports(self.node, now, [("node_lost", now, self._incarnation, why)])
            await self._listener.send_reports(packed, boot_seconds(), self._term)

    async def _talk(self) -> None:
        """Talk to the node's agent again and again while this process has a term. Without one, the agent
        listens to the process that leads."""
        while self._term:
            try:
                await self._converse()
            except RayError as fault:
                await self._on_absence(_why(fault))
            except Exception as fault:
                log.exception("the conversation with an agent failed", node=self.node)
                await self._on_absence(repr(fault))
            self._agent = None
            await asyncio.sleep(self._pause_seconds)
            self._pause_seconds = min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS)

    async def _converse(self) -> None:
        """Talk to one agent until it is gone, hangs, or gets another announcement."""
        agent = await asyncio.to_thread(self._find_agent)
        try:
            if await self._is_welcome(agent):
                self._pause_seconds = FIRST_PAUSE_SECONDS
                await self._poll(agent)
        except ActorUnavailableError:
            if self._reported_lost:
                # A restored control service may take the agent for alive though it ended with its node.
                log.error("the agent cannot be reached; replacing it", node=self.node)
                await asyncio.to_thread(ray.kill, agent)
            raise
        except TimeoutError as fault:
            if isinstance(fault, RayError):
                raise  # the agent answered, with a fault of that name
            log.error("the agent does not answer; replacing it", node=self.node)
            await asyncio.to_thread(ray.kill, agent)
            if self._agent is None:
                await self._on_absence(f"it did not answer within {self._announce_seconds:g} s")
                self._announce_seconds = min(2 * self._announce_seconds, LONGEST_ANNOUNCE_SECONDS)

    def _find_agent(self) -> Any:
        """Return the agent of the node; it is started if there is none. Blocks while Ray's control service
        does not answer."""
        options = {
            "name": f"agent/{self.node}",
            "namespace": self._config.namespace,
            "lifetime": "detached",
            "get_if_exists": True,
            "num_cpus": 0,
            "num_gpus": 0,
            "max_restarts": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(self.ray_node, soft=False),
        }
        return ray.remote(NodeAgent).options(**options).remote(self._config.to_json())

    async def _is_welcome(self, agent: Any) -> bool:
        async with asyncio.timeout(self._announce_seconds):
            answer = await self._announce(agent)
        self._announce_seconds = ANNOUNCE_SECONDS
        match answer:
            case ("welcome", incarnation):
                self._incarnation = incarnation
                self._agent = agent
                self._reported_lost = False
                self._send_queued()
                self.give_peers(self._peers)
            case ("stale", lineage, term):
                log.warning("the agent knows a later term", node=self.node, term=term, known_lineage=lineage)
                await self._listener.send("stale", self.node, lineage, term, self._term)
            case (_, fault):
                log.warning(
                    "replacing an agent that speaks no form of this release", node=self.node, fault=fault
                )
                await asyncio.to_thread(ray.kill, agent)
        return bool(answer[0] == "welcome")

    async def _announce(self, agent: Any) -> Any:
        """Announce the term in the newest protocol that both sides speak, and return the agent's answer."""
        config, term = self._config.to_json(), (self._lineage, self._term)
        for protocol in reversed(SPOKEN):
            answer = await agent.announce.remote(protocol, config, self._broker, *term)
            if answer[0] != "outdated":
                self._protocol = protocol
                break
        return answer

    async def _poll(self, agent: Any) -> None:
        """Forward reports until another announcement is made."""
        acknowledged = 0
        while acknowledged >= 0:
            await self._listener.room()
            self._answered_at, asked_at = time.monotonic(), boot_seconds()
            async with asyncio.timeout(POLL_SECONDS + ANSWER_SECONDS):
                reply = await agent.poll.remote(self._incarnation, acknowledged, POLL_SECONDS)
            acknowledged, packed = reply
            if packed:
                await self._listener.send_reports(packed, asked_at, self._term)

    async def _on_absence(self, cause: str) -> None:
        log.warning("the agent is away", node=self.node, fault=cause)
        await self._listener.send("trouble", f"the agent of node {self.node} is away: {cause}")
        away_seconds = time.monotonic() - self._answered_at
        if away_seconds > AGENT_PATIENCE_SECONDS and not self._reported_lost:
            self._reported_lost = True
            await self.report_lost(f"its agent has been away for {away_seconds:.0f} s: {cause}")

    def _send_queued(self) -> None:
        while self._queue and self._agent is not None and len(self._calls) < CALLS_AT_ONCE:
            term = self._lineage, self._term
            call = self._tasks.create_task(self._deliver(self._agent, term, self._queue.popleft()))
            self._calls.add(call)
            call.add_done_callback(self._on_delivered)

    async def _deliver(self, agent: Any, term: tuple[int, int], packed: bytes) -> None:
        """Deliver orders. If that fails, announce the term again: the agent then lists its runs, which shows
        the orders that were lost."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await agent.orders.remote(self._protocol, *term, packed)
        except (RayError, TimeoutError) as fault:
            log.warning("orders did not reach the agent", node=self.node, fault=_why(fault))
            if agent is self._agent:
                self.announce_again()

    def _on_delivered(self, call: "asyncio.Task[None]") -> None:
        self._calls.discard(call)
        self._send_queued()


def _why(fault: Exception) -> str:
    """Return the text of a fault; of a fault in the agent, only that of the agent's own exception, because
    Ray adds a traceback."""
    if isinstance(fault, RayTaskError):
        return repr(fault.cause)
    return str(fault) or repr(fault)
