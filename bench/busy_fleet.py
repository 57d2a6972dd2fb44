"""A leader of many busy nodes, one cycle at a time: the real loop on a store in memory."""

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

from gpubroker_server.bootstrap.process import make_full_collections_rare
from gpubroker_server.broker.fleet import FleetKeeper
from gpubroker_server.core.control.disk_guard import DiskGuard
from gpubroker_server.core.control.fleet import FleetRules
from gpubroker_server.core.control.targets import FleetTarget, Measure
from gpubroker_server.core.domain.device import (
    DeviceSample,
    DiskSample,
    FileClass,
    GpuHealth,
    Node,
    NodeSample,
    WatchedRoot,
)
from gpubroker_server.core.domain.lease import Proof
from gpubroker_server.core.domain.orders import (
    Ended,
    Ending,
    Gone,
    NodeReport,
    Order,
    Report,
    ReportedDevice,
    Sampled,
    Started,
    StartOrder,
)
from gpubroker_server.core.domain.units import Instant, Mib, NodeName, TaskId, device_key
from gpubroker_server.ports.executor import RunPayload

from tests.broker.stage import Stage, WitnessedExecutor

GPUS = 8
WAITING = 20
NODES_HEARD = 5
"""The number of nodes that report in each cycle."""
CYCLE_SECONDS = 0.01
"""The seconds between two cycles on the clock of the leader."""
RULES = FleetRules(
    tuple(FleetTarget(measure, 0.6, 0.8) for measure in Measure),
    controller=True,
    disk=DiskGuard(roots=(WatchedRoot("/scratch", FileClass.LOG),)),
)


class Runs(WitnessedExecutor):
    """An executor whose nodes start every ordered run at once."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage.store, stage.clock)
        self.begun_runs: deque[StartOrder] = deque()
        self.news: list[Report] = []

    async def send(self, orders: Sequence[Order], payloads: Mapping[TaskId, RunPayload]) -> None:
        for order in orders:
            if isinstance(order, StartOrder) and order.task in payloads:
                self.begun_runs.append(order)
                now = self._clock.now()
                self.news.append(Started(order.task, order.fence, now, pid=1, ordered_at=now))


class BusyFleet:
    def __init__(self, folder: Path, nodes: int) -> None:
        self._stage = Stage(folder)
        self._runs = Runs(self._stage)
        self._stage.executor, self._stage.fleet_rules = self._runs, RULES
        self._nodes = [NodeName(f"b{number:04}") for number in range(nodes)]
        self._next, self._tasks = 0, count()
        self._between = asyncio.Event()
        self._fleet: FleetKeeper | None = None
        self._keeping: asyncio.Task[None] | None = None

    @classmethod
    async def begin(cls, folder: Path, nodes: int) -> "BusyFleet":
        """Return a leader whose nodes all have a task, with some further tasks waiting."""
        busy = cls(folder, nodes)
        make_full_collections_rare()
        await busy._stage.lead()
        busy._fleet, busy._stage.leader.fleet = busy._stage.leader.fleet, None
        for name in busy._nodes:
            devices = tuple(
                ReportedDevice(f"{name}-{n}", "H100", n, Mib(81_920), simulated=True) for n in range(GPUS)
            )
            node = Node(name, 64.0, Mib(512 * 1024), 64, incarnation="1", boot_id="1")
            busy._runs.news.append(NodeReport(node, devices, (), busy._stage.clock.now()))
        await busy._hear()
        for name in busy._nodes:
            busy._runs.news += busy._samples(name)
        for _ in range(nodes + WAITING):
            await busy._submit()
        while len(busy._runs.begun_runs) < nodes or busy._runs.news:
            await busy._hear()
        return busy

    async def switch(self, *, on: bool) -> None:
        """Switch fleet control, which runs beside the cycles as in a service, and samples of machines on or
        off."""
        self._stage.leader.fleet = self._fleet if on else None
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
        assert self._fleet is not None
        self._keeping = asyncio.create_task(self._fleet.keep(self._between)) if on else None

    async def cycle(self) -> float:
        """Run one cycle and return its CPU seconds."""
        stage, ended = self._stage, self._runs.begun_runs.popleft()
        stage.clock.time = Instant(stage.clock.time + CYCLE_SECONDS)
        await self._submit()
        now, of_run = stage.clock.now(), (ended.task, ended.fence)
        self._runs.news += [
            Ended(*of_run, now, Ending.SUCCEEDED, b"null"), Gone(*of_run, now, Proof.PROCESS_ABSENT)
        ]  # fmt: skip
        for _ in range(NODES_HEARD):
            self._runs.news += self._samples(self._nodes[self._next])
            self._next = (self._next + 1) % len(self._nodes)
        self._between.set()
        await asyncio.sleep(CYCLE_SECONDS / 2)
        self._between.clear()
        began = time.process_time()
        await self._hear()
        return time.process_time() - began

    async def end(self) -> None:
        await self._runs.close(stop_cluster=True)

    async def _hear(self) -> None:
        news, self._runs.news = self._runs.news, []
        await self._stage.hear(*news)

    async def _submit(self) -> None:
        await self._stage.submit(f"t{next(self._tasks):08}", gpus=GPUS)

    def _samples(self, name: NodeName) -> Sequence[Report]:
        now = self._stage.clock.now()
        uuids = [f"{name}-{n}" for n in range(GPUS)]
        use = [DeviceSample(device_key("test", name, uuid), now, Mib(0), utilization=0.7) for uuid in uuids]
        heard: list[Report] = [Sampled(name, now, tuple(use))]
        if self._keeping is not None:
            gpus = {uuid: GpuHealth(400.0, 60.0, 1980, 2619, 0) for uuid in uuids}
            disks = (DiskSample("/scratch", 1000, 500),)
            about = Mib(512 * 1024), Mib(256 * 1024), 0.0, disks
            heard.append(NodeSample(name, now, 0.5, *about, gpus=gpus))
        return heard
