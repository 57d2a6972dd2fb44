"""The lanes of models. A request waits for a slot of its model until it gets one, its time is up, or its
client goes.

A slot is given back exactly once, however its request ends: `LaneEntry.leave` gives it back and may be called
again.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from typing import Final, NamedTuple

from gpubroker_server.core.domain.model_orders import ModelsInUse
from gpubroker_server.core.domain.policy import DIRECT_PRIORITY, PRIORITIES_IN_WORDS, Policy, priority_of
from gpubroker_server.core.domain.units import MonotonicSeconds, Seconds
from gpubroker_server.core.serving.lane import LaneFull, LaneRules, ModelLane, Place
from gpubroker_server.http.identity import Identity
from gpubroker_server.http.problems import Problem
from gpubroker_server.inference.refusals import bad_header, displaced, queue_full, queue_timeout

PRIORITY: Final = "x-priority"
TIMEOUT: Final = "x-timeout-seconds"
MODEL_TYPE: Final = "x-model-type"
WAITED: Final = "x-queue-seconds"

MAX_LANES: Final = 1024
"""The number of lanes at which idle lanes are dropped, with the limits that they have found. Clients choose
the names of models, so without a bound lanes would fill the memory."""


class LaneOptions(NamedTuple):
    rules: LaneRules = LaneRules()
    priority: int = DIRECT_PRIORITY
    """The priority of requests that state none."""
    slots: Mapping[bytes, int] = {}
    """Model -> the number of its slots. For other models the lane finds the number by trying."""
    type_priorities: Mapping[str, int] = {}
    """Model type -> priority of the requests that name the type and state no priority."""
    recent_seconds: Seconds = Policy().yields_to_tasks_seconds
    """Time after its last request for which a model counts as used."""


class QueueWish(NamedTuple):
    """The place in the queue that a request asks for."""

    priority: int | None = None
    """The priority that the request gets, which is at most that of its token; None if the request states
    none."""
    seconds: float | None = None
    """The longest time that the request waits; None if it states none."""
    is_capped: bool = False
    """True if the request asked for a higher priority than its token has."""


NO_WISH: Final = QueueWish()


class LaneFigures(NamedTuple):
    model: str
    slots: int
    in_flight: int
    waiting: int


class LaneLoad(NamedTuple):
    """The load of a model on this gateway."""

    slots: int
    in_flight: int
    wanted: int
    """The number of requests in flight or waiting: the slots that the gateway could use."""


class LaneEntry:
    """One request in its model's lane. It waits or has a slot."""

    __slots__ = ("_capped", "_expiry", "_granted", "_is_over", "_lane", "_lanes", "_place", "_tenant",
                 "since", "waited_seconds")  # fmt: skip

    def __init__(self, lanes: "Lanes", lane: ModelLane, tenant: str, capped: int | None, now: float) -> None:
        """`capped` is the priority that the request gets instead of a higher one that it asked for; None if
        it did not ask for a higher one."""
        self.waited_seconds: float | None = None
        """The time for which the request waited; None if it did not wait or still waits."""
        self._capped = capped
        self._lanes = lanes
        self._lane = lane
        self._tenant = tenant
        self.since = now
        """The time at which the request began to wait or, once it has a slot, got the slot."""
        self._is_over = False
        self._place: Place | None = None
        """The place of a waiting request; None for a request that has a slot."""
        self._granted: asyncio.Future[Problem | None] | None = None
        """Done when the wait is over, with the problem if the request has lost its place."""
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def waits(self) -> bool:
        return self._place is not None

    async def granted(self) -> None:
        """Wait until the request has a slot. Raises Problem if it loses its place."""
        if self._granted is not None and (problem := await self._granted) is not None:
            raise problem

    def headers(self) -> Sequence[tuple[str, str]]:
        """Return the headers of the answer that tell of the wait. There are none if the request started at
        once, at the priority that it asked for."""
        if self._capped is None and self.waited_seconds is None:
            return ()
        headers = [] if self._capped is None else [(PRIORITY, str(self._capped))]
        if self.waited_seconds is not None:
            headers.append((WAITED, f"{self.waited_seconds:.3f}"))
        return headers

    def leave(self) -> None:
        """Give back the slot or the place: the request is over. Later calls do nothing."""
        if self._is_over:
            return
        self._is_over = True
        if self._place is None:
            self._lanes.end(self._lane, self._tenant, self)
            return
        self._lane.withdraw(self._place)
        self._stop_waiting(None)

    # Methods for the lanes.

    def wait(self, place: Place, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._place = place
        self._granted = loop.create_future()
        self._expiry = loop.call_later(seconds, self._expire)

    def start(self, now: float) -> None:
        self.waited_seconds = now - self.since
        self.since = now
        self._stop_waiting(None)

    def lose(self, problem: Problem) -> None:
        """End the wait with this problem: the request has no place in its lane any more."""
        # A later `leave` must not give back a slot that the request never had.
        self._is_over = True
        self._stop_waiting(problem)

    def _expire(self) -> None:
        place = self._place
        assert place is not None
        # The estimate names the position in the queue, so it is made before the place is withdrawn.
        problem = queue_timeout(self._lane.estimate(place), self._lanes.now() - self.since)
        self._lane.withdraw(place)
        self.lose(problem)

    def _stop_waiting(self, problem: Problem | None) -> None:
        place, granted, expiry = self._place, self._granted, self._expiry
        assert place is not None
        assert granted is not None
        assert expiry is not None
        self._lanes.forget(self._lane, place)
        self._place = None
        expiry.cancel()
        # A caller that was cancelled has cancelled the future as well.
        if not granted.done():
            granted.set_result(problem)


class Lanes:
    def __init__(
        self,
        options: LaneOptions,
        *,
        on_waited: Callable[[float], None] = lambda _seconds: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.now = now
        self._options = options
        self._limits = dict(options.slots)
        """Model -> the number of slots that this gateway may use."""
        self.limits_end_at = inf
        """Time by `now` at which the limits end: from then on each model with a limit gets one request at a
        time. Every start compares the clock, so this also holds if the process was asleep meanwhile."""
        self._on_waited = on_waited
        self._lanes: dict[bytes, ModelLane] = {}
        self._waiting: dict[tuple[ModelLane, Place], LaneEntry] = {}
        self._started: dict[ModelLane, set[LaneEntry]] = {}
        """The requests that have a slot."""

    def wish_in(
        self, identity: Identity, priority: str | None, seconds: str | None, model_type: str | None
    ) -> QueueWish:
        """Return the wish that the three headers state, as far as they were sent. Raises Problem for a value
        that cannot be used."""
        if priority is None and seconds is None and model_type is None:
            return NO_WISH
        asked = None if priority is None else _priority_in(priority)
        type_priority = self._options.type_priorities.get(model_type or "")
        wanted, most = type_priority if asked is None else asked, identity.max_priority
        return QueueWish(
            None if wanted is None else min(wanted, most),
            None if seconds is None else _seconds_in(seconds),
            is_capped=asked is not None and asked > most,
        )

    def enter(self, model: bytes, identity: Identity, wish: QueueWish) -> LaneEntry:
        """Start the request or put it into the model's queue. Raises Problem if the queue is full."""
        lane, now = self._lanes.get(model) or self._open(model), self.now()
        self._apply_end_of_limits(lane, now)
        entry = LaneEntry(self, lane, identity.tenant, wish.priority if wish.is_capped else None, now)
        if lane.try_start(identity.tenant):
            self._started[lane].add(entry)
        else:
            options = self._options
            priority = (
                min(options.priority, identity.max_priority) if wish.priority is None else wish.priority
            )
            place = self._enqueue(lane, identity, priority, now)
            self._waiting[lane, place] = entry
            seconds = options.rules.queue_seconds
            entry.wait(place, seconds if wish.seconds is None else min(seconds, wish.seconds))
        return entry

    def _enqueue(self, lane: ModelLane, identity: Identity, priority: int, now: float) -> Place:
        """Put the request into the lane's queue. If the queue is full, the request takes the place of a less
        important one. Raises Problem if there is no less important one."""
        queued = lane.enqueue(identity.tenant, priority, MonotonicSeconds(now))
        if isinstance(queued, LaneFull):
            raise queue_full(queued, identity.tenant)
        if queued.displaced is not None:
            self._waiting[lane, queued.displaced].lose(displaced(lane.estimate(queued.displaced)))
        return queued.place

    def has_older(self, model: str, at: float) -> bool:
        """Return True if a request that got its slot at `at` or earlier is not answered, or if its stream is
        open."""
        lane = self._lanes.get(model.encode())
        return lane is not None and any(entry.since <= at for entry in self._started[lane])

    def in_use(self) -> ModelsInUse:
        """Return the models that have a request at this gateway, under way or waiting, or had one lately."""
        since = self.now() - self._options.recent_seconds
        names = {
            name.decode("utf-8", "replace"): lane
            for name, lane in self._lanes.items()
            if not lane.is_idle or lane.idle_since > since
        }
        return ModelsInUse(
            frozenset(name for name, lane in names.items() if not lane.is_idle), frozenset(names)
        )

    @property
    def tenant_share(self) -> float:
        return self._options.rules.tenant_share

    def figures(self) -> Iterator[LaneFigures]:
        """Yield the figures of the lanes that are not idle."""
        for model, lane in self._lanes.items():
            if not lane.is_idle:
                name = model.decode("utf-8", "replace")
                yield LaneFigures(name, lane.slots, lane.in_flight, lane.waiting)

    def limit(self, model: str, slots: int) -> None:
        """Give the model `slots` requests at once from now on. Requests in flight continue."""
        name = model.encode()
        self._limits[name] = slots
        if (lane := self._lanes.get(name)) is not None:
            lane.limit(slots)
            self._start_waiting(lane)

    def load(self, model: str) -> LaneLoad:
        name = model.encode()
        lane = self._lanes.get(name)
        now = self.now()
        if lane is None:
            return LaneLoad(1 if now >= self.limits_end_at else self._limits.get(name, 1), 0, 0)
        self._apply_end_of_limits(lane, now)
        return LaneLoad(lane.slots, lane.in_flight, lane.in_flight + lane.waiting)

    # Methods for entries.

    def end(self, lane: ModelLane, tenant: str, ended: LaneEntry) -> None:
        now = self.now()
        self._started[lane].discard(ended)
        lane.finish(tenant, now - ended.since, MonotonicSeconds(now))
        self._start_waiting(lane)

    def forget(self, lane: ModelLane, place: Place) -> None:
        del self._waiting[lane, place]

    def _start_waiting(self, lane: ModelLane) -> None:
        """Start waiting requests as long as slots are free."""
        while lane.waiting:
            now = self.now()
            self._apply_end_of_limits(lane, now)
            if (place := lane.start_next(MonotonicSeconds(now))) is None:
                return
            # `start` removes the entry from `_waiting`, so the loop ends.
            entry = self._waiting[lane, place]
            self._started[lane].add(entry)
            entry.start(now)
            self._on_waited(entry.waited_seconds or 0.0)

    def _apply_end_of_limits(self, lane: ModelLane, now: float) -> None:
        if now >= self.limits_end_at and lane.is_limited:
            lane.limit(1)

    def _open(self, model: bytes) -> ModelLane:
        if len(self._lanes) >= MAX_LANES:
            for name in [name for name, lane in self._lanes.items() if lane.is_idle]:
                del self._started[self._lanes.pop(name)]
        lane = self._lanes[model] = ModelLane(self._options.rules, self._limits.get(model))
        self._started[lane] = set()
        return lane


def _priority_in(text: str) -> int:
    """Return the priority that the header names. Raises Problem for any other text."""
    if (priority := priority_of(text)) is None:
        raise bad_header(PRIORITY, text, f"write {PRIORITIES_IN_WORDS}")
    return priority


def _seconds_in(text: str) -> float:
    """Return the number of seconds above 0 that the header says. Raises Problem for any other text."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise bad_header(TIMEOUT, text, "write a number of seconds above 0")
    return seconds
