"""How many requests at once are of use to a model, found by trying."""

import random
from collections.abc import Callable
from heapq import heappop, heappush

import pytest
from gpubroker_server.core.domain.units import Ticks
from gpubroker_server.core.serving.adaptive_slots import FIRST_LIMIT, MOST, Climb

Lasts = Callable[[random.Random], float]


def about_a_second(dice: random.Random) -> float:
    return dice.uniform(0.8, 1.2)


class Model:
    """Works on so many requests at once, and ever more wait in front of it."""

    def __init__(self, instances: int, *, lasts: Lasts = about_a_second, gap: float = 0.0) -> None:
        """`gap`: seconds between the end of a request and the arrival of the next."""
        self.climb = Climb()
        self._lasts = lasts
        self._gap = gap
        self._dice = random.Random(1)
        self._now = 0.0
        self._flying: list[float] = []
        """When each of what was sent is answered."""
        self.change(instances)

    def change(self, instances: int) -> None:
        self._free = [self._now] * instances

    def limit_after(self, answers: int) -> int:
        """Its median in the second half of them."""
        limits = [self._answer() for _ in range(answers)][answers // 2 :]
        return sorted(limits)[len(limits) // 2]

    def _answer(self) -> int:
        while len(self._flying) < self.climb.limit:
            ends = max(heappop(self._free), self._now + self._gap) + self._lasts(self._dice)
            heappush(self._free, ends)
            heappush(self._flying, ends)
        self._now = heappop(self._flying)
        self.climb.answered(Ticks(self._now), somebody_waits=True)
        return self.climb.limit


@pytest.mark.parametrize("instances", [8, 16, 32, 64, 150])
def test_a_model_that_works_on_many_at_once_is_given_about_as_many(instances: int) -> None:
    assert 0.7 * instances <= Model(instances).limit_after(10_000) <= 1.5 * instances


def test_one_that_works_on_one_after_the_other_is_given_few() -> None:
    assert Model(1).limit_after(10_000) <= 2


def test_the_next_request_is_there_when_the_last_one_ends() -> None:
    assert 2 <= Model(1, gap=0.5).limit_after(10_000) <= 4


def test_answers_of_very_different_lengths_hide_nothing() -> None:
    model = Model(32, lasts=lambda dice: dice.expovariate(1.0))
    assert 20 <= model.limit_after(10_000) <= 64


def test_a_limit_has_bounds_whatever_is_of_use() -> None:
    assert 0.7 * MOST <= Model(10_000).limit_after(40_000) <= MOST


def test_nothing_is_concluded_while_nobody_waits() -> None:
    climb = Climb()
    for moment in range(1000):
        climb.answered(Ticks(moment), somebody_waits=False)
    assert climb.limit == FIRST_LIMIT


def test_answers_that_come_all_at_once_are_no_rate() -> None:
    climb = Climb()
    for _ in range(1000):
        climb.answered(Ticks(5.0), somebody_waits=True)
    assert climb.limit == FIRST_LIMIT


def test_a_model_that_changes_is_followed() -> None:
    model = Model(32)
    assert model.limit_after(10_000) >= 20
    model.change(4)
    assert model.limit_after(10_000) <= 8
    model.change(32)
    assert model.limit_after(20_000) >= 20
