"""What one process knows of the cluster: a World that follows the log, and how old it may be."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from math import inf
from random import uniform
from typing import Any

import structlog

from gpubroker_server.adapters.clock import DatabaseClock, boot_seconds
from gpubroker_server.adapters.sql.store import SqlStore
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import Seconds, TaskId
from gpubroker_server.core.world.events import Event
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.store import (
    EventListener,
    LogOutgrown,
    LogShortened,
    Outgrown,
    Progress,
    ReadTicks,
    Snapshot,
    StoreUnavailable,
)

log = structlog.get_logger("gpubroker")

POLL_SECONDS = (0.05, 0.25)
"""Somewhere between them, so that processes which began together do not ask together. Always on: a hint that
others have written is only a hint."""

ALONE_POLL_SECONDS = 1.0
"""Where nobody else writes, asking only proves that the picture is current."""

FAR_SECONDS = 0.25
"""Of a round trip to the database. A connection takes up to seven, and there are 2 s for it; each commit
takes two, and holds up all others for one."""

Job = tuple[str, Coroutine[Any, Any, None]]
"""What a part of a process does until it is cancelled, by the name under which its end is told."""


class Picture:
    """One for all roles of a process. Whoever decides or answers by the World hears each event after it."""

    def __init__(
        self,
        store: SqlStore,
        half_life_seconds: Seconds,
        fail: Callable[[str, BaseException], None],
        ticks: ReadTicks = boot_seconds,
    ) -> None:
        """`fail` ends the process: nobody may go on with a picture that has lost a part of the log."""
        self.world = World(half_life_seconds)
        self.clock = DatabaseClock(store, ticks=ticks)
        self._ticks = ticks
        self.progress: dict[TaskId, Progress] = {}
        """The last word of each run about itself."""
        self.on_anew: Callable[[], None] | None = None
        """Called when the World was read anew and some events were heard by nobody. Without it, that ends
        the process."""
        self._store = store
        self._fail = fail
        self._listeners: list[EventListener] = []
        self._verified_at = self._ticks()
        self._hinted = asyncio.Event()
        self.is_outgrown = asyncio.Event()
        """It stands still: the log goes on with what this software cannot read."""
        self._why_outgrown = ""

    def listen(self, listener: EventListener) -> None:
        self._listeners.append(listener)

    def age_seconds(self) -> float:
        """Since the World was last known to stand at the head of the log."""
        return inf if self._why_outgrown else self._ticks() - self._verified_at

    def why_stale(self) -> str:
        """What to do about its age, where time will not help."""
        return self._why_outgrown

    async def begin(self) -> None:
        """Read it from the database. Raises StoreUnavailable."""
        await self.clock.read()
        self._warn_if_far()
        fill(self.world, await self._store.snapshot())
        self._store.listen(self._on_events)

    def jobs(self) -> list[Job]:
        jobs = [("clock", self.clock.keep()), ("picture", self._follow())]
        if self._store.gives_hints:
            jobs.append(("hints", self._store.keep_hints(self._hinted.set)))
        return jobs

    def _warn_if_far(self) -> None:
        seconds = self.clock.round_trip_seconds
        if seconds > FAR_SECONDS:
            log.warning(
                f"the database is too far away: a round trip takes {seconds:.2f} s, and at most "
                f"{FAR_SECONDS:g} s are supported; run this process nearer to it"
            )

    def _on_events(self, events: Sequence[Event]) -> None:
        """Raises what went wrong, so that the store hears of it as well and lets nobody write any more."""
        try:
            self.world.apply(events)
            for listener in self._listeners:
                listener(events)
        except Exception as fault:
            self._fail("picture", fault)
            raise

    async def _follow(self) -> None:
        """Hear what others write, and know how current the picture is. While the database is away it grows
        old, and says so."""
        while True:
            self._hinted.clear()
            began = self._ticks()
            try:
                more = await self._catch_up()
            except LogOutgrown as fault:
                self._stand_still(fault)
                await asyncio.Event().wait()  # for ever
            except Outgrown:
                raise
            except StoreUnavailable:
                await self._pause()
                continue
            if not more:
                self._verified_at = began
                await self._pause()

    def _stand_still(self, fault: LogOutgrown) -> None:
        log.error("the picture stands still from here on", fault=str(fault))
        self._why_outgrown = str(fault)
        self.is_outgrown.set()

    async def catch_up(self) -> None:
        """Back when it shows everything that anybody had committed at this call. Raises StoreUnavailable."""
        while await self._catch_up():
            pass

    async def _catch_up(self) -> bool:
        try:
            return await self._store.catch_up()
        except LogShortened as fault:
            if self.on_anew is None:
                raise
            log.warning("reading the picture anew", fault=str(fault))
            snapshot = await self._store.snapshot()
            fill_anew(self.world, snapshot)
            await self._store.go_on_at(snapshot.position)
            self.on_anew()
            return True

    async def _pause(self) -> None:
        jittered = uniform(*POLL_SECONDS)  # noqa: S311  # it hides nothing
        seconds = jittered if self._store.is_shared else ALONE_POLL_SECONDS
        try:
            async with asyncio.timeout(seconds):
                await self._hinted.wait()
        except TimeoutError:
            pass


def word_seconds(policy: Policy) -> Seconds:
    """How often a leader tells others what is no event, and they listen: samples must not age on the way."""
    return Seconds(min(1.0, policy.sample_period_seconds / 2))


def fill_anew(world: World, snapshot: Snapshot) -> None:
    """Replace the contents of a World that has missed events. Samples will be measured again; the version of
    the inventory changes."""
    fresh = World(world.accounts.half_life_seconds)
    fill(fresh, snapshot)
    fresh.inventory_version += world.inventory_version
    vars(world).update(vars(fresh))


def fill(world: World, snapshot: Snapshot) -> None:
    """Fill an empty World."""
    for node in snapshot.nodes:
        world.add_node(node)
    for device in snapshot.devices:
        world.add_device(device)
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
    world.finished.update(snapshot.finished)
    for topic, sketch in snapshot.estimates:
        world.learned.put(topic, sketch)
    world.position = snapshot.position
    world.as_of = snapshot.at
