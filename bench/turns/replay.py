"""A replay of requests on one GPU with room for one model at a time: the clock jumps from event to event."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import NamedTuple, Protocol

from bench.turns.arrivals import Ask


class Costs(NamedTuple):
    load_seconds: float
    unload_seconds: float
    """The seconds of an unload after the model's last answer."""
    answer_seconds: float
    slots: int
    """The number of requests that a model answers at once."""


class Swap(NamedTuple):
    """Loads a model, or makes it leave: it gets no more requests and is unloaded after its last answer."""

    model: str
    loads: bool


@dataclass
class Lanes:
    """The state that a rule may see."""

    waiting: dict[str, deque[float]] = field(default_factory=lambda: defaultdict(deque))
    """Model -> the arrival time of each of its requests that has not been sent yet."""
    under_way: Counter[str] = field(default_factory=Counter)
    asked_at: dict[str, float] = field(default_factory=dict)
    """Model -> the time of its last request."""
    resident: str = ""
    is_busy: bool = False
    """True while a model is being loaded or has to leave."""

    def longest_waiting(self, without: str = "") -> str:
        """Return the model whose oldest request came first, other than `without`; empty if no request
        waits."""
        oldest = [(times[0], model) for model, times in self.waiting.items() if times and model != without]
        return min(oldest)[1] if oldest else ""

    def in_use(self) -> frozenset[str]:
        models = {*self.waiting, *self.under_way}
        return frozenset(model for model in models if self.waiting[model] or self.under_way[model])


class Rule(Protocol):
    """Decides which model is in memory."""

    keeps_order: bool
    """True if a request is sent only after all earlier ones were sent."""

    def decide(self, lanes: Lanes, now: float) -> Sequence[Swap]:
        """Return the swaps to make now. Called after every event."""
        ...

    def next_at(self, lanes: Lanes, now: float) -> float:
        """Return when to call `decide` again even if nothing has happened; may be infinite."""
        ...

    def on_swapped(self, swap: Swap, now: float) -> None:
        """Note that the model of a swap is ready, or that its memory is free."""
        ...


@dataclass
class Outcome:
    waits: list[float] = field(default_factory=list)
    """The seconds until each request was sent to its model."""
    lane_waits: list[float] = field(default_factory=list)
    """The seconds from the first request of each lane whose model was not in memory until the model was."""
    swaps: int = 0
    seconds: float = 0.0
    """The seconds from the first request to the last answer."""

    @property
    def per_second(self) -> float:
        return len(self.waits) / self.seconds


class Replay:
    def __init__(self, asks: Sequence[Ask], costs: Costs, rule: Rule) -> None:
        self._costs = costs
        self._rule = rule
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()
        self._now = 0.0
        self._again_at = inf
        self._answered_at = 0.0
        self._lanes = Lanes()
        self._leaving = ""
        self._missed_at: dict[str, float] = {}
        """Model that has requests and is not in memory -> the time since when."""
        self._began_at = asks[0].at
        self.outcome = Outcome()
        for ask in asks:
            self._at(ask.at, self._arrival_of(ask))

    def run(self) -> Outcome:
        """Run until every request is answered."""
        while self._timers:
            self._now, _, act = heappop(self._timers)
            act()
            self._send()
            for swap in self._rule.decide(self._lanes, self._now):
                self._carry_out(swap)
            self._send()
            self._call_again()
        self.outcome.seconds = self._answered_at - self._began_at
        return self.outcome

    def _at(self, moment: float, act: Callable[[], None]) -> None:
        heappush(self._timers, (moment, next(self._number), act))

    def _call_again(self) -> None:
        moment = self._rule.next_at(self._lanes, self._now) if self._lanes.in_use() else inf
        if self._now < moment < inf and not self._now < self._again_at <= moment:
            self._again_at = moment
            self._at(moment, lambda: None)

    def _arrival_of(self, ask: Ask) -> Callable[[], None]:
        def arrive() -> None:
            lanes = self._lanes
            lanes.waiting[ask.model].append(ask.at)
            lanes.asked_at[ask.model] = ask.at
            if not self._is_there(ask.model):
                self._missed_at.setdefault(ask.model, ask.at)

        return arrive

    def _is_there(self, model: str) -> bool:
        return model == self._lanes.resident != self._leaving

    def _send(self) -> None:
        lanes, model = self._lanes, self._lanes.resident
        while (
            self._is_there(model)
            and lanes.waiting[model]
            and lanes.under_way[model] < self._costs.slots
            and not (self._rule.keeps_order and lanes.longest_waiting() != model)
        ):
            self.outcome.waits.append(self._now - lanes.waiting[model].popleft())
            lanes.under_way[model] += 1
            self._at(self._now + self._costs.answer_seconds, self._answer_of(model))

    def _answer_of(self, model: str) -> Callable[[], None]:
        def answer() -> None:
            self._answered_at = self._now
            self._lanes.under_way[model] -= 1
            self._unload_if_drained()

        return answer

    def _carry_out(self, swap: Swap) -> None:
        self._lanes.is_busy = True
        if swap.loads:
            self._at(self._now + self._costs.load_seconds, lambda: self._end(swap))
            return
        self._leaving = swap.model
        if self._lanes.waiting[swap.model]:
            self._missed_at.setdefault(swap.model, self._now)
        self._unload_if_drained()

    def _unload_if_drained(self) -> None:
        model = self._leaving
        if model and model == self._lanes.resident and not self._lanes.under_way[model]:
            self._lanes.resident = ""
            self._at(self._now + self._costs.unload_seconds, lambda: self._end(Swap(model, loads=False)))

    def _end(self, swap: Swap) -> None:
        self._lanes.is_busy = False
        self._leaving = ""
        if swap.loads:
            self._lanes.resident = swap.model
            self.outcome.swaps += 1
            if swap.model in self._missed_at:
                self.outcome.lane_waits.append(self._now - self._missed_at.pop(swap.model))
        self._rule.on_swapped(swap, self._now)
