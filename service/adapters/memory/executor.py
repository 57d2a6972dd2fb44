"""An executor that runs nothing: every task only waits. For load tests, planning and tests of the broker."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from service.core.device import DeviceSample, Node
from service.core.orders import (
    Ended,
    Ending,
    Failure,
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


RunId = tuple[TaskId, Fence]

REMEMBERED_FENCES = 100_000
LONGEST_SECONDS = 10 * 365 * 86400


@dataclass(slots=True)
class _Run:
    devices: tuple[tuple[DeviceKey, Mib], ...]
    told: list[Report] = field(default_factory=list)
    end: asyncio.TimerHandle | None = None
    """None once it has ended."""


class WaitingExecutor:
    """Implements `ports.Executor`. A task waits `kwargs.seconds` (default 0) and returns null."""

    def __init__(self, node: SimulatedNode, clock: Clock, sample_period_seconds: float) -> None:
        self._node = node
        self._clock = clock
        self._period_seconds = sample_period_seconds
        self._incarnation = ""
        self._runs: dict[RunId, _Run] = {}
        """Until they have ended and are forgotten."""
        self._fences: dict[TaskId, Fence] = {}
        """The highest that was heard of: neither it nor a lower one starts again."""
        self._pending: list[Report] = []
        self._arrived = asyncio.Event()
        self._heartbeat: asyncio.Task[None] | None = None

    async def start(self, term: Term) -> None:
        self._incarnation = f"simulated-{term}"
        node = Node(
            name=NodeName(self._node.name),
            cpu=self._node.cpu,
            memory_mb=Mib(self._node.memory_mb),
            max_runs=self._node.max_runs,
            incarnation=self._incarnation,
            boot_id="simulated",
        )
        self._say(NodeSeen(node, self._node.devices, tuple(self._runs), self._clock.now()))
        for run in self._runs.values():
            for report in run.told:
                self._say(report)
        self.measure()
        if self._heartbeat is None:
            self._heartbeat = asyncio.create_task(self._beat())

    async def send(self, orders: Sequence[Order], payloads: Mapping[TaskId, RunPayload]) -> None:
        for order in orders:
            match order:
                case StartOrder() if order.task in payloads:
                    self._start(order, payloads[order.task])
                case StopOrder():
                    self._stop(order)
                case ForgetOrder() if (run := self._runs.get((order.task, order.fence))) and run.end is None:
                    del self._runs[order.task, order.fence]
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
        for run in self._runs.values():
            if run.end is not None:
                run.end.cancel()
        if stop_cluster:
            self._runs.clear()

    def _start(self, order: StartOrder, payload: RunPayload) -> None:
        if order.fence <= self._fences.get(order.task, 0):
            return
        if order.incarnation != self._incarnation:
            self._refuse(order.task, order.fence)
            return
        self._note_fence(order.task, order.fence)
        key = order.task, order.fence
        run = self._runs[key] = _Run(order.devices)
        try:
            seconds = _seconds(payload)
        except ValueError as fault:
            self._end(key, Ending.FAILED, Failure("exception", str(fault)))
            return
        self._tell(run, Started(order.task, order.fence, self._clock.now(), pid=0))
        run.end = asyncio.get_running_loop().call_later(seconds, self._end, key, Ending.SUCCEEDED)

    def _stop(self, order: StopOrder) -> None:
        """A run that only waits gives way at once; without a grace period it has no time for that."""
        key = order.task, order.fence
        run = self._runs.get(key)
        if run is not None and run.end is not None:
            killed = order.grace_seconds <= 0
            failure = Failure("killed", "it was killed") if killed else None
            self._end(key, Ending.LOST if killed else Ending.STOPPED, failure)
        elif run is None and order.fence > self._fences.get(order.task, 0):
            self._refuse(*key)
        elif run is None:
            self._say(Gone(*key, self._clock.now(), "process_absent", samples=self._samples()))

    def _refuse(self, task: TaskId, fence: Fence) -> None:
        """It has not been started and never will be."""
        self._note_fence(task, fence)
        now = self._clock.now()
        self._say(Ended(task, fence, now, Ending.NEVER_STARTED))
        self._say(Gone(task, fence, now, "never_started"))

    def _note_fence(self, task: TaskId, fence: Fence) -> None:
        self._fences[task] = fence
        if len(self._fences) > REMEMBERED_FENCES:
            del self._fences[next(iter(self._fences))]

    def _end(self, key: RunId, ending: Ending, failure: Failure | None = None) -> None:
        run = self._runs[key]
        if run.end is not None:
            run.end.cancel()
            run.end = None
        run.devices = ()
        now = self._clock.now()
        result = b"null" if ending is Ending.SUCCEEDED else None
        self._tell(run, Ended(*key, now, ending, result=result, failure=failure))
        self._tell(run, Gone(*key, now, "process_absent", samples=self._samples()))

    def _tell(self, run: _Run, report: Report) -> None:
        run.told.append(report)
        self._say(report)

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


def _seconds(payload: RunPayload) -> float:
    """What the task asks to wait; what is no entrypoint asks for nothing. Raises ValueError."""
    if payload.spec.kind != "entrypoint" or not payload.arguments:
        return 0.0
    match json.loads(payload.arguments):
        case {"kwargs": {"seconds": int() | float() as seconds}} if 0 <= seconds <= LONGEST_SECONDS:
            return float(seconds)
        case {"kwargs": {"seconds": wrong}}:
            raise ValueError(f"kwargs.seconds is {wrong!r}; give seconds from 0 to {LONGEST_SECONDS}")
        case _:
            return 0.0
