"""The executor that runs nothing keeps the contract of those that do."""

import time
from collections.abc import AsyncIterator

import pytest

from service.adapters.memory.executor import SimulatedNode, WaitingExecutor
from service.core.orders import Ended, Ending, Gone, Ready, SeenDevice
from service.core.units import Instant, Mib
from tests.contracts.executor_bench import Bench
from tests.contracts.executor_suite import ExecutorSuite, a_wait, has_settled


class SystemClock:
    def now(self) -> Instant:
        return Instant(time.time())


class TestWaitingExecutor(ExecutorSuite):
    @pytest.fixture
    async def bench(self) -> AsyncIterator[Bench]:
        devices = tuple(SeenDevice(f"GPU-sim-{i}", "simulated", i, Mib(24_000), True) for i in range(2))
        node = SimulatedNode("local", "local", 4.0, 8192, 64, devices)
        bench = Bench(WaitingExecutor(node, SystemClock(), sample_period_seconds=0.5))
        await bench.open()
        yield bench
        await bench.close()

    async def test_ranks_of_one_claim_begin_when_they_are_told_to(self, bench: Bench) -> None:
        ranks = [await a_wait(bench, task="gang", rank=rank, world_size=2) for rank in (0, 1)]
        for rank in ranks:
            assert (await rank.first(Ready)).address
        await has_settled(bench)
        assert ranks[0].order_of_kinds() == ["Started", "Ready"]
        await ranks[1].go("10.0.0.1:4711")
        await ranks[1].go("10.0.0.1:4711")
        await ranks[1].first(Gone)
        assert ranks[1].order_of_kinds() == ["Started", "Ready", "Ended", "Gone"]
        assert ranks[0].order_of_kinds() == ["Started", "Ready"]

    async def test_a_rank_that_waits_for_the_others_gives_way(self, bench: Bench) -> None:
        rank = await a_wait(bench, task="gang", world_size=2)
        await rank.first(Ready)
        await rank.stop(grace_seconds=5)
        assert (await rank.first(Ended)).ending is Ending.STOPPED
