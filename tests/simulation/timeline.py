"""A clock that jumps from one thing to the next, and lines of messages that arrive a little late."""

import heapq
from collections import deque
from collections.abc import Callable
from math import inf
from random import Random
from typing import Any

from gpubroker_server.core.domain.units import Instant

Action = Callable[[], Any]


class Timeline:
    """What happens when; what is due at the same time happens in the order in which it was planned."""

    def __init__(self, start: float) -> None:
        self._now = start
        self._planned: list[tuple[float, int, Action]] = []
        self._count = 0

    def now(self) -> Instant:
        return Instant(self._now)

    def at(self, when: float, action: Action) -> None:
        self._count += 1
        heapq.heappush(self._planned, (max(when, self._now), self._count, action))

    def after(self, seconds: float, action: Action) -> None:
        self.at(self._now + seconds, action)

    def next_at(self) -> float:
        return self._planned[0][0] if self._planned else inf

    def step(self) -> Any:
        """Jump to the next thing and do it; what it returns is the caller's to await."""
        self._now, _, action = heapq.heappop(self._planned)
        return action()


class Line:
    """Messages in one direction: in order, each a little late. While it is cut they wait at its end."""

    def __init__(self, timeline: Timeline, chance: Random, deliver: Callable[[Any], None]) -> None:
        self._timeline = timeline
        self._chance = chance
        self._deliver = deliver
        self._waiting: deque[Any] = deque()
        self._arrived = 0
        self._life = 0
        self.is_cut = False

    def send(self, message: Any) -> None:
        self._waiting.append(message)
        life = self._life
        self._timeline.after(self._chance.uniform(0.005, 0.3), lambda: self._arrive(life))

    def cut(self) -> None:
        self.is_cut = True

    def mend(self) -> None:
        self.is_cut = False
        self._flush()

    def lose_everything(self) -> None:
        """Whoever was at one end is gone, and with it what was under way."""
        self._waiting.clear()
        self._arrived = 0
        self._life += 1

    def _arrive(self, life: int) -> None:
        if life == self._life:
            self._arrived += 1
            self._flush()

    def _flush(self) -> None:
        while self._arrived and not self.is_cut:
            self._arrived -= 1
            self._deliver(self._waiting.popleft())
