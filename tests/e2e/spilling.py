"""A Ray whose object store is too small: prints what an agent's measurement says of it, before and after."""

import asyncio
import sys
import time
from pathlib import Path

import ray
from gpubroker_server.adapters.ray.agent.host_meter import HostMeter
from gpubroker_server.adapters.ray.agent.runner_pool import RayRunners

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
    print(before, measured()[1] > 0, len(kept))


main(sys.argv[1])
