"""An executor that runs nothing: every task only waits. For load tests, planning and tests of the broker."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from service.core.device import DeviceSample, Node
from service.core.orders import (
    Ended,
    Ending,
    ForgetOrder,
    Gone,
    NodeSeen,
    Order,
    Report,
    Sampled,
    SeenDevice,
    Started,
    StartOrder,
    StopOrder,
)
from service.core.units import DeviceKey, Fence, Mib, NodeName, TaskId, Term, device_key
from service.ports import Clock, RunPayload


@dataclass(frozen=True, slots=True)
class SimulatedNode:
    """A node that exists in memory only."""

    name: str
    cluster: str
    cpu: float
    memory_mb: int
    max_runs: int
    devices: tuple[SeenDevice, ...]


@dataclass(slots=True)
class _Run:
    devices: tuple[tuple[DeviceKey, Mib], ...]
    end: asyncio.TimerHandle | None = None


class WaitingExecutor:
    """Implements `ports.Executor`. A task waits `kwargs.seconds` (default 0) and returns null."""

    def __init__(self, node: SimulatedNode, clock: Clock, sample_period_seconds: float) -> None:
        self._node = node
        self._clock = clock
        self._period_seconds = sample_period_seconds
        self._runs: dict[tuple[TaskId, Fence], _Run] = {}
        self._pending: list[Report] = []
        self._arrived = asyncio.Event()
        self._heartbeat: asyncio.Task[None] | None = None

    async def start(self, term: Term) -> None:
        node = Node(
            name=NodeName(self._node.name),
            cpu=self._node.cpu,
            memory_mb=Mib(self._node.memory_mb),
            max_runs=self._node.max_runs,
            incarnation=f"simulated-{term}",
            boot_id="simulated",
        )
        self._say(NodeSeen(node, self._node.devices, tuple(self._runs), self._clock.now()))
        self.measure()
        self._heartbeat = asyncio.create_task(self._beat())

    async def send(self, orders: Sequence[Order], payloads: Mapping[TaskId, RunPayload]) -> None:
        for order in orders:
            match order:
                case StartOrder() if order.task in payloads:
                    self._start(order, payloads[order.task])
                case StopOrder():
                    self._end(order.task, order.fence, Ending.STOPPED)
                case StartOrder() | ForgetOrder():
                    pass

    async def reports(self) -> Sequence[Report]:
        await self._arrived.wait()
        self._arrived.clear()
        reports, self._pending = self._pending, []
        return reports

    def status(self) -> Mapping[str, Any]:
        return {"state": "connected", "address": "simulated", "message": "tasks only wait"}

    async def close(self, *, stop_cluster: bool) -> None:
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        if stop_cluster:
            self._runs.clear()

    def _start(self, order: StartOrder, payload: RunPayload) -> None:
        seconds = json.loads(payload.arguments or b"{}").get("kwargs", {}).get("seconds", 0)
        run = self._runs[order.task, order.fence] = _Run(order.devices)
        self._say(Started(order.task, order.fence, self._clock.now(), pid=0))
        loop = asyncio.get_running_loop()
        run.end = loop.call_later(float(seconds), self._end, order.task, order.fence, Ending.SUCCEEDED)

    def _end(self, task: TaskId, fence: Fence, ending: Ending) -> None:
        run = self._runs.pop((task, fence), None)
        if run is None:
            return
        if run.end is not None:
            run.end.cancel()
        now = self._clock.now()
        result = b"null" if ending is Ending.SUCCEEDED else None
        self._say(Ended(task, fence, now, ending, result=result))
        self._say(Gone(task, fence, now, "process_absent", samples=self._samples()))

    def _samples(self) -> tuple[DeviceSample, ...]:
        used: dict[DeviceKey, int] = {}
        by_holder: dict[DeviceKey, dict[str, Mib]] = {}
        for (task, fence), run in self._runs.items():
            for device, mb in run.devices:
                used[device] = used.get(device, 0) + mb
                by_holder.setdefault(device, {})[f"{task}:{fence}"] = mb
        now = self._clock.now()
        keys = [device_key(self._node.cluster, self._node.name, seen.uuid) for seen in self._node.devices]
        return tuple(
            DeviceSample(key, now, Mib(used.get(key, 0)), by_holder=by_holder.get(key, {})) for key in keys
        )

    def measure(self) -> None:
        """Report what every device holds now."""
        self._say(Sampled(NodeName(self._node.name), self._clock.now(), self._samples()))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._period_seconds)
            self.measure()

    def _say(self, report: Report) -> None:
        self._pending.append(report)
        self._arrived.set()
