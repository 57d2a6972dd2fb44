"""The number of slots is found by trying how many requests at once bring more answers."""

import random
from collections.abc import Callable
from heapq import heappop, heappush

import pytest
from gpubroker_server.core.domain.units import MonotonicSeconds
from gpubroker_server.core.serving.slots import FIRST_LIMIT, MOST, HillClimb

Lasts = Callable[[random.Random], float]


def about_a_second(dice: random.Random) -> float:
    return dice.uniform(0.8, 1.2)


class Model:
    """Works on so many requests at once; more are always queued."""

    def __init__(self, instances: int, *, lasts: Lasts = about_a_second, gap: float = 0.0) -> None:
        """`gap`: seconds between the end of a request and the arrival of the next."""
        self.climb = HillClimb()
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
        self.climb.answered(MonotonicSeconds(self._now), is_queued=True)
        return self.climb.limit


@pytest.mark.parametrize("instances", [8, 16, 32, 64, 150])
def test_model_that_serves_many_requests_at_once_gets_about_as_many_slots(instances: int) -> None:
    assert 0.7 * instances <= Model(instances).limit_after(10_000) <= 1.5 * instances


def test_a_model_that_works_on_one_request_at_a_time_gets_few_slots() -> None:
    assert Model(1).limit_after(10_000) <= 2


def test_the_next_request_is_queued_when_one_ends() -> None:
    assert 2 <= Model(1, gap=0.5).limit_after(10_000) <= 4


def test_very_different_durations_do_not_mislead_it() -> None:
    model = Model(32, lasts=lambda dice: dice.expovariate(1.0))
    assert 20 <= model.limit_after(10_000) <= 64


def test_the_limit_has_bounds() -> None:
    assert 0.7 * MOST <= Model(10_000).limit_after(40_000) <= MOST


def test_it_learns_nothing_while_no_request_is_queued() -> None:
    climb = HillClimb()
    for moment in range(1000):
        climb.answered(MonotonicSeconds(moment), is_queued=False)
    assert climb.limit == FIRST_LIMIT


def test_answers_that_arrive_at_the_same_time_give_no_rate() -> None:
    climb = HillClimb()
    for _ in range(1000):
        climb.answered(MonotonicSeconds(5.0), is_queued=True)
    assert climb.limit == FIRST_LIMIT


def test_it_follows_a_model_that_changes() -> None:
    model = Model(32)
    assert model.limit_after(10_000) >= 20
    model.change(4)
    assert model.limit_after(10_000) <= 8
    model.change(32)
    assert model.limit_after(20_000) >= 20
