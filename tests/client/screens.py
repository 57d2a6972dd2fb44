"""What the command line shows at 80 columns, of a service with 2,000 waiting tasks.

`python -m tests.client.screens` writes docs/reference/screens.md. Time stands still, ids are made from a seed
and the devices are simulated, so the page is the same every time.
"""

import asyncio
import contextlib
import io
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from unittest.mock import patch

import httpx
from gpubroker import Broker
from gpubroker.cli import main
from gpubroker_server.core.domain.device import DiskSample, GpuHealth, NodeSample, StoreSample
from gpubroker_server.core.domain.orders import Started
from gpubroker_server.core.domain.policy import Policy, TenantPolicy
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Mib
from gpubroker_server.http import ids
from msgspec.structs import replace
from structlog.testing import capture_logs

from tests.builders import GIB, a_device, a_node, a_sample
from tests.gateway.harness import Client, Gateway, a_body

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "screens.md"
COLUMNS = 80
WAITING = 2_000
_HEAD = """\
# What the command line shows

Written by `python -m tests.client.screens`: at 80 columns, with 2,000 waiting tasks. A wider terminal
shows more columns; a pipe gets all of them, whole, one line per row; `-o json` gives programs everything.
"""
COMMANDS = (
    "ps --limit 14", "gpus", "tenants", "nodes", "stats", "explain sweep-0007", "explain resnet", "show done",
    "events done", "priority sweep-0008 60", "cancel sweep-0009", "models", "token list", "policy",
    "estimates",
)  # fmt: skip


class Screen(io.StringIO):
    """Says that it is a terminal."""

    def isatty(self) -> bool:
        return True


class Bridge(httpx.BaseTransport):
    """From the thread of the command line to an app on the event loop."""

    def __init__(self, gateway: Gateway, loop: asyncio.AbstractEventLoop) -> None:
        self._app, self._loop = httpx.ASGITransport(gateway.app), loop

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answering = asyncio.run_coroutine_threadsafe(self._answer(request), self._loop)
        return answering.result()

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        asked = httpx.Request(request.method, request.url, headers=request.headers, content=request.read())
        answer = await self._app.handle_async_request(asked)
        content = await answer.aread()
        return httpx.Response(answer.status_code, headers=answer.headers, content=content)


@contextmanager
def command_line(gateway: Gateway, token: str, columns: int | None) -> Iterator[None]:
    """Without `columns`: its output goes to a pipe."""
    loop = asyncio.get_running_loop()

    def connected(*args: object, **options: object) -> Broker:
        return Broker("http://127.0.0.1:8470", token, transport=Bridge(gateway, loop))

    env = {"COLUMNS": str(columns or COLUMNS), "TERM": "dumb", "XDG_STATE_HOME": "/nonexistent"}
    # The log of the gateway in this process is not what a command shows.
    with patch.dict(os.environ, env), patch("gpubroker.broker.Broker", connected), capture_logs():
        yield


def run(line: str, out: io.StringIO) -> None:
    with (
        patch.object(sys, "argv", ["gpubroker", *shlex.split(line)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
        contextlib.suppress(SystemExit),
    ):
        main()


async def shown(*lines: str, columns: int | None = COLUMNS) -> dict[str, str]:
    """What each command shows."""
    random = Random(18)
    with patch.object(ids, "Random", lambda: random):
        async with Gateway() as gateway:
            api = await _scene(gateway)
            token = api.headers["authorization"].removeprefix("Bearer ")
            screens = {}
            with command_line(gateway, token, columns):
                for line in lines:
                    out = Screen() if columns else io.StringIO()
                    await asyncio.to_thread(run, line, out)
                    screens[line] = "\n".join(row.rstrip() for row in out.getvalue().splitlines())
            return screens


async def _scene(gateway: Gateway) -> Client:
    """Three nodes with eight GPUs, eleven runs of two tenants, one of them stopping, and a long queue."""
    gateway.change(
        policy=Policy(
            tenants=(
                TenantPolicy("research", "labs", guaranteed_mb=Mib(600 * GIB), borrow_mb=Mib(120 * GIB)),
                TenantPolicy("vision-and-language", "labs", guaranteed_mb=Mib(120 * GIB), weight=2.0),
            )
        )
    )
    nodes = tuple(a_node(name) for name in ("gpu-node-02", "gpu-node-03"))
    devices = tuple(
        replace(a_device(f"GPU-{node[-2:]}{n}", node, mb=80 * GIB), index=n)
        for node in ("gpu-node-02", "gpu-node-03")
        for n in range(4)
    )
    for node in nodes:
        await gateway.join(*(device for device in devices if device.node == node.name), node=node)
    gateway.world.measure([a_sample(device.key) for device in devices])
    api = await gateway.client("ops", tenant="research")
    other = await gateway.client("other", tenant="vision-and-language")
    done = await api.submit(name="done", resources={"gpu_mb": 30 * GIB})
    await gateway.end(done, b'{"accuracy": 0.93}')
    for name, gpus, mb in (("resnet", 1, 60), ("llm-pretraining-of-the-large-model", 4, 80), ("eval", 1, 18)):
        await api.submit(name=name, resources={"gpus": gpus, "gpu_mb": mb * GIB}, priority="interactive")
    await other.submit(name="segmentation", resources={"gpu_mb": 70 * GIB})
    await _start(gateway)
    tasks = [
        a_body(name=f"sweep-{n:04}", resources={"gpu_mb": (40 if n % 3 else 80) * GIB})
        for n in range(WAITING - 1)
    ]
    await api.post("/tasks/batch", json={"tasks": tasks})
    await api.submit(name="later", not_before="1970-01-13T00:00:00Z")
    await _start(gateway)
    health = GpuHealth(power_watts=412.0, temperature_celsius=61.0)
    for node, busy, free, left in zip(nodes, (0.42, 0.07), (96, 201), (380, 910), strict=True):
        seen = {device.uuid: health for device in devices if device.node == node.name}
        memory, disks = (Mib(256 * GIB), Mib(free * GIB)), (DiskSample("/", 1000 * 2**20, left * 2**20),)
        sample = NodeSample(node.name, gateway.clock.now(), busy, *memory, disks=disks, gpus=seen)
        sample = replace(sample, store=StoreSample(4096, 0), store_used_mb=1024)
        gateway.world.measure((), [sample])
    return api


async def _start(gateway: Gateway) -> None:
    """Carry out what the planner decides, and let all of it run."""
    gateway.clock.advance(60.0)
    gateway.world.measure([a_sample(key, gateway.clock.now()) for key in gateway.world.ledgers])
    await gateway.turn(plans=True)
    for task in list(gateway.world.tasks.values()):
        if task.state is TaskState.ADMITTED:
            await gateway.hear(Started(task.id, task.fence, gateway.clock.now(), pid=1))


async def page() -> str:
    screens = await shown(*COMMANDS)
    parts = [f"```console\n$ gpubroker {line}\n{text}\n```\n" for line, text in screens.items()]
    return "\n".join([_HEAD, *parts])


if __name__ == "__main__":
    PAGE.write_text(asyncio.run(page()), encoding="utf-8")
