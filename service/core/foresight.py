"""The forecasts that hold now, and how true the first word about each task came."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

from service.core.backfill import Basis, Forecast
from service.core.estimate import Lesson, Sketch, Topic, What
from service.core.plan import Decision
from service.core.task import Move
from service.core.units import Instant, Seconds, TaskId
from service.core.world import World

EVERY_SECONDS = Seconds(1.0)
"""Forecasts are made anew so often, while anybody waits."""

LEAST_WAIT_SECONDS = 1.0
"""Who is to start sooner than that is starting, and nobody foretells it."""


@dataclass(frozen=True, slots=True)
class FirstWord:
    said_at: Instant
    start_at: Instant
    p90_at: Instant
    basis: Basis


def topic_of(basis: Basis, what: What) -> Topic:
    """How true forecasts of this basis come. Of no tenant: no tenant's runs are read from it."""
    return Topic("", basis.value, "", what)


class Foresight:
    """Owned by the leader; forgotten with it, but for what was learned."""

    def __init__(self) -> None:
        self.forecasts: Sequence[Forecast] = ()
        self._made_at = Instant(-inf)
        self._said: dict[TaskId, FirstWord] = {}

    def is_due(self, world: World, now: Instant) -> bool:
        waits = len(world.queue) > 0 or bool(self.forecasts)
        return waits and not 0 <= now - self._made_at < EVERY_SECONDS

    def take(self, forecasts: Sequence[Forecast], world: World, now: Instant) -> None:
        """Let these hold from now on, and remember what is said of a task for the first time."""
        self.forecasts = tuple(forecasts)
        self._made_at = now
        for forecast in forecasts:
            if forecast.task not in self._said and forecast.start_at > now + LEAST_WAIT_SECONDS:
                word = FirstWord(now, forecast.start_at, forecast.p90_at, forecast.basis)
                self._said[forecast.task] = word
        self._said = {task: word for task, word in self._said.items() if task in world.queue}

    def compare(self, world: World, decisions: Iterable[Decision], now: Instant) -> list[Decision]:
        """The decisions, each with what the starts in it teach about forecasts."""
        known: dict[Topic, Sketch] = {}
        return [self._compared(world, decision, known, now) for decision in decisions]

    def _compared(
        self, world: World, decision: Decision, known: dict[Topic, Sketch], now: Instant
    ) -> Decision:
        lessons: list[Lesson] = []
        for write in decision.tasks:
            word = self._said.get(write.task.id)
            if write.what is Move.ADMITTED and word is not None:
                for what, value in _values(word, now):
                    topic = topic_of(word.basis, what)
                    known[topic] = (known.get(topic) or world.learned.sketch(topic)).add(value)
                    lessons.append(Lesson(topic, value, known[topic], now))
        return replace(decision, lessons=(*decision.lessons, *lessons)) if lessons else decision


def _values(word: FirstWord, now: Instant) -> tuple[tuple[What, float], ...]:
    waited, at_most = now - word.said_at, word.p90_at - word.said_at
    return (
        (What.START_ERROR, round(abs(now - word.start_at), 3)),
        (What.START_SHARE, round(waited / at_most, 3)),
    )
