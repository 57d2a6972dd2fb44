"""Calls to workers of sets, in the driver process: from its service straight to the actor of a run."""

import asyncio
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from gpubroker_server.adapters.ray.options import AgentConfig
from gpubroker_server.adapters.ray.wire import pack

MOST_ACTORS = 4096

Key = tuple[str, int, int]


class ActorCalls:
    """Keeps the handles of the actors that were called."""

    def __init__(self, agent_config: str) -> None:
        self._agent_config = agent_config
        self._actors: dict[Key, asyncio.Future[Any]] = {}

    async def call(self, node: str, task: str, fence: int, seconds: float, packed: bytes) -> bytes:
        """What `Runner.call` answers, or that the call did not reach it, or was lost with it."""
        key = task, fence, 0
        found = self._actors.get(key)
        try:
            if found is None:
                found = self._actors[key] = asyncio.ensure_future(self._find(node, key))
                self._drop_some()
            actor = await asyncio.shield(found)
        except (RayError, ValueError) as fault:
            self._actors.pop(key, None)
            return pack(("refused", f"no process of run {task}:{fence} on node {node}: {fault}"))
        try:
            answer: bytes = await actor.call.remote(key, seconds, packed)
        except RayTaskError as fault:
            return pack(("refused", f"its process cannot take the call: {fault.cause!r}"))
        except RayError as fault:
            self._actors.pop(key, None)
            return pack(("lost", str(fault).partition("\n")[0]))
        return answer

    async def _find(self, node: str, key: Key) -> Any:
        """Raises ValueError, RayError."""
        namespace = AgentConfig.from_json(self._agent_config).namespace
        agent: Any = await asyncio.to_thread(ray.get_actor, f"agent/{node}", namespace)
        name = await agent.runner_of.remote(*key)
        return await asyncio.to_thread(ray.get_actor, name, namespace)  # ValueError for an empty name

    def _drop_some(self) -> None:
        """The oldest first. A process that is called again is found again."""
        while len(self._actors) > MOST_ACTORS:
            del self._actors[next(iter(self._actors))]
