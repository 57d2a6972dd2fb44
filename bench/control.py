"""Fleet control: how the controller of background work settles, what one look at a large fleet takes, what it
adds to the leader's cycles, what an idle fleet costs other processes, and what idle templates make of a
simulated day.

The controller follows loads of higher bands on a model of a fleet of 64 GPUs
(`tests/core/control/fleet_model.py`): background tasks end by themselves, so the share that it gives shows
with a delay. The day is that of `tests/simulation/idle_day.py`: 8 GPUs, the real planner, fewer tasks
at night.

The cycles are those of the real leader on a store in memory. All its nodes are busy with one task each, of
which one ends before each cycle; a cycle hears of five nodes, as 1,000 nodes tell every 2 s. Stretches
with fleet control and samples of machines take turns with stretches without either.
"""

import asyncio
import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from gpubroker_server.adapters.sql.session import json_text
from gpubroker_server.broker.background import Publisher
from gpubroker_server.core.control.alarm import Threshold
from gpubroker_server.core.control.controller import Gains
from gpubroker_server.core.control.findings.diagnose import FleetKnown, diagnose_fleet
from gpubroker_server.core.control.fleet import FleetControl, FleetRules, background_room
from gpubroker_server.core.control.targets import FleetTarget, Measure
from gpubroker_server.core.domain.device import Device, DeviceSample, DiskSample, Node, NodeSample
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import Instant, Mib, NodeName, Term, device_key
from gpubroker_server.core.planning.fragmentation import fragmentation
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.cluster.diagnostics import stuck_task
from gpubroker_server.ports.last_values import LastValues, LastValueStore, LeaderSeen
from gpubroker_server.telemetry.exposition import text_of
from gpubroker_server.telemetry.metrics import Telemetry
from gpubroker_server.telemetry.table import Sources

from bench.busy_fleet import BusyFleet
from bench.measuring import Figure, percentile, report
from tests.builders import GIB, a_task
from tests.core.control.fleet_model import LOADS, overshoot, settled_after, simulate, swings
from tests.simulation.idle_day import use_of, waits_of

GPUS_PER_NODE = 8
STRETCHES = 5


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, default=1000, help=f"of the fleet, {GPUS_PER_NODE} GPUs each")
    parser.add_argument("--looks", type=int, default=50, help="how often it is looked at")
    parser.add_argument("--cycles", type=int, default=2000, help="of the leader, with and without it")
    parser.add_argument("--hours", type=float, default=24.0, help="of the day with idle templates")
    parser.add_argument("--seeds", type=int, default=5, help="of each load; the worst of them counts")


def measure(options: Namespace) -> Iterator[Figure]:
    for name, load in LOADS.items():
        runs = [
            simulate(load.higher, gains=Gains(), hours=3, noise=load.noise, seed=seed)
            for seed in range(options.seeds)
        ]
        settled = max(settled_after(run, load.since) for run in runs)
        report(f"  {name}: {max(swings(run, load.since) for run in runs)} swings of 5 % or more")
        yield Figure("control", f"control.{name}.settle_s", settled, "s", options.seeds)
        over = max(overshoot(run, load.since) for run in runs)
        yield Figure("control", f"control.{name}.overshoot", over, "of all GPUs", options.seeds)
    yield _look(options.nodes, options.looks)
    yield asyncio.run(_cycles(options.nodes, options.cycles))
    yield from _diagnoses(options.nodes, options.looks)
    yield from asyncio.run(_idle(options.nodes, options.looks))
    yield from _day(options.hours, options.seeds)


def _look(nodes: int, looks: int) -> Figure:
    """Measure one step of fleet control and what a cycle takes over from it."""
    world, policy = _fleet(nodes), Policy()
    targets = tuple(FleetTarget(measure, 0.6, 0.8) for measure in Measure)
    overload = {measure: Threshold(0.95, 0.85) for measure in ("cpu", "host_memory")}
    control = FleetControl(FleetRules(targets, controller=True, overload_thresholds=overload), policy)
    seconds = []
    for number in range(looks):
        now = Instant(number * 0.1)
        began = time.perf_counter()
        control.step(world, {}, now)
        world.control(background_room(world, policy, control.seen.background_mb), {})
        seconds.append(time.perf_counter() - began)
    return Figure("control", "control.look_ms", statistics.median(seconds) * 1000, "ms", looks)


async def _cycles(nodes: int, cycles: int) -> Figure:
    """Measure the milliseconds of CPU of the process for a cycle, as the 99th of 100 cycles."""
    with TemporaryDirectory() as folder:
        busy = await BusyFleet.begin(Path(folder), nodes)
        with_it, without = [], []
        for _ in range(STRETCHES):
            without += [await busy.cycle() for _ in range(cycles // STRETCHES)]
            await busy.switch(on=True)
            with_it += [await busy.cycle() for _ in range(cycles // STRETCHES)]
            await busy.switch(on=False)
        await busy.end()
    value, baseline = (1000 * percentile(seconds, 99) for seconds in (with_it, without))
    for name, seconds in (("with", with_it), ("without", without)):
        typical, longest = 1000 * statistics.median(seconds), 1000 * max(seconds)
        report(f"  cycles {name} fleet control: median {typical:.2f} ms, the longest {longest:.1f} ms")
    ratio = value / baseline
    return Figure("control", "control.cycle.p99_ms", value, "ms", cycles, "", baseline, ratio)


def _diagnoses(nodes: int, looks: int) -> Iterator[Figure]:
    """Measure everything that `GET /diagnostics` looks for, in a fleet without findings. Also measure how
    long it takes to find that nothing but a change will start a task; others have their turn during that
    search."""
    world, policy, now = _fleet(nodes), Policy(), Instant(1.0)
    agents = {node: {"python": "3.12.1", "ray": "2.50.0", "clock_ahead_seconds": 0} for node in world.nodes}
    facts = FleetKnown({"state": "connected", "agents": agents}, has_leader=True)
    seconds = []
    for _ in range(looks):
        began = time.perf_counter()
        assert not list(diagnose_fleet(world, policy, facts, now))
        seconds.append(time.perf_counter() - began)
    yield Figure("control", "control.diagnosis_ms", statistics.median(seconds) * 1000, "ms", looks)
    task = a_task("t", gpu_mb=100 * GIB)
    seconds = []
    for _ in range(looks):
        began = time.perf_counter()
        assert stuck_task(task, world, policy) is not None
        seconds.append(time.perf_counter() - began)
    yield Figure("control", "control.stuck_ms", statistics.median(seconds) * 1000, "ms", looks)


async def _idle(nodes: int, looks: int) -> list[Figure]:
    """Measure, with all GPUs idle, the bytes that the leader writes for other processes each second, and the
    CPU time of reading and of formatting a scrape while a gateway answers nothing else."""
    world, policy, store = _fleet(nodes), Policy(), CountingStore()
    control = FleetControl(FleetRules(), policy)
    for now in (Instant(0.0), Instant(400.0)):
        world.measure(DeviceSample(key, now, Mib(0), utilization=0.0) for key in world.ledgers)
        control.step(world, {}, now)
    leader = LeaderSeen(Term(1), "bench", now, {}, fleet=control.seen)
    publisher = Publisher(world, {}, lambda _: leader, store)
    for _ in range(2):  # the first call writes all values
        await publisher.publish(leader.term)
    pieces = fragmentation(world, policy, now), None
    sources = world, lambda: 0.0, lambda: leader, policy, lambda: now, lambda: pieces
    telemetry = Telemetry(Sources(*sources, str, lambda: None, lambda: 0))
    reads, texts = [], []
    for _ in range(looks):
        began = time.process_time()
        metrics = telemetry.metrics()
        read = time.process_time()
        text_of(metrics)
        reads.append(read - began)
        texts.append(time.process_time() - read)
    return [
        Figure("control", "control.published_kb", store.written_bytes / 1000, "kB", 1),
        Figure("control", "control.scrape_read_ms", statistics.median(reads) * 1000, "ms", looks),
        Figure("control", "control.scrape_text_ms", statistics.median(texts) * 1000, "ms", looks),
    ]


class CountingStore(LastValueStore):
    """Counts the bytes that are written. Nobody reads them."""

    written_bytes = 0
    """The number of bytes of the last write."""

    async def publish(self, _term: Term, _number: int, values: LastValues) -> None:
        self.written_bytes = len(json_text(values))

    async def published(self, after: int) -> tuple[int, LastValues]:
        return after, LastValues()


def _day(hours: float, seeds: int) -> Iterator[Figure]:
    """Measure the means over the seeds: shares of the GPUs' time in use, and waits of all higher bands."""
    days = [[use_of(seed, hours, fills=fills) for fills in (True, False)] for seed in range(1, seeds + 1)]
    for name, uses in zip(("filled", "plain"), zip(*days, strict=True), strict=True):
        held = statistics.mean(use.held for use in uses)
        yield Figure("control", f"control.day.{name}.held", held, "of all GPUs", seeds)
    for measure in ("median", "mean", "p95"):
        waits = [waits_of(filled, plain)[measure] for filled, plain in days]
        for name, seconds in zip(("filled", "plain"), zip(*waits, strict=True), strict=True):
            figure = f"control.day.{name}.wait_{measure}_s"
            yield Figure("control", figure, statistics.mean(seconds), "s", seeds)


def _fleet(nodes: int) -> World:
    world, at = World(), Instant(0.0)
    for number in range(nodes):
        node = NodeName(f"n{number:04}")
        world.add_node(Node(node, 64.0, Mib(512 * 1024), 256, "1", "1"))
        disks = (DiskSample("/", 1000, 500),)
        world.node_samples[node] = NodeSample(node, at, 0.5, Mib(1000), Mib(500), disks=disks)
        for index in range(GPUS_PER_NODE):
            key = device_key("bench", node, f"GPU-{index}")
            world.add_device(Device(key, node, f"GPU-{index}", "H100", index, Mib(81_920)))
            world.measure([DeviceSample(key, at, Mib(40_000), utilization=(number % 10) / 10)])
    return world
