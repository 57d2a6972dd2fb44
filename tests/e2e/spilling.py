"""A Ray whose object store is too small: prints what an agent's measurement says of it, before and after."""

import asyncio
import sys
import time
from pathlib import Path

import ray
from gpubroker_server.adapters.ray.agent.host_meter import HostMeter
from gpubroker_server.adapters.ray.agent.runner_pool import RayRunners
from gpubroker_server.core.control.findings.nodes import spilling_stores
from gpubroker_server.core.domain.device import NodeSample, StoreSample
from gpubroker_server.core.domain.units import Mib, NodeName

from tests.builders import NOW
from tests.contracts.fake_runners import an_agent_config
from tests.patience import PATIENCE_SECONDS

MIB = 2**20


def main(folder: str) -> None:
    ray.init(object_store_memory=80 * MIB, num_cpus=1, include_dashboard=False, log_to_driver=False)
    runners = RayRunners(an_agent_config(Path(folder)))
    meter = HostMeter(runners.session, ())

    def measured() -> tuple[int, int]:
        store: tuple[int, int] = asyncio.run(meter.report({}))[9]
        return store

    before = measured()
    kept = [ray.put(bytes(20 * MIB)) for _ in range(8)]
    until = time.monotonic() + PATIENCE_SECONDS
    while measured() == before and time.monotonic() < until:
        time.sleep(0.1)
    sample = NodeSample(NodeName("n1"), NOW, 0.0, Mib(1), Mib(1), store=StoreSample(*measured()))
    print(before, [one.kind for one in spilling_stores([sample])], len(kept))


main(sys.argv[1])
