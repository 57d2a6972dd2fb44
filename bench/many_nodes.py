"""The service with a driver process that has as many nodes as wanted, without Ray.

`python -m bench.many_nodes serve` is `gpubroker serve`; the driver process that it starts is this module too,
and has the real driver, the real links to its nodes and the real frames to the service. Only Ray is left out:
the node agents live in the driver process, and report what an agent without runs reports.
"""

import asyncio
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import ray
from gpubroker import __version__
from gpubroker.runtime.mailbox import Mailbox
from gpubroker_server import __main__ as server
from gpubroker_server.adapters.ray.driver import link, node_link, process
from gpubroker_server.adapters.ray.options import AgentConfig
from gpubroker_server.adapters.ray.wire import write_reports

COUNT = "BENCH_NODES"
"""The variable with the number of nodes, for the driver process."""


class IdleAgent:
    """The handle of a node agent without runs."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._mailbox: Mailbox | None = None
        self._telling: list[asyncio.Task[None]] = []
        self.announce, self.poll = _Method(self._announce), _Method(self._poll)
        self.orders, self.leave = _Method(self._take), _Method(self._take)

    async def _announce(self, protocol: int, *_: Any) -> tuple[str, str]:
        for task in self._telling:
            task.cancel()
        self._protocol, self._mailbox = protocol, Mailbox()
        self._mailbox.journal.add(self._sampled())
        self._mailbox.journal.add(self._seen())
        config = self._config
        self._telling = [
            asyncio.create_task(self._tell(config.beat_seconds, lambda: ("beat", time.time()))),
            asyncio.create_task(self._tell(config.sample_period_seconds, self._sampled)),
            asyncio.create_task(self._tell(config.sample_period_seconds, self._node_sampled)),
        ]
        return "welcome", self._incarnation

    async def _poll(self, _incarnation: str, acknowledged: int, timeout_seconds: float) -> tuple[int, bytes]:
        assert self._mailbox is not None, "it was announced"
        asked_at = time.monotonic()
        read = await self._mailbox.read(acknowledged, may_come=lambda: True, timeout_seconds=timeout_seconds)
        if not read:
            return acknowledged, b""
        reports, held = [report for _, report in read], time.monotonic() - asked_at
        return read[-1][0], write_reports(self._config.node, time.time(), reports, held, self._protocol)

    async def _take(self, *_: Any) -> None:
        """Accept an order without carrying it out: an idle node has no runs and nothing left behind."""

    async def _tell(self, every_seconds: float, make: Callable[[], tuple[Any, ...]]) -> None:
        """Report every `every_seconds`. Agents report at different moments, as their clocks drift apart."""
        assert self._mailbox is not None, "it was announced"
        await asyncio.sleep(random.random() * every_seconds)
        while True:
            report = make()
            self._mailbox.journal.note(report[0], report, 0.0)
            await asyncio.sleep(every_seconds)

    @property
    def _incarnation(self) -> str:
        return f"{self._config.node}.1"

    def _sampled(self) -> tuple[Any, ...]:
        return "sampled", time.time(), [(device[0], 0, 0, {}, 0.0) for device in self._config.devices or ()]

    def _node_sampled(self) -> tuple[Any, ...]:
        gpus = {device[0]: (400.0, 60.0, 1980, 2619, 0, None) for device in self._config.devices or ()}
        disks = [("/tmp/ray", 2**40, 2**39)]
        return (
            "node_sampled",
            time.time(),
            0.1,
            2**18,
            2**17,
            0.0,
            disks,
            2**40,
            2**40,
            (2**16, 0),
            gpus,
            0.1,
            (),
        )

    def _seen(self) -> tuple[Any, ...]:
        config = self._config
        node = {
            "name": config.node,
            "cpu": config.cpu,
            "memory_mb": config.host_memory_mb,
            "max_runs": config.max_runs,
            "incarnation": self._incarnation,
            "boot_id": self._incarnation,
            "release": __version__,
        }
        devices = [(*device[:4], True, device[4], False) for device in config.devices or ()]
        return "node_seen", time.time(), node, devices, []


class _Method:
    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def remote(self, *arguments: Any) -> Any:
        return self._method(*arguments)


def a_node(number: int) -> dict[str, Any]:
    """Return a node as Ray describes it."""
    name = f"node{number:04}"
    return {
        "NodeID": name,
        "NodeName": name,
        "NodeManagerHostname": name,
        "NodeManagerAddress": "127.0.0.1",
        "NodeManagerPort": 0,
        "ObjectManagerPort": 0,
        "Alive": True,
        "Resources": {"CPU": 8.0},
    }


def main() -> None:
    if sys.argv[1] == "serve":
        link.DRIVER = "bench.many_nodes"
        server.main()
        return
    nodes = [a_node(number) for number in range(int(os.environ[COUNT]))]
    vars(ray)["nodes"] = lambda: nodes
    vars(process)["_connect"] = lambda _address: None
    node_link.NodeLink._find_agent = lambda it: IdleAgent(it._config)  # type: ignore[assignment,method-assign]
    process.main()


if __name__ == "__main__":
    main()
