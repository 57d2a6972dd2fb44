"""Idle templates over a simulated day with the real planner: they fill the GPUs, and make room in time."""

import pytest

from tests.simulation.idle_day import NOTICE_SECONDS, DayUse, use_of, waits_of


def both_days(seed: int, hours: float) -> tuple[DayUse, DayUse]:
    return use_of(seed, hours, fills=True), use_of(seed, hours, fills=False)


def test_templates_fill_the_gpus_and_make_room_within_their_notice() -> None:
    filled, plain = both_days(1, hours=2.0)
    assert plain.held < 0.7
    assert filled.held > 0.9  # for the first minutes nothing counts as idle
    assert (plain.preempted, filled.preempted > 0) == (0, True)
    mean, without = waits_of(filled, plain)["mean"]
    assert mean <= without + NOTICE_SECONDS


@pytest.mark.evidence
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_over_a_whole_day_templates_hold_all_but_a_twentieth(seed: int) -> None:
    filled, plain = both_days(seed, hours=24.0)
    assert filled.held >= 0.95
    assert plain.held < 0.7
    # Means differ by a minute in either direction: a few tasks of four GPUs wait for hours on one day.
    median, without = waits_of(filled, plain)["median"]
    assert median <= without + NOTICE_SECONDS
