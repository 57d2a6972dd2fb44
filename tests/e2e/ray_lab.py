"""An executor on real Ray with everything it reported, so that a test is its scenario and its claim."""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from gpubroker.runtime.process import RUN_MARK

from service.adapters.ray.executor import RayExecutor
from service.adapters.ray.head import HeadState, read_state
from service.adapters.ray.options import RayOptions
from service.core.orders import (
    Checkpointed,
    Ended,
    ForgetOrder,
    Gone,
    NodeLost,
    NodeSeen,
    Order,
    Report,
    Sampled,
    SeenDevice,
    Started,
    StartOrder,
    StopOrder,
)
from service.core.task import StopReason
from service.core.units import DeviceKey, Fence, Instant, Mib, Seconds, TaskId, Term
from service.ports import RunPayload, RunSpec

PATIENCE_SECONDS = 60.0
GPU = DeviceKey("local/local/GPU-sim-0")
JOBS = "tests.e2e.ray_jobs"

Kind = TypeVar("Kind", Started, Checkpointed, Ended, Gone)


class SystemClock:
    def now(self) -> Instant:
        return Instant(time.time())


def lab_options(data_dir: Path, **changes: Any) -> RayOptions:
    """Two simulated GPUs, small limits, and no pause worth mentioning."""
    devices = tuple(SeenDevice(f"GPU-sim-{i}", "simulated", i, Mib(24_000), True) for i in range(2))
    options = RayOptions(
        data_dir=data_dir,
        devices=devices,
        sample_period_seconds=0.5,
        result_limit_bytes=2_000_000,
        checkpoint_limit_bytes=1_000_000,
        object_store_bytes=80 * 2**20,
    )
    return replace(options, **changes)


@dataclass(frozen=True, slots=True)
class Run:
    lab: "Lab"
    order: StartOrder

    @property
    def reports(self) -> list[Report]:
        """What was reported of it, in order."""
        return self.lab.heard.get((self.order.task, self.order.fence), [])

    async def first(self, kind: type[Kind]) -> Kind:
        found = await self.lab.until(lambda: next((r for r in self.reports if isinstance(r, kind)), None))
        assert isinstance(found, kind)
        return found

    async def result(self) -> Any:
        """Of a run that must succeed; as JSON."""
        ended = await self.first(Ended)
        assert ended.ending == "succeeded", ended
        assert ended.result is not None
        return json.loads(ended.result)

    async def stop(self, grace_seconds: float) -> None:
        order = self.order
        await self.lab.send(
            StopOrder(
                order.task,
                order.fence,
                order.node,
                order.incarnation,
                StopReason.PREEMPT,
                Seconds(grace_seconds),
            )
        )

    async def forget(self) -> None:
        order = self.order
        await self.lab.send(ForgetOrder(order.task, order.fence, order.node, order.incarnation))

    def order_of_kinds(self) -> list[str]:
        return [type(report).__name__ for report in self.reports]


class Lab:
    _numbers = count(1)

    def __init__(self, options: RayOptions) -> None:
        self.options = options
        self.executor = RayExecutor(options, SystemClock())
        self.heard: dict[tuple[TaskId, Fence], list[Report]] = {}
        self.nodes: list[NodeSeen | NodeLost] = []
        self.samples: list[Sampled] = []
        self._news = asyncio.Event()
        self._listening: asyncio.Task[None] | None = None

    async def open(self, term: int = 1) -> None:
        await self.executor.start(Term(term))
        self._listening = asyncio.create_task(self._listen())

    async def close(self, *, stop_cluster: bool = True) -> None:
        if self._listening is not None:
            self._listening.cancel()
        await self.executor.close(stop_cluster=stop_cluster)

    @property
    def head(self) -> HeadState:
        """Of a lab that has a local one, which runs."""
        state = read_state(self.options.data_dir)
        assert state is not None
        return state

    async def node(self) -> NodeSeen:
        """The newest answer of an agent."""
        seen = await self.until(lambda: [node for node in self.nodes if isinstance(node, NodeSeen)])
        return seen[-1]

    async def run_of(self, task: str) -> Run:
        """A run that another executor has ordered."""
        node = (await self.node()).node
        return Run(self, StartOrder(TaskId(task), Fence(1), node.name, node.incarnation, (), shareable=False))

    async def start(
        self,
        name: str = "",
        *args: Any,
        shareable: bool = False,
        gpu_mb: int = 0,
        fence: int = 1,
        task: str = "",
        incarnation: str = "",
        resume_state: bytes | None = None,
        **spec: Any,
    ) -> Run:
        """Order a run of `tests.e2e.ray_jobs:<name>`, or of whatever `spec` says."""
        seen = await self.node()
        given = {"kind": "entrypoint", "entrypoint": f"{JOBS}:{name}", **spec}
        order = StartOrder(
            task=TaskId(task or f"{name or given['kind']}-{next(self._numbers)}"),
            fence=Fence(fence),
            node=seen.node.name,
            incarnation=incarnation or seen.node.incarnation,
            devices=((GPU, Mib(gpu_mb)),) if gpu_mb else (),
            shareable=shareable,
        )
        payload = RunPayload(
            spec=RunSpec(**{key: value for key, value in given.items() if key != "arguments"}),
            arguments=given.get("arguments", json.dumps({"args": args}).encode()),
            resume_state=resume_state,
            resume_uri=None,
            attempt=fence,
            name="a test",
            tenant="default",
            timeout_seconds=None,
        )
        await self.executor.send([order], {order.task: payload})
        return Run(self, order)

    async def send(self, *orders: Order) -> None:
        await self.executor.send(orders, {})

    async def until(self, found: Callable[[], Any]) -> Any:
        """What `found` says as soon as it is true; looked at again whenever reports come in."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not (answer := found()):
                self._news.clear()
                await self._news.wait()
        return answer

    async def _listen(self) -> None:
        while True:
            for report in await self.executor.reports():
                match report:
                    case NodeSeen() | NodeLost():
                        self.nodes.append(report)
                    case Sampled():
                        self.samples.append(report)
                    case _:
                        self.heard.setdefault((report.task, report.fence), []).append(report)
            self._news.set()


async def eventually(true: Callable[[], Any], seconds: float = PATIENCE_SECONDS) -> Any:
    """For what nobody reports: looks again and again, with a deadline."""
    async with asyncio.timeout(seconds):
        while not (answer := true()):  # noqa: ASYNC110  # processes and files send no events
            await asyncio.sleep(0.02)
    return answer


def is_there(pid: int) -> bool:
    """A process that has ended is not there, though it may wait to be buried (Z) or be dead (X)."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/status").read_text().partition("State:\t")[2][:1] not in "ZX"
    return False


def command_lines(word: str) -> dict[int, str]:
    """Processes with this word in their command line."""
    found = {}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if word in line and is_there(pid):
                found[pid] = line
    return found


def agents_of(head: HeadState) -> list[int]:
    """The processes of our node agents in one cluster."""
    return [pid for pid in command_lines("ray::NodeAgent") if os.getsid(pid) == head.pid]


def marked_with(text: str) -> Sequence[int]:
    """Processes whose environment carries this run mark."""
    wanted = f"{RUN_MARK}={text}".encode()
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found
