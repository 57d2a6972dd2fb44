"""`python -m bench evict` on a few hundred requests, against results that can be computed otherwise."""

import random
from argparse import ArgumentParser
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest

from bench import evict
from bench.evict.optimum import least_seconds
from bench.evict.policies import POLICIES, Clairvoyant, Fifo, Lfu, Lru, misses, policy
from bench.evict.trace import LOADS, REQUESTS, Use, read_loads, read_uses, spread


def uses_of(models: Sequence[str], every: float = 60.0) -> list[Use]:
    return [Use(number * every, model) for number, model in enumerate(models)]


def random_uses(seed: int, n: int = 300, models: int = 9) -> list[Use]:
    """A few models are requested often, the others seldom."""
    chance = random.Random(seed)
    names = [f"M{number}" for number in range(models)]
    picked = chance.choices(names, [1 / (number + 1) for number in range(models)], k=n)
    return [Use(60.0 * number, model) for number, model in enumerate(picked)]


def missed(uses: list[Use], slots: int, name: str) -> int:
    return len(misses(uses, slots, policy(name, uses, dict.fromkeys({use.model for use in uses}, 1.0))))


def test_fifo_lru_and_lfu_evict_as_their_names_say() -> None:
    uses = uses_of("aabaaca")
    assert misses(uses, 2, Fifo()) == [0, 2, 5, 6], "a came first"
    assert misses(uses, 2, Lru()) == [0, 2, 5], "b was used last before a"
    assert misses(uses_of("aaabbca"), 2, Lfu()) == [0, 3, 5], "b was used less often"
    assert misses(uses_of("aaabbca"), 2, Lru()) == [0, 3, 5, 6]


def test_an_lfu_with_a_half_life_forgets_old_use() -> None:
    uses = [*uses_of("aaaa"), Use(90_000, "b"), Use(90_060, "c"), Use(90_120, "b")]
    assert misses(uses, 2, Lfu()) == [0, 4, 5, 6]
    assert misses(uses, 2, Lfu(1800)) == [0, 4, 5]


@pytest.mark.parametrize(("seed", "slots"), [*product(range(3), (2, 4))])
def test_no_policy_misses_fewer_requests_than_the_clairvoyant(seed: int, slots: int) -> None:
    uses = random_uses(seed)
    best = missed(uses, slots, "clairvoyant")
    assert all(best <= missed(uses, slots, name) for name in POLICIES)


@pytest.mark.parametrize(("seed", "slots"), [*product(range(3), (1, 2, 4, 9))])
def test_with_equal_load_times_the_least_time_is_that_of_the_clairvoyant(seed: int, slots: int) -> None:
    uses = random_uses(seed)
    seconds = dict.fromkeys({use.model for use in uses}, 20.0)
    least = least_seconds([use.model for use in uses], seconds, slots)
    assert least == pytest.approx(20.0 * len(misses(uses, slots, Clairvoyant(uses))))


@pytest.mark.parametrize(("seed", "slots"), [*product(range(6), (2, 3))])
def test_least_time_with_different_load_times_is_that_of_the_best_choices(seed: int, slots: int) -> None:
    models = [use.model for use in random_uses(seed, n=14, models=5)]
    seconds = {f"M{number}": float((7 * number) % 5 + 1) for number in range(5)}
    assert least_seconds(models, seconds, slots) == pytest.approx(cheapest(models, seconds, slots))


def cheapest(models: list[str], seconds: dict[str, float], slots: int) -> float:
    """By trying out all choices."""
    ways: dict[frozenset[str], float] = {frozenset(): 0.0}
    for model in models:
        then: dict[frozenset[str], float] = {}
        for resident, spent in ways.items():
            after = [resident]
            if model not in resident:
                spent += seconds[model]
                gone = [resident - {victim} for victim in resident] if len(resident) == slots else [resident]
                after = [left | {model} for left in gone]
            for now in after:
                then[now] = min(spent, then.get(now, spent))
        ways = then
    return min(ways.values())


def test_planner_misses_fewer_requests_than_lru_with_models_used_once() -> None:
    chance = random.Random(5)
    uses = uses_of([chance.choice("abc") if number % 3 else f"once-{number}" for number in range(600)])
    assert missed(uses, 4, "gpubroker") < 0.9 * missed(uses, 4, "lru")


def write_trace(folder: Path) -> None:
    rows = [
        f"2024-11-15 16:{use.at // 60 % 60:02.0f}:{use.at % 60:02.0f},{use.model}" for use in random_uses(1)
    ]
    head = "gmt_create,checkpoint_model_version_id"
    (folder / REQUESTS).write_text("\n".join([head, *reversed(rows)]))
    loads = [f"1662859290.0,{value},c" for value in (40000.0, 2000.0, 21000.0)]
    (folder / LOADS).write_text("\n".join(["timestamp_anon,value,container_ip", *loads]))


def test_the_command_yields_all_policies_both_halves_and_the_hours(tmp_path: Path) -> None:
    write_trace(tmp_path)
    parser = ArgumentParser()
    evict.add_options(parser)
    found = list(evict.measure(parser.parse_args(["--data", str(tmp_path), "--slots", "2,4"])))
    values = {figure.figure: figure.value for figure in found}
    ends = [*(f"{name}{end}" for name in (*POLICIES, "way") for end in ("", ".second_half"))]
    ends += [f"{name}.hours" for name in POLICIES]
    assert sorted(values) == sorted(f"evict.{slots}.{end}" for slots in (2, 4) for end in ends)
    assert values["evict.2.clairvoyant"] < values["evict.2.gpubroker"] < values["evict.2.fifo"]
    assert values["evict.4.clairvoyant.hours"] <= values["evict.4.gpubroker.hours"]
    assert {figure.baseline for figure in found if figure.figure.endswith("2.fifo")} == {
        values["evict.2.lru"]
    }


def test_requests_are_read_in_order_of_time_and_load_times_ascending(tmp_path: Path) -> None:
    write_trace(tmp_path)
    uses = read_uses(tmp_path)
    assert len(uses) == 300
    assert uses == sorted(uses, key=lambda use: use.at)
    assert read_loads(tmp_path) == [2.0, 21.0, 40.0]


def test_the_load_times_of_models_are_spread_like_the_published_ones() -> None:
    names = [f"M{number}" for number in range(30)]
    found = spread(names, [2.0, 21.0, 40.0])
    assert sorted(found.values()) == [2.0] * 10 + [21.0] * 10 + [40.0] * 10
    assert found == spread(list(reversed(names)), [2.0, 21.0, 40.0])


@pytest.mark.parametrize("text", ["", "2,x", "0,4"])
def test_slots_must_be_whole_numbers(text: str) -> None:
    with pytest.raises(ValueError, match=r"slots are|invalid literal"):
        evict.sizes(text)


def test_the_way_is_zero_when_lru_is_already_optimal() -> None:
    assert evict.way({"lru": 5.0, "clairvoyant": 5.0, "gpubroker": 5.0}) == 0.0
