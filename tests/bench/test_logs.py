"""`python -m bench logs` counts every line that did not come once and in its place."""

import pytest

from bench.logs import figures, lost_of


@pytest.mark.parametrize(
    ("numbers", "lost"),
    [([0, 1, 2], 0), ([0, 2], 1), ([], 3), ([0, 1, 1, 2], 1), ([0, 2, 1], 1)],
    ids=["all", "one is missing", "none came", "one came twice", "two changed places"],
)
def test_a_line_counts_if_it_came_once_and_in_its_place(numbers: list[int], lost: int) -> None:
    assert lost_of(numbers, expected=3) == lost


def test_the_figures_name_the_variant() -> None:
    found = {figure.figure: figure.value for figure in figures("postgres", [0.1, 0.3], 0, "")}
    assert found == {
        "logs.postgres.lost_lines": 0.0,
        "logs.postgres.p50_s": 0.1,
        "logs.postgres.p99_s": 0.3,
        "logs.postgres.longest_s": 0.3,
    }
