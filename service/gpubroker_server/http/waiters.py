"""Requests that wait for their turn, for the end of a task, or for the leader to do something."""

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from time import monotonic
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import structlog

from gpubroker_server.core.control.fleet import FleetSeen
from gpubroker_server.core.domain.decisions import Request
from gpubroker_server.core.domain.task import TERMINAL
from gpubroker_server.core.domain.units import Position, Seconds, TaskId
from gpubroker_server.core.lifecycle.silent_nodes import PausedDetection
from gpubroker_server.core.planning.forecasts.reservations import Forecast
from gpubroker_server.core.world.events import Event
from gpubroker_server.core.world.payload import Payload, fields_of
from gpubroker_server.http.ids import Ids
from gpubroker_server.http.leader_release import LeaderRelease
from gpubroker_server.http.problems import Problem
from gpubroker_server.ports.last_values import LeaderSeen
from gpubroker_server.ports.store import Clock, TaskStore

log = structlog.get_logger("gpubroker.gateway")

T = TypeVar("T")

PER_COMMIT = 1_000
"""The number of requests to the leader that are stored in one commit."""


class OneAtATime:
    """A lock with a bounded queue, which is served in the order of arrival."""

    def __init__(self, noun: str, max_waiting: int, *, on_the_loop: bool = False) -> None:
        """`noun` names the answers in a refusal, such as "plans". `max_waiting` is the number of requests
        that may wait. `on_the_loop` says that the computation blocks the event loop: the lock then stays
        taken for as long again as the computation took, so that other requests get that time."""
        self._what = noun
        self._max_waiting = max_waiting
        self._on_the_loop = on_the_loop
        self._waiting = 0
        self._busy = asyncio.Lock()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold the lock for one answer. Raises Problem too-many-requests if the queue is full."""
        if (self._busy.locked() or self._waiting) and self._waiting >= self._max_waiting:
            more = f" and {self._waiting} more are waiting" if self._waiting else ""
            raise Problem("too-many-requests", what=self._what, more=more)
        self._waiting += 1
        try:
            await self._busy.acquire()
        finally:
            self._waiting -= 1
        began = monotonic()
        try:
            yield
        finally:
            if self._on_the_loop:
                asyncio.get_running_loop().call_later(monotonic() - began, self._busy.release)
            else:
                self._busy.release()


async def run_in_thread(steps: Generator[None, None, T], limit_seconds: Seconds) -> T:
    """Run a generator to its end in a thread, and return its return value. `steps` must share nothing mutable
    with the event loop.

    Raises TimeoutError after `limit_seconds`. Cancelling ends the thread after its next step.
    """
    cancelled = threading.Event()
    try:
        return await asyncio.to_thread(_run_steps, steps, limit_seconds, cancelled)
    finally:
        cancelled.set()


def _run_steps(steps: Generator[None, None, T], limit_seconds: Seconds, cancelled: threading.Event) -> T:
    until = monotonic() + limit_seconds
    with closing(steps):
        while True:
            try:
                next(steps)
            except StopIteration as end:
                result: T = end.value
                return result
            if cancelled.is_set() or monotonic() > until:
                raise TimeoutError


_WAKING = frozenset({*(f"task.{state}" for state in TERMINAL), "request.done"})
"""Kinds of events that fulfil the expectations of their key, which is the id of the task or of the
request."""
_MOVES = _WAKING - {"request.done"} | {"task.started", "task.stopping"}
"""Kinds of events that fulfil the expectations of `moves_of(key)`."""


def moves_of(task: str) -> str:
    """Return the key of expectations of the task's next state, whether that state is terminal or not."""
    return f"{task} moves"


class Expectation:
    """An expectation of the next event of one key. Create it before you read the row: an event that follows
    the read is then not missed."""

    def __init__(self) -> None:
        self._happened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.payload: Payload = {}
        """The payload of the event that fulfilled the expectation; empty if the event was missed."""

    def fulfil(self, payload: Payload = MappingProxyType({})) -> None:
        if not self._happened.done():
            self.payload = payload
            self._happened.set_result(None)

    async def within(self, seconds: Seconds) -> bool:
        """Wait for the event, and return True once it has happened, or False if `seconds` pass first."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._happened
        return self._happened.done() and not self._happened.cancelled()


class Waiters:
    """All expectations, by key. Call `on_events` on the thread of the event loop."""

    def __init__(self, most_of_a_tenant: int) -> None:
        self._most_of_a_tenant = most_of_a_tenant
        self._of_tenants: Counter[str] = Counter()
        """Tenant -> the number of its requests that wait."""
        self._waiting: dict[str, set[Expectation]] = {}
        self._behind: dict[Expectation, Position] = {}
        """Expectation -> the position of the event log that fulfils it once the log has been read so far."""
        self.is_closed = False
        """True if this process is about to end: no request waits any longer."""

    def __len__(self) -> int:
        return sum(len(expectations) for expectations in self._waiting.values())

    @contextlib.contextmanager
    def expect(self, key: str) -> Iterator[Expectation]:
        """Yield an expectation of the next event of `key`."""
        expectation = self._new()
        self._waiting.setdefault(key, set()).add(expectation)
        try:
            yield expectation
        finally:
            others = self._waiting.get(key, set())
            others.discard(expectation)
            if not others:
                self._waiting.pop(key, None)

    @contextlib.contextmanager
    def expect_for(self, tenant: str, key: str) -> Iterator[Expectation]:
        """Yield an expectation for a client's request. Raises Problem tenant-waits if as many requests of the
        tenant wait as may wait."""
        if not self.has_room_for(tenant):
            waiting, limit = self._of_tenants[tenant], self._most_of_a_tenant
            raise Problem("tenant-waits", tenant=tenant, waiting=waiting, most=limit)
        self._of_tenants[tenant] += 1
        try:
            with self.expect(key) as expectation:
                yield expectation
        finally:
            self._of_tenants[tenant] -= 1
            if not self._of_tenants[tenant]:
                del self._of_tenants[tenant]

    def has_room_for(self, tenant: str) -> bool:
        """Return True if one more request of the tenant may wait."""
        return self._of_tenants[tenant] < self._most_of_a_tenant

    @contextlib.contextmanager
    def behind(self, position: Position) -> Iterator[Expectation]:
        """Yield an expectation that the event log has been read up to `position`."""
        expectation = self._new()
        self._behind[expectation] = position
        try:
            yield expectation
        finally:
            del self._behind[expectation]

    def on_events(self, events: Sequence[Event]) -> None:
        """Fulfil the expectations of these committed events. Apply the events to the World first."""
        for expectation, position in self._behind.items():
            if events and events[-1].position >= position:
                expectation.fulfil()
        if not self._waiting:
            return
        for event in events:
            if event.kind in _WAKING:
                self._fulfil(event.key, event.payload)
            if event.kind in _MOVES:
                self._fulfil(moves_of(event.key))

    def close(self) -> None:
        """Wake all requests that wait, and let no later request wait."""
        self.is_closed = True
        self.wake_all()

    def wake_all(self) -> None:
        """Wake all requests that wait, because events were missed."""
        for key in list(self._waiting):
            self._fulfil(key)
        for expectation in self._behind:
            expectation.fulfil()

    def _new(self) -> Expectation:
        expectation = Expectation()
        if self.is_closed:
            expectation.fulfil()
        return expectation

    def _fulfil(self, key: str, payload: Payload = MappingProxyType({})) -> None:
        for expectation in self._waiting.pop(key, ()):
            expectation.fulfil(payload)


class Leadership(Protocol):
    """The leader as this process knows it. The leader may be in this process or in another one."""

    def leader(self) -> LeaderSeen | None:
        """Return the leader; None if none is known."""

    def last_fleet(self) -> FleetSeen | None:
        """Return the fleet as the leader sees it, or as the last leader saw it; None if none has reported
        it."""

    def executor_status(self) -> Mapping[str, Any]:
        """Return the status of the leader's executor, in the form of `Executor.status`."""

    def paused(self) -> PausedDetection | None:
        """Return which silent nodes the leader does not give up; None if detection is not paused."""

    def forecasts(self) -> Sequence[Forecast]: ...


class LeaderRequests:
    """Stores requests to the leader as rows, which the leader carries out.

    Each method raises Problem leader-outdated if the leader's release is too early to know the request.
    """

    def __init__(
        self,
        store: TaskStore,
        ids: Ids,
        clock: Clock,
        waiters: Waiters,
        settle_seconds: Seconds,
        release: LeaderRelease,
    ) -> None:
        self._store = store
        self._release = release
        self._ids = ids
        self._clock = clock
        self._waiters = waiters
        self._settle_seconds = settle_seconds

    async def ask(self, subject: str, tenant: str, kind: str, fields: dict[str, Any]) -> bool:
        """Store a request, and wait for the leader. Returns True if the leader has carried the request out,
        False if it has not done so in time."""
        return await self._settle(self._requests([subject], tenant, kind, fields))

    async def ask_many(self, subjects: Sequence[str], tenant: str, kind: str, fields: dict[str, Any]) -> None:
        """Store one request per subject, at most `PER_COMMIT` in one commit, and wait for the leader."""
        requests = self._requests(subjects, tenant, kind, fields)
        slices = [requests[start : start + PER_COMMIT] for start in range(0, len(requests), PER_COMMIT)]
        await asyncio.gather(*(self._settle(chunk, times=len(slices)) for chunk in slices))

    async def ask_for(
        self, subject: str, tenant: str, kind: str, fields: dict[str, Any], seconds: Seconds
    ) -> str:
        """Store a request that the leader answers with an object, and wait for the answer. Returns the digest
        of the object; empty if there is no answer within `seconds`. Raises Problem tenant-waits."""
        [request] = self._requests([subject], tenant, kind, fields)
        with self._waiters.expect_for(tenant, request.id) as done:
            await self._store.request(request)
            log.info("asked", what=kind, task=subject, tenant=tenant)
            await done.within(seconds)
        return str(fields_of(done.payload).get("answer", ""))

    def _requests(
        self, subjects: Sequence[str], tenant: str, kind: str, fields: dict[str, Any]
    ) -> list[Request]:
        self._release.require(kind)
        now = self._clock.now()
        ids = [self._ids.request(now) for _ in subjects]
        return [
            Request(id, TaskId(subject), tenant, kind, fields, now)
            for id, subject in zip(ids, subjects, strict=True)
        ]

    @contextmanager
    def expected(
        self, requests: Sequence[Request], times: int = 1
    ) -> Iterator[Callable[[], Awaitable[bool]]]:
        """Yield a function that waits until the leader has carried out the requests, and returns True if the
        leader has. Enter this context before you store the requests. `times` multiplies the time that the
        function waits."""

        async def settle() -> bool:
            for request in requests:
                log.info("asked", what=request.what, task=request.task, tenant=request.tenant)
            until = monotonic() + self._settle_seconds * times
            for expectation in expectations:
                if not await expectation.within(Seconds(max(0.0, until - monotonic()))):
                    return False
            return True

        with contextlib.ExitStack() as stack:
            expectations = [stack.enter_context(self._waiters.expect(request.id)) for request in requests]
            yield settle

    async def _settle(self, requests: Sequence[Request], times: int = 1) -> bool:
        """Store requests in one commit, and return True if the leader has carried them out in time."""
        with self.expected(requests, times) as settle:
            await self._store.request(*requests)
            return await settle()
