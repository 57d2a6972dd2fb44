"""Quantiles from a few counts, close to what sorting all values would say."""

from math import ceil, isclose

from gpubroker_server.core.domain.estimates import MAX_COUNTED, RELATIVE_ERROR, Sketch
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import a_sketch

sizes = st.lists(st.floats(0.001, 1e9), min_size=1, max_size=200)
shares = st.floats(0, 1)


@given(sizes, shares)
def test_a_quantile_is_within_the_error_of_a_value_of_that_rank(values: list[float], share: float) -> None:
    found = a_sketch(values).quantile(share)
    assert found is not None
    in_order = sorted(values)
    rank = share * (len(values) - 1)
    candidates = {in_order[int(rank)], in_order[ceil(rank)]}
    assert any(isclose(found, value, rel_tol=RELATIVE_ERROR * 1.001) for value in candidates)


@given(sizes, shares, shares)
def test_a_higher_share_never_has_a_lower_quantile(values: list[float], one: float, other: float) -> None:
    sketch = a_sketch(values)
    low, high = sketch.quantile(min(one, other)), sketch.quantile(max(one, other))
    assert low is not None
    assert high is not None
    assert low <= high


@given(st.permutations([1.0, 5.0, 5.0, 90.0, 4000.0]))
def test_the_order_of_the_values_does_not_matter(values: list[float]) -> None:
    assert a_sketch(values) == a_sketch(sorted(values))


def test_without_a_value_there_is_no_quantile() -> None:
    assert Sketch().quantile(0.5) is None
    assert Sketch().n == 0


def test_zero_and_negative_values_count_as_the_smallest_value() -> None:
    smallest = a_sketch([0.0, -3.0]).quantile(1.0)
    assert smallest is not None
    assert 0 < smallest < 0.0011


def test_recent_runs_count_more_than_old_ones() -> None:
    once = a_sketch([100.0] * MAX_COUNTED)
    lately = once
    for _ in range(2 * MAX_COUNTED):
        lately = lately.add(8000.0)
    assert lately.n <= MAX_COUNTED
    middle = lately.quantile(0.5)
    assert middle is not None
    assert isclose(middle, 8000.0, rel_tol=RELATIVE_ERROR)
    oldest = lately.quantile(0.0)
    assert oldest is not None
    assert isclose(oldest, 100.0, rel_tol=RELATIVE_ERROR), "the past fades, it is not cut off"


def test_a_wide_range_of_values_needs_few_counts() -> None:
    sketch = a_sketch(float(size) for size in range(1, 900))
    assert len(sketch.counts) < 180
