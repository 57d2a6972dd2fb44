"""Count the items per second that each component processes."""

from collections import Counter
from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta, Struct

from gpubroker_server.core.domain.decisions import Notice
from gpubroker_server.core.domain.setting_marks import PositiveAmount, Share
from gpubroker_server.core.domain.task import TERMINAL, Move
from gpubroker_server.core.domain.units import Instant, Seconds

ITEMS, INFERENCES, CALLS = "array_items", "inferences", "worker_calls"
_MOVES = {Move.SUBMITTED: "submitted", Move.ADMITTED: "admitted", Move.STARTED: "started"}
_ENDS = {Move(state.value): "finished" for state in TERMINAL}
COMPONENTS = (*_MOVES.values(), "finished", ITEMS, INFERENCES, CALLS)
"""The components whose items are counted. Their names are published."""


class ThroughputRules(Struct, frozen=True):
    seconds: Annotated[Seconds, Meta(ge=1)] = Seconds(300.0)
    """The time over which rates are averaged."""
    change: Share = 0.5
    """The relative difference from the last reported rate at which a rate is reported. It must also differ by
    `least_per_second`."""
    least_per_second: PositiveAmount = 0.1
    """The least difference from the last reported rate, in items per second, at which a rate is reported."""


class Throughput:
    """Counts of the items that were processed since this leader began. They are kept in the leader's
    memory."""

    def __init__(self, rules: ThroughputRules) -> None:
        self._rules = rules
        self.done: Counter[str] = Counter(dict.fromkeys(COMPONENTS, 0))
        self._counted = self.done.copy()
        self._counted_at: Instant | None = None
        self._reported: dict[str, float] = {}

    def moved(self, transition: Move, *, is_inference: bool) -> None:
        """Count the transition of a task."""
        if (component := _MOVES.get(transition) or _ENDS.get(transition)) is not None:
            self.done[component] += 1
        if is_inference and transition in _ENDS:
            self.done[INFERENCES] += 1

    def follow(self, now: Instant) -> Iterator[Notice]:
        """Yield, once per period, a notice for each rate that has changed. If the clock was set back, the
        period begins anew."""
        since = self._counted_at
        if since is not None and 0 <= now - since < self._rules.seconds:
            return
        before, self._counted, self._counted_at = self._counted, self.done.copy(), now
        if since is None or now <= since:
            return
        for component in COMPONENTS:
            rate = (self._counted[component] - before[component]) / (now - since)
            published = self._reported.get(component, 0.0)
            step = max(self._rules.change * published, self._rules.least_per_second)
            if abs(rate - published) >= step:
                self._reported[component] = rate
                threshold = published + step if rate > published else published - step
                about = {"items_per_second": rate, "before": published, "threshold": threshold}
                yield Notice("fleet.THROUGHPUT", component, about)
