"""What is expected of a task, going by what runs like it took."""

from dataclasses import replace
from typing import Any

import pytest
from gpubroker_server.core.domain.demand import need_mb
from gpubroker_server.core.domain.estimates import RELATIVE_ERROR, Sketch, SketchKey, What
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.core.planning.forecasts.run_estimates import (
    Remaining,
    Size,
    learned_size,
    remaining_seconds,
    run_seconds,
    size_of_ranks,
    unstated_size,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import GIB, NOW, a_demand, a_device, a_node, a_sketch, a_task, a_world, holding

POLICY = Policy()
SMALL, LARGE = a_device("gpu0", kind="L4", mb=24 * GIB), a_device("gpu1", kind="H100", mb=80 * GIB)


def sizes(*gib: float, kind: str = "H100", subject: str = "resnet") -> dict[SketchKey, Sketch]:
    return {SketchKey("default", subject, kind, What.GPU_MB): a_sketch(size * GIB for size in gib)}


def times(*seconds: float, kind: str = "") -> dict[SketchKey, Sketch]:
    return {SketchKey("default", "resnet", kind, What.SECONDS): a_sketch(seconds)}


def size_of(sketches: dict[SketchKey, Sketch], subject: str = "resnet", **policy: Any) -> Size:
    return learned_size(sketches, "default", subject, [SMALL, LARGE], Policy(**policy))


def a_run(started_ago: float = 100.0) -> Task:
    fields = {"started_at": Instant(NOW - started_ago)}
    return holding(a_task(subject="resnet", cpu=1.0), node="n1", **fields).task


def test_a_learned_size_is_what_nearly_all_runs_used_and_a_margin():
    size = size_of(sizes(*[4.0] * 19, 30.0))
    assert size.p95_mb == pytest.approx(4 * GIB, rel=RELATIVE_ERROR)
    assert size.gpu_mb == pytest.approx(1.15 * 4 * GIB, rel=RELATIVE_ERROR)
    assert (size.n, size.kind) == (20, "H100")
    assert "(20 runs on H100); with a margin of 15% that makes 4.5 GiB" in size.message


def test_of_few_runs_none_is_left_out_of_a_size():
    size = size_of(sizes(4.0, 4.0, 4.0, 4.0, 30.0))
    assert size.p95_mb == pytest.approx(30 * GIB, rel=RELATIVE_ERROR)


def test_the_margin_and_the_least_runs_are_the_operators_choice():
    assert size_of(sizes(4.0), learned_least_runs=1, learned_margin=1.0).gpu_mb == pytest.approx(
        8 * GIB, rel=RELATIVE_ERROR
    )


def test_with_too_few_runs_it_is_a_whole_device_and_the_answer_says_so():
    size = size_of(sizes(4.0, 4.0, 4.0, 4.0))
    assert (size.gpu_mb, size.p95_mb, size.n) == (None, None, 4)
    assert size.message == (
        "it gets whole GPUs: 4 runs of resnet have been measured, and it takes 5 to know its size"
    )


def test_nothing_is_known_of_a_task_without_a_subject():
    assert "without model type, name and entrypoint" in size_of(sizes(*[4.0] * 9), "").message


def test_of_several_kinds_the_one_on_which_runs_took_most_counts():
    sketches = sizes(*[4.0] * 9) | sizes(*[6.0] * 9, kind="L4")
    size = size_of(sketches)
    assert (size.kind, size.p95_mb) == ("L4", pytest.approx(6 * GIB, rel=RELATIVE_ERROR))


def test_ranks_of_one_size_give_one_message_and_of_several_sizes_the_largest_counts():
    known, few = size_of(sizes(*[4.0] * 9)), size_of({})
    assert size_of_ranks({}) is None
    assert size_of_ranks({"rank 0": known, "rank 1": known}) == known
    both = size_of_ranks({"rank 0": known, "ranks 1 to 3": few})
    assert both is not None
    assert (both.gpu_mb, both.message) == (None, f"rank 0: {known.message}; ranks 1 to 3: {few.message}")
    large = size_of(sizes(*[8.0] * 9))
    assert size_of_ranks({"rank 0": known, "rank 1": large}).gpu_mb == large.gpu_mb


def test_a_kind_without_devices_does_not_count():
    assert size_of(sizes(*[4.0] * 9, kind="V100")).gpu_mb is None


def test_the_margin_never_asks_for_more_than_the_device_had():
    assert size_of(sizes(*[23.0] * 9, kind="L4")).gpu_mb == 24 * GIB


def test_what_a_process_costs_of_itself_is_leased_apart_and_not_learned_twice():
    device = a_device(kind="H100", context_mb=512)
    size = learned_size(sizes(*[4.0] * 9), "default", "resnet", [device], POLICY)
    assert size.gpu_mb == pytest.approx(1.15 * 4 * GIB - 512, rel=2 * RELATIVE_ERROR)
    assert size.message.endswith("that makes 4.0 GiB beside 0.5 GiB for each process")
    assert need_mb(a_demand(gpu_mb=size.gpu_mb), device) == pytest.approx(1.15 * 4 * GIB, rel=RELATIVE_ERROR)


def test_a_process_that_used_no_more_than_it_costs_still_gets_something():
    device = a_device(kind="H100", context_mb=512)
    assert learned_size(sizes(*[0.1] * 9), "default", "resnet", [device], POLICY).gpu_mb == 1


@given(st.floats(0.01, 80), st.integers(0, 2048), st.floats(0, 1))
def test_a_learned_size_fits_where_its_runs_had_room(gib: float, context_mb: int, margin: float):
    device = a_device(kind="H100", context_mb=context_mb)
    policy = Policy(learned_margin=margin)
    size = learned_size(sizes(*[gib] * 9), "default", "resnet", [device], policy)
    assert size.gpu_mb is not None
    assert need_mb(a_demand(gpu_mb=size.gpu_mb), device) is not None


def test_half_of_the_runs_that_took_longer_are_over_by_the_first_time():
    remaining = remaining_seconds(a_run(0.0), times(*range(1, 101)), NOW)
    assert remaining is not None
    assert remaining.p50_seconds == pytest.approx(50.0, rel=2 * RELATIVE_ERROR)
    assert remaining.p90_seconds == pytest.approx(90.0, rel=2 * RELATIVE_ERROR)
    assert remaining.n == 100


def test_runs_that_were_over_sooner_say_nothing_of_one_that_still_runs():
    remaining = remaining_seconds(a_run(100.0), times(*[10.0] * 90, *[300.0] * 10), NOW)
    assert remaining is not None
    assert remaining.p50_seconds == pytest.approx(200.0, rel=2 * RELATIVE_ERROR)
    assert remaining.n == 10


def test_a_run_that_outlasted_all_known_ones_has_no_end_in_sight():
    assert remaining_seconds(a_run(100.0), times(10.0, 20.0), NOW) is None


def test_the_stated_run_time_counts_until_it_is_over():
    stated = replace(a_run(100.0), expected_seconds=Seconds(160.0))
    remaining = remaining_seconds(stated, times(500.0), NOW)
    assert remaining is not None
    assert (remaining.p50_seconds, remaining.p90_seconds, remaining.n) == (60.0, 60.0, 0)
    outlasted = remaining_seconds(replace(stated, expected_seconds=Seconds(90.0)), times(500.0), NOW)
    assert outlasted is not None
    assert outlasted.n == 1


def test_a_task_that_waits_has_no_end_in_sight():
    assert remaining_seconds(a_task(subject="resnet"), times(10.0), NOW) is None


def test_times_on_another_kind_of_device_do_not_count():
    assert remaining_seconds(a_run(0.0), times(10.0, kind="L4"), NOW, kind="H100") is None


@given(st.lists(st.floats(1.0, 1e6), min_size=1, max_size=50), st.floats(0.0, 1e6))
def test_an_expected_end_is_never_in_the_past_and_in_order(seconds: list[float], elapsed: float):
    remaining = remaining_seconds(a_run(elapsed), times(*seconds), NOW)
    if remaining is None:
        assert max(seconds) <= elapsed * (1 + 3 * RELATIVE_ERROR) + 0.01
    else:
        assert 0 <= remaining.p50_seconds <= remaining.p90_seconds


def test_a_stopping_run_still_has_an_end_in_sight():
    world = a_world(a_node(), holding(a_task(subject="resnet"), node="n1", state=TaskState.STOPPING))
    [task] = world.tasks.values()
    assert remaining_seconds(task, times(500.0), NOW) is not None


def test_a_run_that_begins_now_takes_what_was_stated_or_else_what_enough_runs_like_it_took():
    task = a_task(subject="resnet")
    known = run_seconds(task, times(*[100.0] * 5), POLICY)
    assert known is not None
    assert known.p50_seconds == known.p90_seconds == pytest.approx(100.0, rel=RELATIVE_ERROR)
    assert known.n == 5
    assert run_seconds(task, times(*[100.0] * 4), POLICY) is None, "too few to go by"
    assert run_seconds(task, {}, POLICY) is None
    stated = replace(task, expected_seconds=Seconds(7.0))
    assert run_seconds(stated, times(*[100.0] * 5), POLICY) == Remaining(Seconds(7.0), Seconds(7.0), 0)


def test_a_demand_that_states_no_size_is_told_that_it_takes_whole_gpus():
    whole = a_demand(gpus=1)
    for demand in (whole, a_demand(bundles=(a_demand(gpu_mb=1), whole))):
        found = unstated_size(demand)
        assert found is not None
        assert (found.gpu_mb, found.n) == (None, 0)
        assert found.message.startswith("it takes whole GPUs, because it states no size")
    stated = {"gpu_mb": 1}, {"gpus": 1, "gpu_fraction": 0.5}, {"gpus": 1, "exclusive": True}, {"cpu": 1.0}
    assert [unstated_size(a_demand(**fields)) for fields in stated] == [None] * 4
