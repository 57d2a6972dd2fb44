"""Calls to workers of sets, in the driver process: from its service straight to the actor of a run."""

import asyncio
import time
from typing import Any

import ray

from gpubroker_server.adapters.ray.options import AgentConfig
from gpubroker_server.adapters.ray.wire import pack

MOST_ACTORS = 4096
ANSWER_BYTES = 2**20
"""The most bytes of an answer beside its result: an answer has texts too."""

Key = tuple[str, int, int]


class ActorCalls:
    """Keeps the handles of the actors that were called. What becomes of one call is of no other's concern:
    whatever goes wrong is its answer."""

    def __init__(self, agent_config: str, result_limit_bytes: int) -> None:
        self._agent_config = agent_config
        self._most_bytes = result_limit_bytes + ANSWER_BYTES
        self._actors: dict[Key, asyncio.Future[Any]] = {}

    async def call(self, node: str, task: str, fence: int, seconds: float, packed: bytes) -> bytes:
        """Return what `Runner.call` answers, or that the call did not reach it, or was lost with it."""
        key = task, fence, 0
        until = time.monotonic() + seconds
        try:
            async with asyncio.timeout(seconds):
                actor = await self._actor(node, key)
            answering = actor.call.remote(key, max(0.0, until - time.monotonic()), packed)
        except Exception as fault:
            return pack(("refused", f"no process of run {task}:{fence} on node {node}: {_first_line(fault)}"))
        try:
            answer = await answering
        except Exception as fault:
            self._actors.pop(key, None)
            return pack(("lost", _first_line(fault)))
        is_answer = isinstance(answer, bytes) and len(answer) <= self._most_bytes
        return answer if is_answer else pack(())

    async def _actor(self, node: str, key: Key) -> Any:
        """Return the actor of this run, which is found once for all calls. Raises ValueError, RayError,
        AttributeError."""
        found = self._actors.get(key)
        if found is None:
            found = self._actors[key] = asyncio.ensure_future(self._find(node, key))
            while len(self._actors) > MOST_ACTORS:  # the oldest first; it is found again
                del self._actors[next(iter(self._actors))]
        try:
            return await asyncio.shield(found)
        except Exception:
            self._actors.pop(key, None)
            raise

    async def _find(self, node: str, key: Key) -> Any:
        """An agent of an earlier release has no `runner_of`."""
        namespace = AgentConfig.from_json(self._agent_config).namespace
        agent: Any = await asyncio.to_thread(ray.get_actor, f"agent/{node}", namespace)
        name = await agent.runner_of.remote(*key)
        return await asyncio.to_thread(ray.get_actor, name, namespace)  # ValueError for an empty name


def _first_line(fault: Exception) -> str:
    return (str(fault) or repr(fault)).partition("\n")[0]
