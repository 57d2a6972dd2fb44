"""How many requests a model is sent at once, found by trying: more if that brings more answers per second.

After the hill climbing of .NET's thread pool (Hellerstein, Morrison, Eilebrecht: Optimizing Concurrency
Levels in the .NET ThreadPool, 2008). The time of an answer, by which TCP Vegas and its kin judge, says little
of models: batches take longer than one request and are worth it, long texts take longer than short ones.
"""

from typing import NamedTuple

from gpubroker_server.core.domain.units import Ticks

FIRST_LIMIT = 4
MOST = 256
WORTH = 0.2
"""So much of what more requests at once could bring in answers they must bring: twice as many are kept for a
fifth more answers."""

_FEWEST_ANSWERS = 16
_ROUNDS = 2
"""A rate is taken over so many answers for each slot."""


class _Tried(NamedTuple):
    limit: int
    rate: float


class Climb:
    """Judges only while requests wait throughout: else the limit is not what holds anything up."""

    __slots__ = ("_answers", "_before", "_is_fast", "_is_upwards", "_since", "limit")

    def __init__(self) -> None:
        self.limit = FIRST_LIMIT
        self._answers = 0
        """Since the rate is being taken; negative: so many are still of those sent under another limit."""
        self._since = Ticks(0.0)
        self._before: _Tried | None = None
        """What the limit of now is compared with."""
        self._is_upwards = True
        self._is_fast = True
        """Nothing has been too much as yet: it doubles."""

    def answered(self, now: Ticks, *, somebody_waits: bool) -> None:
        if not somebody_waits:
            self._answers = -self.limit
            return
        if self._answers <= 0:
            self._since = now
        answers = self._answers
        self._answers += 1
        if answers >= max(_FEWEST_ANSWERS, _ROUNDS * self.limit) and now > self._since:
            self._judge(_Tried(self.limit, answers / (now - self._since)))
            self._answers = -self.limit

    def _judge(self, found: _Tried) -> None:
        before = self._before
        if before is not None and _better(before, found) is before:
            self.limit = before.limit
            self._before = None  # it is measured anew, for things may have changed
            self._is_upwards = not self._is_upwards
            self._is_fast = False
            return
        self._before = found
        self.limit = self._stepped()

    def _stepped(self) -> int:
        step = self.limit if self._is_fast else max(1, self.limit // 4)
        if self._is_upwards and self.limit == MOST:
            self._is_upwards = self._is_fast = False
            step = MOST // 4
        elif self.limit == 1:
            self._is_upwards = True
        return min(MOST, self.limit + step) if self._is_upwards else self.limit - step


def _better(one: _Tried, other: _Tried) -> _Tried:
    low, high = sorted((one, other))
    return high if high.rate >= low.rate * (1 + WORTH * (high.limit / low.limit - 1)) else low
