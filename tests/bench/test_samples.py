"""What measuring costs: the short form of `python -m bench samples`."""

import pytest

from bench.samples import agent_cores, history, host_sample_seconds

ONE_PERCENT = 0.01
PERIOD_SECONDS = 2.0


def test_a_machine_is_measured_in_a_hundredth_of_a_core() -> None:
    assert 0 < host_sample_seconds(20) < ONE_PERCENT * PERIOD_SECONDS


def test_an_hour_of_a_fleet_is_kept_in_bounded_memory() -> None:
    kept_mb, pass_seconds = history(10, 8)
    assert 0 < kept_mb * 100 < 80, "of 1,000 nodes with 8 GPUs each"
    assert pass_seconds < 1.0


@pytest.mark.evidence
def test_an_agent_at_rest_with_eight_gpus_takes_a_hundredth_of_a_core() -> None:
    assert agent_cores(8, 60.0) < ONE_PERCENT
