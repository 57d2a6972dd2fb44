"""The current forecasts, recomputed in steps, and how accurate the first forecast of each task was."""

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import NamedTuple

from gpubroker.wire.forecasts import ForecastsKept
from msgspec.structs import replace

from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.estimates import Observation, Sketch, SketchKey, What
from gpubroker_server.core.domain.interval import Interval
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Move, Task, TaskState, model_of
from gpubroker_server.core.domain.units import Instant, NodeName, Seconds, TaskId
from gpubroker_server.core.planning.forecasts.forecasts import make_forecasts
from gpubroker_server.core.planning.forecasts.reservations import Basis, Forecast
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.world.model_index import is_unasked
from gpubroker_server.core.world.world import World

EVERY_SECONDS = Seconds(1.0)
"""The time between two rounds while tasks wait."""

LEAST_WAIT_SECONDS = 1.0
"""The least forecast wait for which the accuracy of a forecast is checked."""


def accuracy_topic(basis: Basis, quantity: What) -> SketchKey:
    """Return the topic of forecast errors of this basis, for all tenants together."""
    return SketchKey("", basis.value, "", quantity)


def forecast_accuracies(world: World) -> list[ForecastsKept]:
    """Return how accurate the forecasts of each basis were, if any of their tasks has started."""
    accuracies = []
    for basis in Basis:
        errors = world.learned.sketch(accuracy_topic(basis, What.START_ERROR))
        error_seconds = errors.quantile(0.5)
        within_p90 = world.learned.sketch(accuracy_topic(basis, What.START_SHARE)).share_until(1.0)
        if error_seconds is not None and within_p90 is not None:
            accuracies.append(ForecastsKept(basis, errors.n, error_seconds, within_p90))
    return accuracies


class ForecastRounds:
    """The rounds of forecasts. They live in the memory of one leader and are lost with it, except for the
    learned accuracy."""

    def __init__(self) -> None:
        self.forecasts: Sequence[Forecast] = ()
        self._pace = Interval(EVERY_SECONDS)
        self._nodes: frozenset[NodeName] = frozenset()
        """The nodes that were usable when the forecasts were made."""
        self._said: dict[TaskId, tuple[Instant, Forecast]] = {}
        """Maps a task to the instant at which it got its first forecast, and that forecast."""
        self._work: Iterator[Sequence[Forecast]] | None = None
        """The round under way, which began at `_as_of` with the inventory version `_inventory`."""
        self._so_far: Sequence[Forecast] | None = None
        self._as_of = Instant(-inf)
        self._inventory = 0

    def step(self, world: World, policy: Policy, now: Instant) -> bool:
        """Take the next step, which takes a few milliseconds, of a round that is due or under way, and return
        whether steps are left. The World may change between steps; a changed inventory restarts the round."""
        if self._work is None or world.inventory_version != self._inventory:
            if self._work is None and not self.is_due(world, now):
                return False
            self._work = make_forecasts(world, policy, now, self.forecasts)
            self._as_of, self._inventory = now, world.inventory_version
        self._so_far, before = next(self._work, None), self._so_far
        if self._so_far is not None:
            return True
        self._work = None
        self.take(before or (), world, self._as_of)
        return False

    def is_due(self, world: World, now: Instant) -> bool:
        waits = len(world.queue) > 0 or bool(self.forecasts)
        return waits and (self._pace.is_due(now) or self.is_outdated(world))

    def is_outdated(self, world: World) -> bool:
        """Return True if tasks wait and there are no forecasts for the present nodes, for instance with a new
        leader. A plan made now would give away reserved room."""
        return len(world.queue) > 0 and self._nodes != _usable(world)

    def take(self, forecasts: Sequence[Forecast], world: World, now: Instant) -> None:
        """Use these forecasts from now on, and keep the first forecast of each task."""
        self.forecasts = tuple(forecasts)
        self._pace.done(now)
        self._nodes = _usable(world)
        for forecast in forecasts:
            if forecast.task not in self._said and forecast.start_at > now + LEAST_WAIT_SECONDS:
                self._said[forecast.task] = now, forecast
        self._said = {task: word for task, word in self._said.items() if task in world.queue}

    def compare(self, world: World, decisions: Iterable[Decision], now: Instant) -> list[Decision]:
        """Return the decisions with the forecast errors of the starts in them."""
        known: dict[SketchKey, Sketch] = {}
        return [self._compared(world, decision, known, now) for decision in decisions]

    def _compared(
        self, world: World, decision: Decision, known: dict[SketchKey, Sketch], now: Instant
    ) -> Decision:
        lessons: list[Observation] = []
        for write in decision.tasks:
            first_forecast = self._said.get(write.task.id)
            if write.what is Move.ADMITTED and first_forecast is not None:
                for quantity, value in _values(*first_forecast, now):
                    topic = accuracy_topic(first_forecast[1].basis, quantity)
                    known[topic] = (known.get(topic) or world.learned.sketch(topic)).add(value)
                    lessons.append(Observation(topic, value, known[topic], now))
        return replace(decision, lessons=(*decision.lessons, *lessons)) if lessons else decision


def _usable(world: World) -> frozenset[NodeName]:
    return frozenset(Draft(world).usable_nodes())


def _values(forecast_at: Instant, forecast: Forecast, now: Instant) -> tuple[tuple[What, float], ...]:
    waited, at_most = now - forecast_at, forecast.p90_at - forecast_at
    return (
        (What.START_ERROR, round(abs(now - forecast.start_at), 3)),
        (What.START_SHARE, round(waited / at_most, 3)),
    )


class ExpectedStart(NamedTuple):
    p50_at: Instant
    p90_at: Instant
    n: int
    """The number of past runs behind the estimate; 0 if there are none."""
    basis: Basis


def expected_start(
    world: World, task: Task, forecasts: Sequence[Forecast], now: Instant
) -> ExpectedStart | None:
    """Return the start of the task by its pledges, or else by its forecast; None if it has neither."""
    pledges = world.pledges.get(task.id)
    if pledges:
        start_at = max(now, *(pledge.deadline_at for pledge in pledges.values()))
        return ExpectedStart(start_at, start_at, 0, Basis.STATED)
    for forecast in forecasts:
        if forecast.task == task.id and task.id in world.queue:
            p50_at, p90_at = max(now, forecast.start_at), max(now, forecast.p90_at)
            return ExpectedStart(p50_at, p90_at, forecast.n, forecast.basis)
    return None


def expected_ready_at(
    world: World, model: Task, forecasts: Sequence[Forecast], now: Instant
) -> ExpectedStart | None:
    """Return when a model that waits or loads is expected to be ready; None if unknown."""
    load_seconds = model_of(model).load_seconds
    if model.state is TaskState.ADMITTED:
        ready_at = Instant(max(now, (model.admitted_at or now) + load_seconds))
        return ExpectedStart(ready_at, ready_at, 0, Basis.STATED)
    room = expected_start(world, model, forecasts, now)
    if not is_unasked(model) and model.not_before is not None and model.not_before > now:
        # A load has failed and is tried again. No forecast says whether there will be memory for it then.
        room = ExpectedStart(model.not_before, model.not_before, 0, Basis.STATED)
    if room is None:
        return None
    p50_at, p90_at = Instant(room.p50_at + load_seconds), Instant(room.p90_at + load_seconds)
    return room._replace(p50_at=p50_at, p90_at=p90_at)
