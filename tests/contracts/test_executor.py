"""The executor that runs nothing keeps the contract of those that do."""

import time
from collections.abc import AsyncIterator

import pytest
from gpubroker_server.adapters.simulated_executor import SimulatedNode, WaitingExecutor
from gpubroker_server.core.domain.orders import ReportedDevice
from gpubroker_server.core.domain.units import Instant, Mib

from tests.contracts.executor_bench import Bench
from tests.contracts.executor_suite import ExecutorSuite


class SystemClock:
    def now(self) -> Instant:
        return Instant(time.time())


class TestWaitingExecutor(ExecutorSuite):
    @pytest.fixture
    async def bench(self) -> AsyncIterator[Bench]:
        devices = tuple(ReportedDevice(f"GPU-sim-{i}", "simulated", i, Mib(24_000), True) for i in range(2))
        node = SimulatedNode("local", "local", 4.0, 8192, 64, devices)
        bench = Bench(WaitingExecutor(node, SystemClock(), sample_period_seconds=0.5))
        await bench.open()
        yield bench
        await bench.close()
