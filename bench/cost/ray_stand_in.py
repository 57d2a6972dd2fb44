"""The driver, one node agent and its runners as tasks of one event loop, in place of Ray and its processes.

All of it is the real code: the frames between service and driver, the agent, and the host of runs in a
runner. Left out is Ray itself, which would carry the calls to agent and runner. A sleeping process stands for
each runner where the agent watches it and ends it.
"""

import asyncio
import socket
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import copy_context
from pathlib import Path
from typing import Any

import ray
from gpubroker_server.adapters.ray.agent.host_meter import RaySession
from gpubroker_server.adapters.ray.agent.node_agent import NodeAgent
from gpubroker_server.adapters.ray.agent.runner import Runner
from gpubroker_server.adapters.ray.driver import link, node_link, process
from gpubroker_server.adapters.ray.options import AgentConfig
from gpubroker_server.adapters.ray.wire import pack, unpack

from bench.cost.counting import AGENT, DRIVER, RUNNER, current_process
from bench.cost.virtual_time import VirtualLoop
from bench.many_nodes import a_node

HEAD_PORT = 6379


def begin_in(name: str, work: Callable[[], Awaitable[Any]]) -> "asyncio.Task[Any]":
    """Run a coroutine as a part of this process."""
    context = copy_context()
    context.run(current_process.set, name)
    return asyncio.get_running_loop().create_task(_awaited(work), context=context)


async def _awaited(work: Callable[[], Awaitable[Any]]) -> Any:
    return await work()


class Handle:
    """The handle of an actor: each method is awaited by `remote`, and runs in the actor's process."""

    def __init__(self, name: str, actor: Any, **instead: Callable[..., Awaitable[Any]]) -> None:
        self._name = name
        self._actor = actor
        self._instead = instead

    def __getattr__(self, method: str) -> "_Method":
        called = self._instead.get(method) or getattr(self._actor, method)
        return _Method(self._name, called)


class _Method:
    def __init__(self, name: str, method: Callable[..., Awaitable[Any]]) -> None:
        self._name = name
        self._method = method

    def remote(self, *arguments: Any) -> "asyncio.Task[Any]":
        return begin_in(self._name, lambda: self._method(*arguments))


class RunnersHere:
    """Takes the place of `runner_pool.RayRunners`. The runners are objects of this process."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._made: dict[str, tuple[Handle, subprocess.Popen[bytes]]] = {}
        self.node, self.host = "a node of Ray", "127.0.0.1"
        self.object_cache_bytes = 2**20
        self.session = RaySession(tempfile.gettempdir(), "", 2**27)

    def make(self, *, shared: bool) -> tuple[str, Any]:
        context = copy_context()
        context.run(current_process.set, RUNNER)
        env: Mapping[str, str] = dict(self._config.task_env)
        runner = context.run(lambda: Runner(self._config.task_path, shared=shared, env=env))
        # The child ends when this process does.
        watched = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)

        async def describe() -> bytes:
            return bytes(pack({**unpack(await runner.describe()), "pid": watched.pid}))

        name = f"runner/{len(self._made)}"
        self._made[name] = Handle(RUNNER, runner, describe=describe), watched
        return name, self._made[name][0]

    def progress(self) -> float:
        """Return the time of the last progress of starts: here nothing starts slowly."""
        return 0.0

    def names(self) -> list[str]:
        return [name for name, (_, watched) in self._made.items() if watched.poll() is None]

    def find(self, name: str) -> Any | None:
        return self._made[name][0] if name in self._made else None

    def kill(self, runner: Any) -> None:
        for handle, watched in self._made.values():
            if handle is runner:
                watched.kill()

    def share(self, data: bytearray) -> Any:
        return bytes(data)

    def close(self) -> None:
        for _, watched in self._made.values():
            watched.kill()
            watched.wait()


class _DriverChild:
    """Takes the place of the `Popen` of the driver process."""

    def __init__(self, task: "asyncio.Task[Any]") -> None:
        self._task = task

    def kill(self) -> None:
        self._task.cancel()

    def wait(self, _timeout: float) -> int:
        return 0


@contextmanager
def ray_replaced(loop: VirtualLoop, folder: Path) -> Iterator[str]:
    """Yield the address at which a service finds this stand-in, a Ray with one node."""
    made: list[RunnersHere] = []
    agents: list[Handle] = []

    def start_driver(_options: Any, _address: str, channel: socket.socket) -> Any:
        mine = channel.dup()
        return _DriverChild(begin_in(DRIVER, lambda: process._drive(mine)))  # a process in the service

    def find_agent(of: node_link.NodeLink) -> Handle:
        if not agents:
            config: AgentConfig = of._config  # what Ray would pass to the agent's constructor
            runners = RunnersHere(config)
            context = copy_context()
            context.run(current_process.set, AGENT)
            agent = context.run(lambda: NodeAgent(config.to_json(), runners))  # type: ignore[arg-type]
            agents.append(Handle(AGENT, agent))
            made.append(runners)
        return agents[0]

    vars(ray)["nodes"] = lambda: [a_node(0)]
    vars(process)["_connect"] = lambda _address: None
    vars(link)["_start_driver"] = start_driver
    node_link.NodeLink._find_agent = find_agent  # type: ignore[assignment,method-assign]
    with socket.socket(socket.AF_UNIX) as head:  # the socket of the head only has to exist
        head.bind(str(folder / "head.sock"))
        head.listen()
        loop.serve_port_at(HEAD_PORT, folder / "head.sock")
        try:
            yield f"127.0.0.1:{HEAD_PORT}"
        finally:
            for runners in made:
                runners.close()
