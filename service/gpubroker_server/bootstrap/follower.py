"""The World of a process. It follows the event log, and knows how old it is."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from math import inf
from random import uniform
from typing import Any

import structlog

from gpubroker_server.adapters.clock import DatabaseClock, boot_seconds
from gpubroker_server.adapters.sql.store import SqlStore
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.progress import Progress
from gpubroker_server.core.domain.units import Seconds, TaskId
from gpubroker_server.core.world.events import Event
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.store import (
    EventListener,
    LineageChanged,
    LogOutgrown,
    LogShortened,
    Outgrown,
    ReadTicks,
    Snapshot,
    StoreUnavailable,
)

log = structlog.get_logger("gpubroker")

POLL_SECONDS = (0.05, 0.25)
"""The shortest and the longest time between two polls. The time is random, so that processes do not poll
together. Processes poll even with hints, because a hint may get lost."""

ALONE_POLL_SECONDS = 1.0
"""The time between two polls if no other process writes. Such polls only prove that the World is current."""

FAR_SECONDS = 0.25
"""The longest supported round trip to the database. Connecting takes up to seven round trips and must
succeed within 2 s. A commit takes two, and blocks other commits for one of them."""

Job = tuple[str, Coroutine[Any, Any, None]]
"""(the name for the log, the work that a part of a process does until cancelled)"""


class LogFollower:
    """Follows the event log for all roles of a process. Listeners receive each event after the World."""

    def __init__(
        self,
        store: SqlStore,
        half_life_seconds: Seconds,
        fail: Callable[[str, BaseException], None],
        ticks: ReadTicks = boot_seconds,
    ) -> None:
        """`fail` ends the process: a World that has lost part of the log is useless."""
        self.world = World(half_life_seconds)
        self.clock = DatabaseClock(store, ticks=ticks)
        self._ticks = ticks
        self.progress: dict[TaskId, Progress] = {}
        """The last progress that each run reported."""
        self.on_reread: list[Callable[[LogShortened | LineageChanged], None]] = []
        """The functions that are called with the reason when the World was read again. Listeners have then
        missed events."""
        self._rereading = asyncio.Lock()
        self._rereads = 0
        self._store = store
        self._fail = fail
        self._listeners: list[EventListener] = []
        self._verified_at = self._ticks()
        self._away_since: float | None = None
        """The time since when the database cannot be reached; None while it can."""
        self._hinted = asyncio.Event()
        self.is_outgrown = asyncio.Event()
        """Set once the log has events that this software cannot read. The World then does not change any
        more."""
        self._why_outgrown = ""

    def listen(self, listener: EventListener) -> None:
        self._listeners.append(listener)

    def age_seconds(self) -> float:
        """Return the seconds since the World was last known to be at the head of the log."""
        return inf if self._why_outgrown else self._ticks() - self._verified_at

    def why_stale(self) -> str:
        """Return a message if the World will stay stale, which says why and what to do; empty otherwise."""
        return self._why_outgrown

    @property
    def is_clock_contradicted(self) -> bool:
        return self.clock.is_contradicted

    async def begin(self) -> None:
        """Read the World. Raises StoreUnavailable."""
        await self.clock.read()
        self._warn_if_far()
        fill(self.world, await self._store.snapshot())
        self._store.listen(self._on_events)

    def jobs(self) -> list[Job]:
        jobs = [("clock", self.clock.keep()), ("follower", self._follow())]
        if self._store.gives_hints:
            jobs.append(("hints", self._store.keep_hints(self._hinted.set)))
        return jobs

    def _warn_if_far(self) -> None:
        seconds = self.clock.round_trip_seconds
        if seconds > FAR_SECONDS:
            log.warning(
                f"a round trip to the database takes {seconds:.2f} s; up to {FAR_SECONDS:g} s is supported; "
                "run this process nearer to it"
            )

    def _on_events(self, events: Sequence[Event]) -> None:
        """Apply events to the World and pass them to the listeners. An exception ends the process and is
        raised again, so that the store refuses all further writes."""
        try:
            self.world.apply(events)
            for listener in self._listeners:
                listener(events)
        except Exception as fault:
            self._fail("follower", fault)
            raise

    async def _follow(self) -> None:
        """Apply the events that other processes write, until cancelled. While the database cannot be
        reached, the World gets older."""
        while True:
            self._hinted.clear()
            began = self._ticks()
            try:
                more = await self._catch_up()
            except LogOutgrown as fault:
                self._stop_following(fault)
                await asyncio.Event().wait()  # waits until this task is cancelled
            except Outgrown:
                raise
            except StoreUnavailable as fault:
                self._note_away(fault)
                await self._pause()
                continue
            self._note_back()
            if not more:
                self._verified_at = began
                await self._pause()

    def _note_away(self, fault: StoreUnavailable) -> None:
        if self._away_since is None:
            self._away_since = self._ticks()
            log.warning("the database cannot be reached; trying again", fault=str(fault))

    def _note_back(self) -> None:
        if self._away_since is not None:
            seconds, self._away_since = self._ticks() - self._away_since, None
            log.info("the database answers again", seconds=round(seconds, 1))

    def _stop_following(self, fault: LogOutgrown) -> None:
        log.error("this process does not follow the log any more", fault=str(fault))
        self._why_outgrown = str(fault)
        self.is_outgrown.set()

    async def catch_up(self) -> None:
        """Wait until the World shows everything that was committed before this call. Raises
        StoreUnavailable."""
        while await self._catch_up():
            pass

    async def _catch_up(self) -> bool:
        before = self._rereads
        try:
            return await self._store.catch_up()
        except (LogShortened, LineageChanged) as fault:
            async with self._rereading:
                if self._rereads == before:
                    await self._reread(fault)
            return True

    async def _reread(self, fault: LogShortened | LineageChanged) -> None:
        """Read all rows again. No event is delivered between the fault and `go_on_at`."""
        log.warning("reading all rows again", fault=str(fault))
        snapshot = await self._store.snapshot()
        refill(self.world, snapshot)
        self.progress.clear()
        self._rereads += 1
        for callback in self.on_reread:
            callback(fault)
        await self._store.go_on_at(snapshot.position, snapshot.lineage)

    async def _pause(self) -> None:
        jittered = uniform(*POLL_SECONDS)  # noqa: S311  # it hides nothing
        seconds = jittered if self._store.is_shared else ALONE_POLL_SECONDS
        try:
            async with asyncio.timeout(seconds):
                await self._hinted.wait()
        except TimeoutError:
            pass


def publish_seconds(policy: Policy) -> Seconds:
    """Return the time between two publications of last values. It is short, so that samples do not get too
    old."""
    return Seconds(min(1.0, policy.sample_period_seconds / 2))


def refill(world: World, snapshot: Snapshot) -> None:
    """Replace the contents of a World that has missed events. Samples are dropped and measured again; the
    version of the inventory changes."""
    fresh = World(world.accounts.half_life_seconds)
    fill(fresh, snapshot)
    fresh.inventory_version += world.inventory_version
    vars(world).update(vars(fresh))


def fill(world: World, snapshot: Snapshot) -> None:
    """Fill an empty World from a snapshot."""
    for node in snapshot.nodes:
        world.add_node(node)
    for device in snapshot.devices:
        world.add_device(device)
    world.worker_sets.restore(snapshot.worker_sets)  # these precede tasks that may run after one
    for task in snapshot.tasks:
        world.add_task(task)
    for lease in snapshot.leases:
        world.add_lease(lease)
    for usage in snapshot.usage:
        world.accounts.restore(usage)
    for pledge in snapshot.pledges:
        world.add_pledge(pledge)
    for request in snapshot.requests:
        world.add_request(request)
    for pause in snapshot.pauses:
        world.queue.set_pause(pause.queue, pause, world.tasks)
    world.streams.update((stream.name, stream) for stream in snapshot.streams)
    world.finished.update(snapshot.finished)
    for topic, sketch in snapshot.estimates:
        world.learned.put(topic, sketch)
    world.position = snapshot.position
    world.lineage = snapshot.lineage
    world.as_of = snapshot.at
