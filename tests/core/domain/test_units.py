"""Numbers in words for people."""

import pytest
from gpubroker_server.core.domain.units import in_gib, in_time, release_numbers


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0 s"),
        (119.0, "119 s"),
        (120.0, "2 min"),
        (7_199.0, "120 min"),
        (36_680.0, "10 h"),
        (2.6e5, "3 d"),
    ],
)
def test_a_time_has_the_unit_that_leaves_a_few_digits(seconds: float, words: str) -> None:
    assert in_time(seconds) == words


def test_releases_compare_by_their_numbers_and_an_unknown_one_is_first() -> None:
    releases = ["", "0.2.0", "0.3.0.dev0", "0.10.1", "1.0"]
    assert sorted(releases, key=release_numbers) == releases
    assert release_numbers("0.3.0.dev0") == release_numbers("0.3.0")


def test_sizes_that_would_read_the_same_are_in_mib() -> None:
    assert (in_gib(10_240), in_gib(10_240, 10_240), in_gib(10_240, 20_480)) == ("10.0 GiB",) * 3
    assert (in_gib(10_241, 10_240), in_gib(10_240, 5, 10_241)) == ("10241 MiB", "10240 MiB")
