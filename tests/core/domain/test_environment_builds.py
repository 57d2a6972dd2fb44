"""When a build is tried again, what is said of a failure, and what leaves a full cache."""

import pytest
from gpubroker_server.core.domain.environment_builds import (
    RETRY_PAUSES_SECONDS,
    CachedEnvironment,
    is_of_network,
    retry_pause,
    step_after,
    to_remove,
    why_failed,
)
from hypothesis import given
from hypothesis import strategies as st

REFUSED = "error: Failed to fetch: https://pypi.org/simple/six/\n  cause: Connection refused"
UNKNOWN = "error: No solution found when resolving dependencies\n  cause: Failed to fetch nothing"


@pytest.mark.parametrize(
    ("output", "is_network"),
    [
        (REFUSED, True),
        ("operation timed out", True),
        ("HTTP status server error (503 Service Unavailable)", True),
        ("HTTP status client error (404 Not Found) for url, Failed to fetch", False),
        ("Failed to fetch\n invalid peer certificate: UnknownIssuer", False),
        (UNKNOWN, False),
        ("error: the build backend returned an error", False),
    ],
)
def test_only_failures_of_the_network_may_pass_by_themselves(output: str, is_network: bool) -> None:
    assert is_of_network(output) is is_network


def test_a_build_is_tried_again_with_growing_pauses_and_then_fails() -> None:
    tries = range(1, len(RETRY_PAUSES_SECONDS) + 2)
    assert [retry_pause(failures, REFUSED) for failures in tries] == [*RETRY_PAUSES_SECONDS, None]
    assert retry_pause(1, UNKNOWN) is None


def test_lines_of_uv_say_which_step_begins() -> None:
    assert step_after("Resolved 3 packages in 12ms\n") == "downloading packages"
    assert step_after("Prepared 3 packages in 1s\n") == "installing packages"
    assert not step_after("Downloading numpy")


def test_a_failure_is_told_from_its_first_error_on() -> None:
    assert why_failed(("uv", "sync"), f"Resolved 3 packages\n{REFUSED}\n", 1) == REFUSED
    assert why_failed(("uv", "sync"), "\n".join(map(str, range(30))), 1).splitlines()[0] == "10"
    assert why_failed(("uv", "sync"), "", 2) == "uv sync ended with exit code 2 and said nothing"
    told = why_failed(("uv",), "error: " + "x" * 10_000, 1)
    assert told.startswith("...x")
    assert len(told) < 4096


def test_the_least_recently_used_environment_leaves_first_unless_in_use() -> None:
    cached = [CachedEnvironment(name, 10, at) for name, at in (("a", 1.0), ("b", 2.0), ("c", 3.0))]
    assert to_remove(cached, (), 30) == []
    assert to_remove(cached, (), 20) == ["a"]
    assert to_remove(cached, {"a"}, 20) == ["b"]
    assert to_remove(cached, {"a", "b"}, 0) == []
    assert to_remove([], (), 0) == []


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 99)), max_size=8), st.integers(0, 40), st.data())
def test_removal_spares_what_is_used_and_removes_no_more_than_needed(
    sizes: list[tuple[int, int]], most: int, data: st.DataObject
) -> None:
    cached = [CachedEnvironment(str(n), size, at) for n, (size, at) in enumerate(sizes)]
    used = data.draw(st.sets(st.sampled_from([entry.key for entry in cached]))) if cached else set()
    removed = to_remove(cached, used, most)
    assert not used & set(removed)
    left = sum(entry.size_bytes for entry in cached if entry.key not in removed)
    if removed:
        last = next(entry for entry in cached if entry.key == removed[-1])
        assert left + last.size_bytes > most
