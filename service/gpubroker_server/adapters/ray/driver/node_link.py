"""The driver's end of the conversation with one node agent."""

import asyncio
import time
from collections import deque
from typing import Any, Protocol

import ray
import structlog
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gpubroker_server.adapters.clock import boot_seconds
from gpubroker_server.adapters.ray.agent.node_agent import NodeAgent
from gpubroker_server.adapters.ray.options import AgentConfig
from gpubroker_server.adapters.ray.wire import PROTOCOL, SPOKEN, write_reports

log = structlog.get_logger("gpubroker.driver")

POLL_SECONDS = 20.0
ANSWER_SECONDS = 20.0
"""How much later than asked for an agent may answer. One that hangs is replaced; its runs go on."""
ANNOUNCE_SECONDS = 60.0
"""For an agent to be started, to find what an earlier one left, and to answer."""
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
AGENT_PATIENCE_SECONDS = 20.0
"""A node whose agent cannot be had for so long is told lost, though Ray says that it is alive."""
CALLS_AT_ONCE = 4


class Listener(Protocol):
    """Who hears what agents tell: the service, through the driver."""

    async def tell(self, *parts: Any) -> None: ...

    async def tell_reports(self, packed: bytes, asked_at: float, term: int) -> None:
        """`asked_at`: in `boot_seconds`, when the agent was asked for them; `term`: who asked."""
        ...

    async def room(self) -> None:
        """Back when there is room for more reports."""
        ...


class NodeLink:
    """Finds or makes the agent, announces the term, carries orders there and reports back; over and over."""

    def __init__(
        self,
        ray_node: str,
        config: AgentConfig,
        broker: str,
        term: int,
        listener: Listener,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self.ray_node = ray_node
        self._config = config
        self._broker = broker
        self._term = term
        self._listener = listener
        self._tasks = tasks
        self._agent: Any = None
        """None while no agent has answered this term."""
        self._last_agent: Any = None
        """Of the last term in which one has."""
        self._incarnation = ""
        self._protocol = PROTOCOL
        """That the agent speaks."""
        self._queue: deque[bytes] = deque()
        self._calls: set[asyncio.Task[None]] = set()
        self._told_lost = False
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._answered_at = time.monotonic()
        self._talking = tasks.create_task(self._talk())

    def send(self, packed: bytes) -> None:
        """Orders for an agent that is away wait for it; it will know which of them are outdated."""
        self._queue.append(packed)
        self._flush()

    async def flush(self) -> None:
        """Back when the agent has taken all that was sent, or does not answer."""
        while self._calls:
            await asyncio.wait(set(self._calls))

    @property
    def node(self) -> str:
        return self._config.node

    def change_term(self, term: int) -> None:
        """What was ordered in another term is dropped."""
        self._term = term
        self._last_agent = self._agent or self._last_agent
        self._queue.clear()
        self._incarnation = ""
        self._told_lost = False
        self._answered_at = time.monotonic()
        self.announce_again()

    def announce_again(self) -> None:
        self._agent = None
        self._talking.cancel()
        self._talking = self._tasks.create_task(self._talk())

    async def replace(self) -> None:
        """End the agent, for one of the software that is installed now. What runs on its node goes on."""
        agent, self._agent = self._agent, None
        if agent is not None:
            await asyncio.to_thread(ray.kill, agent)
            self.announce_again()

    def close(self) -> None:
        self._talking.cancel()

    async def dismiss(self) -> None:
        """Kill everything of ours on the node; nothing where this process has never led."""
        agent, self._agent = self._agent or self._last_agent, None
        self.close()
        if agent is not None:
            try:
                await agent.leave.remote()
            except RayError:
                log.info("the agent has left", node=self._config.node)

    async def tell_lost(self, why: str) -> None:
        if self._incarnation:
            now = time.time()
            lost = ("node_lost", now, self._incarnation, why)
            packed = write_reports(self._config.node, now, [lost])
            await self._listener.tell_reports(packed, boot_seconds(), self._term)

    async def _talk(self) -> None:
        """Without a term to nobody: the agent listens to whoever leads."""
        while self._term:
            try:
                await self._converse()
            except RayError as fault:
                await self._on_absence(_why(fault))
            except Exception as fault:
                log.exception("the conversation with an agent failed", node=self._config.node)
                await self._on_absence(repr(fault))
            self._agent = None
            await asyncio.sleep(self._pause_seconds)
            self._pause_seconds = min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS)

    async def _converse(self) -> None:
        """With one agent, until it is gone, hangs, or hears another announcement."""
        agent = await asyncio.to_thread(self._find_agent)
        try:
            if await self._is_welcome(agent):
                self._pause_seconds = FIRST_PAUSE_SECONDS
                await self._listen(agent)
        except TimeoutError as fault:
            if isinstance(fault, RayError):
                raise  # the agent answered, with a fault of that name
            log.error("the agent does not answer; replacing it", node=self._config.node)
            await asyncio.to_thread(ray.kill, agent)
            if self._agent is None:
                await self._on_absence(f"it did not answer within {ANNOUNCE_SECONDS:g} s")

    def _find_agent(self) -> Any:
        """The agent that is there, or a new one. Blocks for as long as Ray's control service does."""
        options = {
            "name": f"agent/{self._config.node}",
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
        async with asyncio.timeout(ANNOUNCE_SECONDS):
            verdict, detail = await self._announced(agent)
        if verdict == "outdated":
            log.warning("replacing an agent that nobody can speak with", node=self._config.node, fault=detail)
            await asyncio.to_thread(ray.kill, agent)
        elif verdict == "stale":
            log.warning("this term is over; the agent knows a later one", node=self._config.node, term=detail)
        else:
            self._incarnation = detail
            self._agent = agent
            self._told_lost = False
            self._flush()
        return bool(verdict == "welcome")

    async def _announced(self, agent: Any) -> tuple[str, str]:
        """Its answer in the newest form that it speaks as well."""
        config = self._config.to_json()
        for protocol in reversed(SPOKEN):
            verdict, detail = await agent.announce.remote(protocol, config, self._broker, self._term)
            if verdict != "outdated":
                self._protocol = protocol
                break
        return verdict, detail

    async def _listen(self, agent: Any) -> None:
        """Forward reports until another announcement is made."""
        acknowledged = 0
        while acknowledged >= 0:
            await self._listener.room()
            self._answered_at, asked_at = time.monotonic(), boot_seconds()
            async with asyncio.timeout(POLL_SECONDS + ANSWER_SECONDS):
                reply = await agent.poll.remote(self._incarnation, acknowledged, POLL_SECONDS)
            acknowledged, packed = reply
            if packed:
                await self._listener.tell_reports(packed, asked_at, self._term)

    async def _on_absence(self, why: str) -> None:
        log.warning("the agent is away", node=self._config.node, fault=why)
        await self._listener.tell("trouble", f"the agent of node {self._config.node} is away: {why}")
        away_seconds = time.monotonic() - self._answered_at
        if away_seconds > AGENT_PATIENCE_SECONDS and not self._told_lost:
            self._told_lost = True
            await self.tell_lost(f"its agent has been away for {away_seconds:.0f} s: {why}")

    def _flush(self) -> None:
        while self._queue and self._agent is not None and len(self._calls) < CALLS_AT_ONCE:
            call = self._tasks.create_task(self._deliver(self._agent, self._term, self._queue.popleft()))
            self._calls.add(call)
            call.add_done_callback(self._on_delivered)

    async def _deliver(self, agent: Any, term: int, packed: bytes) -> None:
        """What may be lost is asked for: the agent tells at each announcement which runs it has."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await agent.orders.remote(self._protocol, term, packed)
        except (RayError, TimeoutError) as fault:
            log.warning("orders did not reach the agent", node=self._config.node, fault=_why(fault))
            if agent is self._agent:
                self.announce_again()

    def _on_delivered(self, call: "asyncio.Task[None]") -> None:
        self._calls.discard(call)
        self._flush()


def _why(fault: Exception) -> str:
    """What the agent itself raised, where it did; Ray's text around that is a traceback."""
    if isinstance(fault, RayTaskError):
        return repr(fault.cause)
    return str(fault) or repr(fault)
