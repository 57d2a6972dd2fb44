"""Requests that wait for their turn at a model, each until it has a slot, its time is up, or its client gone.

A slot is given back exactly once, however its request ends: by `Turn.leave`, which may be called again.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import Final, NamedTuple

from gpubroker_server.core.domain.policy import BAND_NAMES
from gpubroker_server.core.domain.units import Seconds, Ticks
from gpubroker_server.core.serving.lane import Full, Lane, LaneRules, Place
from gpubroker_server.gateway.http.identity import Identity
from gpubroker_server.gateway.http.problems import Problem
from gpubroker_server.gateway.proxy.refusals import bad_header, displaced, queue_full, queue_timeout

PRIORITY: Final = "x-priority"
TIMEOUT: Final = "x-timeout-seconds"
MODEL_TYPE: Final = "x-model-type"
WAITED: Final = "x-queue-seconds"

MOST_LANES: Final = 1024
"""Of models that nobody asks at the moment, what was learned of so many is kept: names come from clients."""


class LaneOptions(NamedTuple):
    rules: LaneRules = LaneRules()
    queue_seconds: Seconds = Seconds(30.0)
    """So long a request may wait; less if it says so."""
    priority: int = BAND_NAMES["interactive"]
    """Of requests that state none."""
    slots: Mapping[bytes, int] = {}
    """By model; of all others it is found out."""
    type_priorities: Mapping[str, int] = {}
    """Model type -> priority of requests that name it and state none."""


class Wish(NamedTuple):
    """What a request says of its turn."""

    priority: int | None = None
    """At most what its token may have."""
    seconds: float | None = None
    """So long it would wait."""
    is_capped: bool = False
    """It asked for a higher priority than it has."""


NO_WISH: Final = Wish()


class LaneFigures(NamedTuple):
    model: str
    slots: int
    in_flight: int
    waiting: int


class Load(NamedTuple):
    """What a model has to do here."""

    slots: int
    in_flight: int
    wanted: int
    """In flight, or waiting."""


class Turn:
    __slots__ = ("_capped", "_expiry", "_granted", "_is_over", "_lane", "_lanes", "_place", "_tenant",
                 "since", "waited_seconds")  # fmt: skip

    def __init__(self, lanes: "Lanes", lane: Lane, tenant: str, capped: int | None, now: float) -> None:
        """`capped`: the priority that it has instead of a higher one."""
        self.waited_seconds: float | None = None
        """Set if it had to wait and has gone."""
        self._capped = capped
        self._lanes = lanes
        self._lane = lane
        self._tenant = tenant
        self.since = now
        """When it began to wait, or has gone."""
        self._is_over = False
        self._place: Place | None = None
        """While it waits."""
        self._granted: asyncio.Future[Problem | None] | None = None
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def waits(self) -> bool:
        return self._place is not None

    async def granted(self) -> None:
        """It has a slot. Raises Problem."""
        if self._granted is not None and (problem := await self._granted) is not None:
            raise problem

    def headers(self) -> Sequence[tuple[str, str]]:
        """Headers of the answer: none if it went at once, by the priority that it asked for."""
        if self._capped is None and self.waited_seconds is None:
            return ()
        told = [] if self._capped is None else [(PRIORITY, str(self._capped))]
        if self.waited_seconds is not None:
            told.append((WAITED, f"{self.waited_seconds:.3f}"))
        return told

    def leave(self) -> None:
        """It is over, whether it has gone or not."""
        if self._is_over:
            return
        self._is_over = True
        if self._place is None:
            self._lanes.end(self._lane, self._tenant, self)
            return
        self._lane.leave(self._place)
        self._stop_waiting(None)

    # What its lanes call.

    def wait(self, place: Place, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._place = place
        self._granted = loop.create_future()
        self._expiry = loop.call_later(seconds, self._expire)

    def go(self, now: float) -> None:
        self.waited_seconds = now - self.since
        self.since = now
        self._stop_waiting(None)

    def lose(self, problem: Problem) -> None:
        """Its lane knows it no more."""
        self._is_over = True
        self._stop_waiting(problem)

    def _expire(self) -> None:
        place = self._place
        assert place is not None
        problem = queue_timeout(self._lane.outlook(place), self._lanes.now() - self.since)
        self._lane.leave(place)
        self.lose(problem)

    def _stop_waiting(self, problem: Problem | None) -> None:
        place, granted, expiry = self._place, self._granted, self._expiry
        assert place is not None
        assert granted is not None
        assert expiry is not None
        self._lanes.forget(self._lane, place)
        self._place = None
        expiry.cancel()
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
        """By model."""
        self.limits_end_at = inf
        """By `now`: from then on each model that has a limit is asked one request at a time, however long
        this process has slept."""
        self._on_waited = on_waited
        self._lanes: dict[bytes, Lane] = {}
        self._waiting: dict[tuple[Lane, Place], Turn] = {}
        self._gone: dict[Lane, set[Turn]] = {}
        """Those that have a slot."""
        self._streams: dict[str, list[float]] = {}
        """By model, since when those are open that take no slot."""

    def wish_in(
        self, identity: Identity, priority: str | None, seconds: str | None, model_type: str | None
    ) -> Wish:
        """The three headers, if they were sent. Raises Problem."""
        if priority is None and seconds is None and model_type is None:
            return NO_WISH
        asked = None if priority is None else _priority_in(priority)
        usual = self._options.type_priorities.get(model_type or "")
        given, most = usual if asked is None else asked, identity.max_priority
        return Wish(
            None if given is None else min(given, most),
            None if seconds is None else _seconds_in(seconds),
            is_capped=asked is not None and asked > most,
        )

    def enter(self, model: bytes, identity: Identity, wish: Wish) -> Turn:
        """Raises Problem."""
        lane, now = self._lanes.get(model) or self._open(model), self.now()
        self._heed_the_end(lane, now)
        turn = Turn(self, lane, identity.tenant, wish.priority if wish.is_capped else None, now)
        if lane.goes_now(identity.tenant):
            self._gone[lane].add(turn)
        else:
            options = self._options
            priority = (
                min(options.priority, identity.max_priority) if wish.priority is None else wish.priority
            )
            place = self._wait(lane, identity, priority)
            self._waiting[lane, place] = turn
            seconds = options.queue_seconds
            turn.wait(place, seconds if wish.seconds is None else min(seconds, wish.seconds))
        return turn

    def _wait(self, lane: Lane, identity: Identity, priority: int) -> Place:
        """Raises Problem."""
        queued = lane.wait(identity.tenant, priority)
        if isinstance(queued, Full):
            raise queue_full(queued, identity.tenant)
        if queued.displaced is not None:
            self._waiting[lane, queued.displaced].lose(displaced(lane.outlook(queued.displaced)))
        return queued.place

    @contextmanager
    def streaming(self, model: str) -> Iterator[None]:
        """While a stream to it is open, which takes no slot and is under way all the same."""
        since = self.now()
        self._streams.setdefault(model, []).append(since)
        try:
            yield
        finally:
            self._streams[model].remove(since)
            if not self._streams[model]:
                del self._streams[model]

    def has_older(self, model: str, at: float) -> bool:
        """Whether a request that has had its slot since before is not answered yet, or a stream open."""
        if any(since <= at for since in self._streams.get(model, ())):
            return True
        lane = self._lanes.get(model.encode())
        return lane is not None and any(turn.since <= at for turn in self._gone[lane])

    @property
    def tenant_share(self) -> float:
        return self._options.rules.tenant_share

    def figures(self) -> Iterator[LaneFigures]:
        """Of the models that are being asked."""
        for model, lane in self._lanes.items():
            if not lane.is_idle:
                name = model.decode("utf-8", "replace")
                yield LaneFigures(name, lane.slots, lane.in_flight, lane.waiting)

    def limit(self, model: str, slots: int) -> None:
        """Ask it so many requests at once from now on; those that are under way go on."""
        name = model.encode()
        self._limits[name] = slots
        if (lane := self._lanes.get(name)) is not None:
            lane.limit(slots)
            self._go_on(lane)

    def load(self, model: str) -> Load:
        name = model.encode()
        lane = self._lanes.get(name)
        now = self.now()
        if lane is None:
            return Load(1 if now >= self.limits_end_at else self._limits.get(name, 1), 0, 0)
        self._heed_the_end(lane, now)
        return Load(lane.slots, lane.in_flight, lane.in_flight + lane.waiting)

    # What turns call.

    def end(self, lane: Lane, tenant: str, ended: Turn) -> None:
        now = self.now()
        self._gone[lane].discard(ended)
        lane.end(tenant, now - ended.since, Ticks(now))
        self._go_on(lane)

    def _go_on(self, lane: Lane) -> None:
        """Those that wait, as far as slots are free."""
        while lane.waiting:
            now = self.now()
            self._heed_the_end(lane, now)
            if (place := lane.next()) is None:
                return
            turn = self._waiting[lane, place]
            self._gone[lane].add(turn)
            turn.go(now)
            self._on_waited(turn.waited_seconds or 0.0)

    def _heed_the_end(self, lane: Lane, now: float) -> None:
        if now >= self.limits_end_at and lane.is_limited:
            lane.limit(1)

    def forget(self, lane: Lane, place: Place) -> None:
        del self._waiting[lane, place]

    def _open(self, model: bytes) -> Lane:
        if len(self._lanes) >= MOST_LANES:
            for name in [name for name, lane in self._lanes.items() if lane.is_idle]:
                del self._gone[self._lanes.pop(name)]
        lane = self._lanes[model] = Lane(self._options.rules, self._limits.get(model))
        self._gone[lane] = set()
        return lane


def _priority_in(text: str) -> int:
    """Raises Problem."""
    if text in BAND_NAMES:
        return BAND_NAMES[text]
    if text.isascii() and text.isdecimal() and len(text) <= 3 and int(text) <= 100:
        return int(text)
    raise bad_header(PRIORITY, text, f"write 0 to 100, or one of {', '.join(BAND_NAMES)}")


def _seconds_in(text: str) -> float:
    """Raises Problem."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise bad_header(TIMEOUT, text, "write a number of seconds above 0")
    return seconds
