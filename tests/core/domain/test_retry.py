"""When a failed task is tried again."""

import pytest
from gpubroker_server.core.domain.policy import Policy, next_retry_at
from gpubroker_server.core.domain.units import Seconds

from tests.builders import NOW


@pytest.mark.parametrize(("failures", "delay"), [(1, 1.0), (2, 2.0), (3, 4.0), (9, 256.0), (10, 300.0)])
def test_each_failure_doubles_the_wait_up_to_the_cap(failures: int, delay: float) -> None:
    assert next_retry_at(failures, NOW, Policy()) == NOW + delay


def test_a_hundred_failures_wait_no_longer_than_the_cap() -> None:
    steep = Policy(retry_factor=10_000.0, retry_cap_seconds=Seconds(60.0))
    assert next_retry_at(100, NOW, steep) == NOW + 60.0
