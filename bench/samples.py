"""What measuring a fleet costs: CPU of a node's agent, and memory and time of an hour of history.

The agent is the real one on real Ray, with simulated GPUs and without work; its CPU time is that of its
process, divided by the clock's. `host_sample_ms` is CPU time of one measurement of the machine without its
GPUs. The history is that of a simulated fleet; its memory is taken at the first value of each kind.
"""

import asyncio
import json
import statistics
import time
import tracemalloc
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from tempfile import TemporaryDirectory

import psutil
from gpubroker_server.adapters.ray.agent.host_meter import HostMeter, RaySession
from gpubroker_server.core.control.history import STEP_SECONDS, FleetHistory
from gpubroker_server.core.domain.device import Device, DeviceSample, DiskSample, GpuHealth, Node, NodeSample
from gpubroker_server.core.domain.units import DeviceKey, Instant, Mib, NodeName
from gpubroker_server.core.world.world import World

from bench.measuring import Figure
from bench.nodes import cpu_seconds, wait_for_nodes
from bench.processes import service

AGENT = "ray::NodeAgent"
MIB = 2**20
PASSES = 9


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--gpus", type=int, default=8, help="of each node")
    parser.add_argument("--nodes", type=int, default=1000, help="of the simulated fleet")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long CPU time is counted")
    parser.add_argument("--samples", type=int, default=200, help="measurements of the machine")


def measure(options: Namespace) -> Iterator[Figure]:
    cores = agent_cores(options.gpus, options.seconds)
    yield Figure("samples", "samples.agent_cores", cores, "cores", options.gpus)
    ms = 1000 * host_sample_seconds(options.samples)
    yield Figure("samples", "samples.host_sample_ms", ms, "ms", options.samples)
    kept_mb, pass_seconds = history(options.nodes, options.gpus)
    devices = options.nodes * options.gpus
    yield Figure("samples", "samples.history_mb", kept_mb, "MiB", devices)
    yield Figure("samples", "samples.history_pass_ms", 1000 * pass_seconds, "ms", devices)


def agent_cores(gpus: int, seconds: float) -> float:
    """Return the share of a core that an agent at rest uses, with the default periods. Raises NotReady."""
    with service(SIMULATED_DEVICES=json.dumps([{"memory_mb": 81920, "count": gpus}])) as running:
        wait_for_nodes(running, 1)
        [agent] = (one for one in psutil.process_iter(["cmdline"]) if _is_agent(one, str(running.data_dir)))
        time.sleep(min(seconds, 5.0))  # until its start is over
        began, before = time.monotonic(), cpu_seconds(agent)
        time.sleep(seconds)
        return (cpu_seconds(agent) - before) / (time.monotonic() - began)


def _is_agent(process: psutil.Process, data_dir: str) -> bool:
    """True if the process is an agent of this service: its log is below its data directory."""
    if AGENT not in " ".join(process.info["cmdline"] or ()):
        return False
    return any(opened.path.startswith(data_dir) for opened in process.open_files())


def host_sample_seconds(samples: int) -> float:
    """Return the CPU seconds of one measurement of the machine, including all its threads."""

    async def measured() -> float:
        with TemporaryDirectory() as folder:
            meter = HostMeter(RaySession(folder, folder, MIB), ["/"])
            await meter.report({})
            before = time.process_time()
            for _ in range(samples):
                await meter.report({})
            return (time.process_time() - before) / samples

    return asyncio.run(measured())


def history(nodes: int, gpus: int) -> tuple[float, float]:
    """Return the MiB for an hour of all values of a fleet, which are allocated at the first value, and the
    CPU seconds for taking over one sample of each."""
    world = World()
    for node in range(nodes):
        name = NodeName(f"n{node}")
        world.add_node(Node(name, 64.0, Mib(1024), 64, "a", "b"))
        for gpu in range(gpus):
            key = DeviceKey(f"c/{name}/GPU-{node}-{gpu}")
            world.add_device(Device(key, name, f"GPU-{node}-{gpu}", "H100", gpu, Mib(81920)))
    tracemalloc.start()
    kept = FleetHistory()
    take_over(kept, world, Instant(1.0))
    kept_mb = tracemalloc.get_traced_memory()[0] / MIB
    tracemalloc.stop()
    passes = [take_over(kept, world, Instant(step * STEP_SECONDS)) for step in range(1, PASSES + 1)]
    return kept_mb, statistics.median(passes)


def take_over(history_of_fleet: FleetHistory, world: World, at: Instant) -> float:
    """Take over a sample of each node and device, and return the CPU seconds, without those of making the
    sample."""
    for name in world.nodes:
        keys = world.by_node[name]
        gpus = {key.rpartition("/")[2]: GpuHealth(400.0, 60.0, 1980, 2619, 0) for key in keys}
        sample = NodeSample(name, at, 0.5, Mib(1000), Mib(500), 0.0, (DiskSample("/", 100, 50),), gpus=gpus)
        world.measure([DeviceSample(key, at, Mib(100), utilization=0.5) for key in keys], [sample])
    before = time.process_time()
    for _ in history_of_fleet.follow(world):
        pass
    return time.process_time() - before
