"""The driver's end of the conversation with one node agent."""

import asyncio
import logging
import time
from collections import deque
from typing import Any, Protocol

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from service.adapters.ray.agent import NodeAgent
from service.adapters.ray.options import AgentConfig
from service.adapters.ray.wire import PROTOCOL, write_reports

log = logging.getLogger("gpubroker.driver")

POLL_SECONDS = 20.0
ANSWER_SECONDS = 20.0
"""How much later than asked for an agent may answer. One that hangs is replaced; its runs go on."""
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
AGENT_PATIENCE_SECONDS = 20.0
"""A node whose agent cannot be had for so long is told lost, though Ray says that it is alive."""
CALLS_AT_ONCE = 4


class Listener(Protocol):
    async def tell(self, *parts: Any) -> None: ...


class NodeLink:
    """Finds or makes the agent, announces the term, carries orders there and reports back; over and over."""

    def __init__(
        self, ray_node: str, config: AgentConfig, broker: str, term: int, listener: Listener
    ) -> None:
        self.ray_node = ray_node
        self._config = config
        self._broker = broker
        self._term = term
        self._listener = listener
        self._agent: Any = None
        """None while no agent has answered this term."""
        self._incarnation = ""
        self._queue: deque[bytes] = deque()
        self._calls: set[asyncio.Task[None]] = set()
        self._told_lost = False
        self._answered_at = time.monotonic()
        self._talking = asyncio.create_task(self._talk())

    def send(self, packed: bytes) -> None:
        """Orders for an agent that is away wait for it; it will know which of them are outdated."""
        self._queue.append(packed)
        self._flush()

    def announce_again(self, term: int) -> None:
        self._term = term
        self._agent = None
        self._talking.cancel()
        self._talking = asyncio.create_task(self._talk())

    def close(self) -> None:
        self._talking.cancel()

    async def dismiss(self) -> None:
        """Kill everything of ours on the node."""
        agent, self._agent = self._agent, None
        self.close()
        if agent is not None:
            try:
                await agent.leave.remote()
            except RayError:
                log.info("the agent of %s has left", self._config.node)

    async def tell_lost(self, why: str) -> None:
        if self._incarnation:
            now = time.time()
            lost = ("node_lost", now, self._incarnation, why)
            await self._listener.tell("reports", write_reports(self._config.node, now, [lost]))

    async def _talk(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                agent = await asyncio.to_thread(self._find_agent)
                if await self._is_welcome(agent):
                    pause = FIRST_PAUSE_SECONDS
                    await self._listen(agent)
            except (RayError, ValueError) as fault:
                await self._on_absence(str(fault))
            except TimeoutError:
                log.error("the agent of %s does not answer; replacing it", self._config.node)
                await asyncio.to_thread(ray.kill, agent)
            self._agent = None
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

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
        verdict, detail = await agent.announce.remote(
            PROTOCOL, self._config.to_json(), self._broker, self._term
        )
        if verdict == "outdated":
            log.info("replacing the agent of %s: other release or configuration", self._config.node)
            await asyncio.to_thread(ray.kill, agent)
        elif verdict == "stale":
            log.warning("term %s is over: %s knows term %s", self._term, self._config.node, detail)
        else:
            self._incarnation = detail
            self._agent = agent
            self._told_lost = False
            self._flush()
        return bool(verdict == "welcome")

    async def _listen(self, agent: Any) -> None:
        """Forward reports until another announcement is made."""
        acknowledged = 0
        while acknowledged >= 0:
            self._answered_at = time.monotonic()
            async with asyncio.timeout(POLL_SECONDS + ANSWER_SECONDS):
                reply = await agent.poll.remote(self._incarnation, acknowledged, POLL_SECONDS)
            acknowledged, packed = reply
            if packed:
                await self._listener.tell("reports", packed)

    async def _on_absence(self, why: str) -> None:
        log.warning("the agent of %s is away: %s", self._config.node, why)
        await self._listener.tell("trouble", f"the agent of node {self._config.node} is away: {why}")
        away_seconds = time.monotonic() - self._answered_at
        if away_seconds > AGENT_PATIENCE_SECONDS and not self._told_lost:
            self._told_lost = True
            await self.tell_lost(f"its agent has been away for {away_seconds:.0f} s: {why}")

    def _flush(self) -> None:
        while self._queue and self._agent is not None and len(self._calls) < CALLS_AT_ONCE:
            call = asyncio.create_task(self._deliver(self._agent, self._queue.popleft()))
            self._calls.add(call)
            call.add_done_callback(self._on_delivered)

    async def _deliver(self, agent: Any, packed: bytes) -> None:
        """What is lost here is known lost at the next announcement: the agent tells which runs it has."""
        try:
            await agent.orders.remote(PROTOCOL, self._term, packed)
        except RayError as fault:
            log.warning("orders did not reach the agent of %s: %s", self._config.node, fault)

    def _on_delivered(self, call: "asyncio.Task[None]") -> None:
        self._calls.discard(call)
        self._flush()
