"""`python -m bench turns` for a few minutes: no model starves, and swaps at every change answer no more."""

from argparse import ArgumentParser
from itertools import pairwise, product

import pytest
from gpubroker_server.core.domain.models import turn_seconds
from gpubroker_server.core.domain.units import Seconds

from bench import turns
from bench.turns.arrivals import ARRIVALS, Ask, asks_of
from bench.turns.replay import Costs, Outcome, Replay
from bench.turns.rules import RULES

COSTS = Costs(load_seconds=5.0, unload_seconds=1.2, answer_seconds=0.2, slots=4)
SWAP_SECONDS = COSTS.load_seconds + COSTS.unload_seconds


def replayed(rule: str, asks: list[Ask]) -> Outcome:
    return Replay(asks, COSTS, RULES[rule]()).run()


def asks(models: int, arrivals: str, minutes: float = 5.0) -> list[Ask]:
    return asks_of(arrivals, [f"M{number}" for number in range(models)], 1.0, 60 * minutes, seed=1)


@pytest.mark.parametrize(("models", "arrivals"), [*product((2, 5), ARRIVALS)])
def test_no_model_starves_and_swapping_at_every_change_answers_no_more(models: int, arrivals: str) -> None:
    mine, in_order = (replayed(rule, asks(models, arrivals)) for rule in ("gpubroker", "in_order"))
    assert len(mine.waits) == len(in_order.waits) == len(asks(models, arrivals))
    turn = turn_seconds(Seconds(COSTS.load_seconds)) + SWAP_SECONDS + COSTS.answer_seconds
    assert max(mine.lane_waits) <= models * (turn + 1.0)
    assert mine.seconds <= in_order.seconds + turn, "the last request may wait for a turn to end"
    assert mine.swaps <= in_order.swaps


def test_random_model_changes_cost_a_swap_each_and_turns_save_most() -> None:
    mine, in_order = (replayed(rule, asks(2, "random")) for rule in ("gpubroker", "in_order"))
    changes = sum(a.model != b.model for a, b in pairwise(asks(2, "random")))
    assert in_order.swaps == 1 + changes
    assert mine.per_second > 2 * in_order.per_second


def test_a_model_that_stays_while_it_is_wanted_leaves_the_other_waiting() -> None:
    one, other = [Ask(float(second), "one") for second in range(100)], Ask(0.5, "other")
    outcome = replayed("while_wanted", sorted([*one, other]))
    assert max(outcome.waits) == pytest.approx(99 + 300 + SWAP_SECONDS - 0.5)


def test_bursts_have_as_many_requests_as_random_ones_for_one_model_each() -> None:
    bursty, at_random = (asks(5, arrivals, minutes=600.0) for arrivals in ("bursty", "random"))
    assert len(bursty) == pytest.approx(len(at_random), rel=0.15)
    changes = [sum(a.model != b.model for a, b in pairwise(found)) for found in (bursty, at_random)]
    assert changes[0] < 0.1 * changes[1]


def test_command_yields_the_figures_of_each_rule_beside_the_baseline() -> None:
    """The baseline swaps at every change of model."""
    parser = ArgumentParser()
    turns.add_options(parser)
    found = list(turns.measure(parser.parse_args(["--models", "2", "--minutes", "1"])))
    metrics = ("per_s", "p50_s", "p99_s", "longest_lane_s", "loads")
    named = [
        f"turns.2.{arrivals}.{rule}.{metric}" for arrivals, rule, metric in product(ARRIVALS, RULES, metrics)
    ]
    assert [figure.figure for figure in found] == named
    assert all(figure.ratio == 1.0 for figure in found if "in_order" in figure.figure and figure.baseline)


@pytest.mark.parametrize("text", ["", "2,x", "1,4"])
def test_the_numbers_of_models_must_be_whole_numbers_from_two_on(text: str) -> None:
    with pytest.raises(ValueError, match=r"from 2 on|invalid literal"):
        turns.counts(text)
