"""The executor on real Ray keeps the contract of every executor."""

import pytest

from tests.contracts.executor_bench import Bench
from tests.contracts.executor_suite import ExecutorSuite
from tests.e2e.ray_lab import Lab

pytestmark = pytest.mark.asyncio(loop_scope="session")


class TestRayExecutor(ExecutorSuite):
    @pytest.fixture
    def bench(self, lab: Lab) -> Bench:
        return lab

    async def test_node_tells_how_full_its_session_disk_and_its_object_store_are(self, bench: Bench) -> None:
        [machine, *_] = await bench.until(lambda: bench.node_samples)
        [session] = machine.disks
        assert "/session_" in session.path
        assert 0 < session.free_bytes < session.total_bytes
        assert machine.store is not None
        assert machine.store.total_mb > 0
        assert machine.store.spilled_mb == 0
