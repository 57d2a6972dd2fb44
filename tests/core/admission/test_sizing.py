"""The size of a task that leaves it to be learned."""

from typing import Any

import pytest
from gpubroker.wire.forecasts import Sizing
from gpubroker_server.core.admission.sizing import learned_size, size_of_ranks, unstated_size
from gpubroker_server.core.domain.demand import need_mb
from gpubroker_server.core.domain.estimates import RELATIVE_ERROR, Sketch, SketchKey, What
from gpubroker_server.core.domain.policy import Policy
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import GIB, a_demand, a_device, a_sketch

POLICY = Policy()
SMALL, LARGE = a_device("gpu0", kind="L4", mb=24 * GIB), a_device("gpu1", kind="H100", mb=80 * GIB)


def sizes(*gib: float, kind: str = "H100", subject: str = "resnet") -> dict[SketchKey, Sketch]:
    return {SketchKey("default", subject, kind, What.GPU_MB): a_sketch(size * GIB for size in gib)}


def size_of(sketches: dict[SketchKey, Sketch], subject: str = "resnet", **policy: Any) -> Sizing:
    return learned_size(sketches, "default", subject, [SMALL, LARGE], Policy(**policy))


def test_a_learned_size_is_what_nearly_all_runs_used_and_a_margin() -> None:
    size = size_of(sizes(*[4.0] * 19, 30.0))
    assert size.p95_mb == pytest.approx(4 * GIB, rel=RELATIVE_ERROR)
    assert size.gpu_mb == pytest.approx(1.15 * 4 * GIB, rel=RELATIVE_ERROR)
    assert (size.n, size.kind) == (20, "H100")
    assert "(20 runs on H100); with a margin of 15% that makes 4.5 GiB" in size.message


def test_of_few_runs_none_is_left_out_of_a_size() -> None:
    size = size_of(sizes(4.0, 4.0, 4.0, 4.0, 30.0))
    assert size.p95_mb == pytest.approx(30 * GIB, rel=RELATIVE_ERROR)


def test_the_margin_and_the_least_runs_are_the_operators_choice() -> None:
    assert size_of(sizes(4.0), learned_least_runs=1, learned_margin=1.0).gpu_mb == pytest.approx(
        8 * GIB, rel=RELATIVE_ERROR
    )


def test_with_too_few_runs_it_is_a_whole_device_and_the_answer_says_so() -> None:
    size = size_of(sizes(4.0, 4.0, 4.0, 4.0))
    assert (size.gpu_mb, size.p95_mb, size.n) == (None, None, 4)
    assert size.message == (
        "it gets whole GPUs: 4 runs of resnet have been measured, and it takes 5 to know its size"
    )


def test_nothing_is_known_of_a_task_without_a_subject() -> None:
    assert "without model type, name and entrypoint" in size_of(sizes(*[4.0] * 9), "").message


def test_of_several_kinds_the_one_on_which_runs_took_most_counts() -> None:
    sketches = sizes(*[4.0] * 9) | sizes(*[6.0] * 9, kind="L4")
    size = size_of(sketches)
    assert (size.kind, size.p95_mb) == ("L4", pytest.approx(6 * GIB, rel=RELATIVE_ERROR))


def test_ranks_of_one_size_give_one_message_and_the_largest_size_counts() -> None:
    known, few = size_of(sizes(*[4.0] * 9)), size_of({})
    assert size_of_ranks({}) is None
    assert size_of_ranks({"rank 0": known, "rank 1": known}) == known
    both = size_of_ranks({"rank 0": known, "ranks 1 to 3": few})
    assert both is not None
    assert (both.gpu_mb, both.message) == (None, f"rank 0: {known.message}; ranks 1 to 3: {few.message}")
    large = size_of(sizes(*[8.0] * 9))
    of_both = size_of_ranks({"rank 0": known, "rank 1": large})
    assert of_both is not None
    assert of_both.gpu_mb == large.gpu_mb


def test_a_kind_without_devices_does_not_count() -> None:
    assert size_of(sizes(*[4.0] * 9, kind="V100")).gpu_mb is None


def test_the_margin_never_asks_for_more_than_the_device_had() -> None:
    assert size_of(sizes(*[23.0] * 9, kind="L4")).gpu_mb == 24 * GIB


def test_memory_a_process_costs_itself_is_leased_apart_and_learned_once() -> None:
    device = a_device(kind="H100", context_mb=512)
    size = learned_size(sizes(*[4.0] * 9), "default", "resnet", [device], POLICY)
    assert size.gpu_mb == pytest.approx(1.15 * 4 * GIB - 512, rel=2 * RELATIVE_ERROR)
    assert size.message.endswith("that makes 4.0 GiB beside 0.5 GiB for each process")
    assert need_mb(a_demand(gpu_mb=size.gpu_mb), device) == pytest.approx(1.15 * 4 * GIB, rel=RELATIVE_ERROR)


def test_a_process_that_used_no_more_than_it_costs_still_gets_something() -> None:
    device = a_device(kind="H100", context_mb=512)
    assert learned_size(sizes(*[0.1] * 9), "default", "resnet", [device], POLICY).gpu_mb == 1


@given(st.floats(0.01, 80), st.integers(0, 2048), st.floats(0, 1))
def test_a_learned_size_fits_where_its_runs_had_room(gib: float, context_mb: int, margin: float) -> None:
    device = a_device(kind="H100", context_mb=context_mb)
    policy = Policy(learned_margin=margin)
    size = learned_size(sizes(*[gib] * 9), "default", "resnet", [device], policy)
    assert size.gpu_mb is not None
    assert need_mb(a_demand(gpu_mb=size.gpu_mb), device) is not None


def test_a_demand_that_states_no_size_is_told_that_it_takes_whole_gpus() -> None:
    whole = a_demand(gpus=1)
    for demand in (whole, a_demand(bundles=(a_demand(gpu_mb=1), whole))):
        found = unstated_size(demand)
        assert found is not None
        assert (found.gpu_mb, found.n) == (None, 0)
        assert found.message.startswith("it takes whole GPUs, because it states no size")
    stated = {"gpu_mb": 1}, {"gpus": 1, "gpu_fraction": 0.5}, {"gpus": 1, "exclusive": True}, {"cpu": 1.0}
    assert [unstated_size(a_demand(**fields)) for fields in stated] == [None] * 4
