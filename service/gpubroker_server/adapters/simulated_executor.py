"""An executor that runs nothing: its tasks only wait. It is for load tests, simulations and tests of the
broker."""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from gpubroker_server.adapters.clock import boot_seconds
from gpubroker_server.core.domain.device import DeviceSample, DiskOrder, DiskReport, Node, NodeSample
from gpubroker_server.core.domain.environment import Environment, EnvironmentState
from gpubroker_server.core.domain.leader_term import LeaderTerm
from gpubroker_server.core.domain.lease import Proof
from gpubroker_server.core.domain.orders import (
    Ended,
    Ending,
    EnvironmentReported,
    Failure,
    ForgetOrder,
    Gone,
    GoOrder,
    Logged,
    LogName,
    NodeReport,
    Order,
    PrepareOrder,
    Ready,
    Report,
    ReportedDevice,
    RunId,
    Sampled,
    Stacked,
    StackOrder,
    Started,
    StartOrder,
    StopOrder,
    TermRefused,
    WatchOrder,
    WorldOrder,
)
from gpubroker_server.core.domain.units import (
    DeviceKey,
    Fence,
    Lineage,
    Mib,
    NodeName,
    TaskId,
    device_key,
    mark_of,
)
from gpubroker_server.ports.executor import RunPayload
from gpubroker_server.ports.store import (
    Clock,
    ReadTicks,
)
from gpubroker_server.ports.task_objects import ObjectAnswer, ObjectQuestion


class SimulatedNode(Struct, frozen=True):
    """A node that exists in memory only."""

    name: str
    cluster: str
    cpu: float
    memory_mb: int
    max_runs: int
    devices: tuple[ReportedDevice, ...]


REMEMBERED_FENCES = 100_000
DISCARD_ADDRESS = "127.0.0.1:9"
"""The discard port, which is the rendezvous address of runs without a process."""
LONGEST_SECONDS = 10 * 365 * 86400


@dataclass(slots=True)
class _Run:
    devices: tuple[tuple[DeviceKey, Mib], ...]
    reports: list[Report] = field(default_factory=list)
    end: asyncio.TimerHandle | None = None
    """The timer of the run's end; None before the run has begun and after its end."""
    waits_seconds: float = 0.0
    is_over: bool = False


class WaitingExecutor:
    """Implements `ports.Executor`. A task waits for `kwargs.seconds` (default 0) and returns null."""

    def __init__(
        self,
        node: SimulatedNode,
        clock: Clock,
        sample_period_seconds: float,
        ticks: ReadTicks = boot_seconds,
    ) -> None:
        self._node = node
        self._clock = clock
        self._period_seconds = sample_period_seconds
        self._ticks = ticks
        self._leader_term: LeaderTerm | None = None
        """The term of the leader in this process; None while another process leads."""
        self._incarnation = ""
        self._runs: dict[RunId, _Run] = {}
        """The runs that have not both ended and been forgotten."""
        self._watched: dict[RunId, tuple[tuple[DeviceKey, Mib], ...]] = {}
        """The devices and MiB of external holders, until these are forgotten."""
        self._fences: dict[tuple[TaskId, int], Fence] = {}
        """The highest fence that was seen of each task and rank. Neither it nor a lower one starts again."""
        keys = [device_key(node.cluster, node.name, seen.uuid) for seen in node.devices]
        self._used: dict[DeviceKey, dict[str, Mib]] = {key: {} for key in keys}
        """The MiB that each run that is not over uses on each device, by the mark of the run."""
        self._pending: list[Report] = []
        self._arrived = asyncio.Event()
        self._heartbeat: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """Do nothing, because there is no process to connect to."""

    async def start(self, leader_term: LeaderTerm, lineage: Lineage) -> None:
        self._leader_term = leader_term
        self._pending = []
        self._incarnation = f"simulated-{lineage}.{leader_term.term}"
        self._answer()
        if self._heartbeat is None:
            self._heartbeat = asyncio.create_task(self._beat())

    def _answer(self) -> None:
        node = Node(
            name=NodeName(self._node.name),
            cpu=self._node.cpu,
            memory_mb=Mib(self._node.memory_mb),
            max_runs=self._node.max_runs,
            incarnation=self._incarnation,
            boot_id="simulated",
        )
        self._report(NodeReport(node, self._node.devices, (*self._runs, *self._watched), self._clock.now()))
        for run in self._runs.values():
            for report in run.reports:
                self._report(report)
        self._measure()

    async def send(self, orders: Sequence[Order], payloads: Mapping[TaskId, RunPayload]) -> None:
        for order in orders:
            if self._leader_term is None or self._leader_term.is_over(self._ticks()):
                return
            match order:
                case StartOrder() if order.task in payloads:
                    self._start(order, payloads[order.task])
                case GoOrder():
                    self._go(_key(order))
                case WatchOrder():
                    self._watch(order)
                case StopOrder() if _key(order) not in self._watched:
                    self._stop(order)
                case ForgetOrder() if _key(order) in self._watched:
                    self._stop_watching(_key(order))
                case ForgetOrder() if (run := self._runs.get(_key(order))) and run.is_over:
                    del self._runs[_key(order)]
                case StackOrder():
                    answered_at, message = self._clock.now(), "a simulated run has no process"
                    self._report(
                        Stacked(order.task, order.fence, answered_at, order.request, "", message, order.rank)
                    )
                case StartOrder() | StopOrder() | ForgetOrder() | WorldOrder():
                    pass

    def ask(self, nodes: Sequence[NodeName]) -> None:
        if self._node.name in nodes:
            self._answer()

    def measure(self, nodes: Sequence[NodeName]) -> None:
        if self._node.name in nodes:
            self._measure()

    def look_at_disks(self, order: DiskOrder) -> None:
        message = "a simulated node has no disks"
        self._report(DiskReport(order.node, self._clock.now(), order.request, message=message))

    def read_logs(self, node: NodeName, logs: Mapping[LogName, int]) -> None:
        """Report empty logs, because simulated tasks print nothing."""
        for (task, fence, rank, stream), first_byte in logs.items():
            if node == self._node.name:
                self._report(Logged(task, fence, self._clock.now(), stream, first_byte, b"", rank=rank))

    def prepare(self, order: PrepareOrder, definition: Environment, _project: bytes) -> None:
        """Report the environment as ready: a simulated node has every one."""
        at, python = self._clock.now(), definition.minor
        self._report(EnvironmentReported(order.node, at, order.key, EnvironmentState.READY, python=python))

    def answer(self, answer: ObjectAnswer) -> None:
        """Do nothing, because simulated tasks open no objects."""

    async def reports(self) -> Sequence[Report | TermRefused | ObjectQuestion]:
        await self._arrived.wait()
        self._arrived.clear()
        reports, self._pending = self._pending, []
        return reports

    @property
    def is_connected(self) -> bool:
        return True

    def status(self) -> Mapping[str, Any]:
        return {"state": "connected", "address": "simulated", "message": "tasks only wait"}

    async def flush(self) -> None:
        """Do nothing, because orders are carried out at once."""

    async def stand_back(self) -> None:
        """Stop reporting. The runs go on and are reported at the next start."""
        self._leader_term = None
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            self._heartbeat = None

    async def close(self, *, stop_cluster: bool) -> None:
        await self.stand_back()
        for run in self._runs.values():
            if run.end is not None:
                run.end.cancel()
        if stop_cluster:
            self._runs.clear()

    def _start(self, order: StartOrder, payload: RunPayload) -> None:
        key = _key(order)
        if not self._is_new(key) or order.incarnation != self._incarnation:
            self._refuse(key)
            return
        self._note_fence(key)
        run = self._runs[key] = _Run(order.devices)
        for device, mb in order.devices:
            self._used[device][mark_of(*key)] = mb
        try:
            run.waits_seconds = _seconds(payload)
        except ValueError as fault:
            self._end(key, Ending.FAILED, Failure("exception", str(fault)))
            return
        now = self._clock.now()
        self._report_of(run, Started(order.task, order.fence, now, pid=0, rank=order.rank, ordered_at=now))
        if order.barrier:
            self._report_of(run, Ready(order.task, order.fence, now, DISCARD_ADDRESS, order.rank))
        else:
            self._go(key)

    def _go(self, key: RunId) -> None:
        """Begin the wait of a run. Repeated orders change nothing."""
        run = self._runs.get(key)
        if run is not None and run.end is None and not run.is_over:
            after = asyncio.get_running_loop().call_later
            run.end = after(run.waits_seconds, self._end, key, Ending.SUCCEEDED)

    def _watch(self, order: WatchOrder) -> None:
        key = _key(order)
        self._watched[key] = order.devices
        for device, mb in order.devices:
            self._used[device][mark_of(*key)] = mb

    def _stop_watching(self, key: RunId) -> None:
        for device, _ in self._watched.pop(key):
            del self._used[device][mark_of(*key)]

    def _stop(self, order: StopOrder) -> None:
        """End a run at once. It counts as stopped with a grace period, and as killed without one."""
        key = _key(order)
        run = self._runs.get(key)
        if run is not None and not run.is_over:
            killed = order.grace_seconds <= 0
            failure = Failure("killed", "it was killed") if killed else None
            self._end(key, Ending.LOST if killed else Ending.STOPPED, failure)
        elif run is None and self._is_new(key):
            self._refuse(key)
        elif run is None:
            self._report_gone(key, Proof.PROCESS_ABSENT, self._samples(self._used))

    def _refuse(self, key: RunId) -> None:
        """Report that this order never starts the run. A run that has already started reports its own
        outcome."""
        if key in self._runs:
            return
        self._note_fence(key)
        task, fence, rank = key
        self._report(Ended(task, fence, self._clock.now(), Ending.NEVER_STARTED, rank=rank))
        self._report_gone(key, Proof.NEVER_STARTED)

    def _is_new(self, key: RunId) -> bool:
        task, fence, rank = key
        return fence > self._fences.get((task, rank), 0)

    def _note_fence(self, key: RunId) -> None:
        task, fence, rank = key
        self._fences[task, rank] = max(fence, self._fences.get((task, rank), Fence(0)))
        if len(self._fences) > REMEMBERED_FENCES:
            del self._fences[next(iter(self._fences))]

    def _end(self, key: RunId, ending: Ending, failure: Failure | None = None) -> None:
        run = self._runs[key]
        if run.end is not None:
            run.end.cancel()
        left = [device for device, _ in run.devices]
        for device in left:
            del self._used[device][mark_of(*key)]
        run.end, run.is_over, run.devices = None, True, ()
        now = self._clock.now()
        task, fence, rank = key
        result = b"null" if ending is Ending.SUCCEEDED else None
        self._report_of(run, Ended(task, fence, now, ending, result=result, failure=failure, rank=rank))
        self._report_of(run, Gone(task, fence, now, Proof.PROCESS_ABSENT, self._samples(left), rank))

    def _report_gone(self, key: RunId, proof: Proof, samples: tuple[DeviceSample, ...] = ()) -> None:
        task, fence, rank = key
        self._report(Gone(task, fence, self._clock.now(), proof, samples, rank))

    def _report_of(self, run: _Run, report: Report) -> None:
        run.reports.append(report)
        self._report(report)

    def _samples(self, devices: Iterable[DeviceKey]) -> tuple[DeviceSample, ...]:
        now = self._clock.now()
        held = ((device, dict(self._used[device])) for device in devices)
        return tuple(
            DeviceSample(
                device, now, Mib(sum(by_holder.values())), by_holder=by_holder,
                utilization=1.0 if by_holder else 0.0,
            )
            for device, by_holder in held
        )  # fmt: skip

    def _measure(self) -> None:
        """Report the present use of all devices and of the node."""
        now, node = self._clock.now(), self._node
        self._report(Sampled(NodeName(node.name), now, self._samples(self._used)))
        busy, memory_mb = min(1.0, len(self._runs) / node.max_runs), Mib(node.memory_mb)
        self._report(NodeSample(NodeName(node.name), now, busy, memory_mb, memory_mb))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._period_seconds)
            self._measure()

    def _report(self, report: Report) -> None:
        if self._leader_term is None:
            return  # the next leader gets all reports again
        self._pending.append(report)
        self._arrived.set()


def _key(order: Order) -> RunId:
    return order.task, order.fence, order.rank


def _seconds(payload: RunPayload) -> float:
    """Return the seconds that the task waits; 0 if it is no entrypoint. Raises ValueError."""
    if payload.spec.kind != "entrypoint" or not payload.arguments:
        return 0.0
    match json.loads(payload.arguments):
        case {"kwargs": {"seconds": int() | float() as seconds}} if 0 <= seconds <= LONGEST_SECONDS:
            return float(seconds)
        case {"kwargs": {"seconds": wrong}}:
            raise ValueError(f"kwargs.seconds is {wrong!r}; give seconds from 0 to {LONGEST_SECONDS}")
        case _:
            return 0.0
