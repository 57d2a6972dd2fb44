"""`python -m bench listeners`: every event reaches every listener once, whatever time that takes."""

from argparse import ArgumentParser, Namespace

import pytest

from bench.listeners import add_options, lost_of, measure


@pytest.mark.parametrize(
    ("positions", "lost"),
    [([3, 4, 5], 0), ([3, 5], 1), ([], 3), ([3, 4, 4, 5], 1), ([4, 3, 5], 1), ([3, 4, 5, 6], 0)],
    ids=["all", "one is missing", "none came", "one came twice", "two changed places", "more came"],
)
def test_an_event_counts_if_it_came_once_and_in_its_place(positions: list[int], lost: int) -> None:
    assert lost_of(positions, [3, 4, 5]) == lost


def test_listeners_get_every_event_once_beside_a_load() -> None:
    parser = ArgumentParser()
    add_options(parser)
    few = {"variant": "sqlite", "listeners": 20, "unfiltered": 3, "connections": 4, "rounds": 1}
    options = parser.parse_args(["--seconds", "0.5"], Namespace(**few))
    found = {figure.figure: figure for figure in measure(options)}
    assert found["listeners.lost_events"].value == 0
    assert found["listeners.p99_ms"].n > 20
    assert found["listeners.accepted"].value > 0
