"""Calls to workers of worker sets, in the driver process. A call goes straight to the actor of the run."""

import asyncio
import time
from typing import Any

import ray

from gpubroker_server.adapters.ray.options import AgentConfig
from gpubroker_server.adapters.ray.wire import pack

MAX_ACTORS = 4096
ANSWER_BYTES = 2**20
"""The most bytes of an answer besides its result, which are those of its texts."""

Key = tuple[str, int, int]


class ActorCalls:
    """Calls actors, and caches their handles. A call that fails is answered with its fault and does not
    affect other calls."""

    def __init__(self, agent_config: str, result_limit_bytes: int) -> None:
        self._agent_config = agent_config
        self._most_bytes = result_limit_bytes + ANSWER_BYTES
        self._actors: dict[Key, asyncio.Future[Any]] = {}

    async def call(self, node: str, task: str, fence: int, seconds: float, packed: bytes) -> bytes:
        """Return the packed answer of `Runner.call`, or one that says that the call did not reach the actor
        or was lost with it."""
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
        """Return the actor of a run. It is looked up once for all calls. Raises ValueError, RayError and
        AttributeError."""
        actor = self._actors.get(key)
        if actor is None:
            actor = self._actors[key] = asyncio.ensure_future(self._find(node, key))
            while len(self._actors) > MAX_ACTORS:  # the oldest one; a later call looks it up again
                del self._actors[next(iter(self._actors))]
        try:
            return await asyncio.shield(actor)
        except Exception:
            self._actors.pop(key, None)
            raise

    async def _find(self, node: str, key: Key) -> Any:
        """Look up the actor of a run. Raises AttributeError for an agent of an earlier release, which has no
        `runner_of`."""
        namespace = AgentConfig.from_json(self._agent_config).namespace
        agent: Any = await asyncio.to_thread(ray.get_actor, f"agent/{node}", namespace)
        name = await agent.runner_of.remote(*key)
        return await asyncio.to_thread(ray.get_actor, name, namespace)  # ValueError for an empty name


def _first_line(fault: Exception) -> str:
    return (str(fault) or repr(fault)).partition("\n")[0]
