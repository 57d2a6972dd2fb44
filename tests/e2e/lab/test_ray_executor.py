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
