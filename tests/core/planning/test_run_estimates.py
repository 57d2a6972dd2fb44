"""What is expected of a task, going by what runs like it took."""

from typing import Any

import pytest
from gpubroker_server.core.domain.estimates import RELATIVE_ERROR, Sketch, SketchKey, What
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.core.planning.forecasts.run_estimates import Remaining, remaining_seconds, run_seconds
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.builders import GIB, NOW, a_device, a_node, a_sketch, a_task, a_world, holding

POLICY = Policy()
SMALL, LARGE = a_device("gpu0", kind="L4", mb=24 * GIB), a_device("gpu1", kind="H100", mb=80 * GIB)


def times(*seconds: float, kind: str = "") -> dict[SketchKey, Sketch]:
    return {SketchKey("default", "resnet", kind, What.SECONDS): a_sketch(seconds)}


def a_run(started_ago: float = 100.0) -> Task:
    fields: dict[str, Any] = {"started_at": Instant(NOW - started_ago)}
    return holding(a_task(subject="resnet", cpu=1.0), node="n1", **fields).task


def test_half_of_the_runs_that_took_longer_are_over_by_the_first_time() -> None:
    remaining = remaining_seconds(a_run(0.0), times(*range(1, 101)), NOW)
    assert remaining is not None
    assert remaining.p50_seconds == pytest.approx(50.0, rel=2 * RELATIVE_ERROR)
    assert remaining.p90_seconds == pytest.approx(90.0, rel=2 * RELATIVE_ERROR)
    assert remaining.n == 100


def test_runs_that_were_over_sooner_say_nothing_of_one_that_still_runs() -> None:
    remaining = remaining_seconds(a_run(100.0), times(*[10.0] * 90, *[300.0] * 10), NOW)
    assert remaining is not None
    assert remaining.p50_seconds == pytest.approx(200.0, rel=2 * RELATIVE_ERROR)
    assert remaining.n == 10


def test_a_run_that_outlasted_all_known_ones_has_no_end_in_sight() -> None:
    assert remaining_seconds(a_run(100.0), times(10.0, 20.0), NOW) is None


def test_the_stated_run_time_counts_until_it_is_over() -> None:
    stated = replace(a_run(100.0), expected_seconds=Seconds(160.0))
    remaining = remaining_seconds(stated, times(500.0), NOW)
    assert remaining is not None
    assert (remaining.p50_seconds, remaining.p90_seconds, remaining.n) == (60.0, 60.0, 0)
    outlasted = remaining_seconds(replace(stated, expected_seconds=Seconds(90.0)), times(500.0), NOW)
    assert outlasted is not None
    assert outlasted.n == 1


def test_a_task_that_waits_has_no_end_in_sight() -> None:
    assert remaining_seconds(a_task(subject="resnet"), times(10.0), NOW) is None


def test_times_on_another_kind_of_device_do_not_count() -> None:
    assert remaining_seconds(a_run(0.0), times(10.0, kind="L4"), NOW, kind="H100") is None


@given(st.lists(st.floats(1.0, 1e6), min_size=1, max_size=50), st.floats(0.0, 1e6))
def test_an_expected_end_is_never_in_the_past_and_in_order(seconds: list[float], elapsed: float) -> None:
    remaining = remaining_seconds(a_run(elapsed), times(*seconds), NOW)
    if remaining is None:
        assert max(seconds) <= elapsed * (1 + 3 * RELATIVE_ERROR) + 0.01
    else:
        assert 0 <= remaining.p50_seconds <= remaining.p90_seconds


def test_a_stopping_run_still_has_an_end_in_sight() -> None:
    world = a_world(a_node(), holding(a_task(subject="resnet"), node="n1", state=TaskState.STOPPING))
    [task] = world.tasks.values()
    assert remaining_seconds(task, times(500.0), NOW) is not None


def test_run_estimate_is_the_stated_time_or_that_of_enough_similar_runs() -> None:
    task = a_task(subject="resnet")
    known = run_seconds(task, times(*[100.0] * 5), POLICY)
    assert known is not None
    assert known.p50_seconds == known.p90_seconds == pytest.approx(100.0, rel=RELATIVE_ERROR)
    assert known.n == 5
    assert run_seconds(task, times(*[100.0] * 4), POLICY) is None, "too few to go by"
    assert run_seconds(task, {}, POLICY) is None
    stated = replace(task, expected_seconds=Seconds(7.0))
    assert run_seconds(stated, times(*[100.0] * 5), POLICY) == Remaining(Seconds(7.0), Seconds(7.0), 0)
