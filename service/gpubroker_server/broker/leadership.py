"""Who leads: a candidate waits for the term, leads while it can count on it, stands back, and waits again.

At most one process leads. The leader's row says who, until when, by the database's clock (`core.tenure`).
Nothing here is what keeps two leaders apart when clocks lie: every commit locks that row and checks the term,
and node agents refuse the orders of every term but the newest they have heard of.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import structlog

from gpubroker_server.broker.loop import Leader
from gpubroker_server.core.domain.leader_term import (
    LeaderRow,
    LeadershipStatus,
    ObservedLeader,
    Tenure,
    TenureRules,
)
from gpubroker_server.core.domain.units import Term, Ticks
from gpubroker_server.ports.store import (
    Executor,
    ReadTicks,
    StaleTerm,
    StoreUnavailable,
    TaskStore,
    TenureOver,
)

log = structlog.get_logger("gpubroker.leadership")

LOOK_SECONDS = (0.05, 0.2)
"""A candidate looks at the row at random moments so far apart, so that not all of them look at once; and when
it hears that a leader has let its term go."""

RETRY_SECONDS = 0.1
"""A renewal that failed is tried again so soon after it was asked for: it has a second or two to succeed."""

RESIGN_SECONDS = 1.0
"""To let the term go is a courtesy; its lease ends by itself."""

FLUSH_SECONDS = 0.25
"""So long agents may take over the last orders of a leader that was asked to stop. What they have not taken
by then, or when they hear of the next term, that one sends again."""


class Candidate:
    """Leads whenever no other process does, from `run` until it is cancelled."""

    def __init__(
        self,
        *,
        name: str,
        store: TaskStore,
        executor: Executor,
        rules: TenureRules,
        ticks: ReadTicks,
        chance: Callable[[], float],
        new_leader: Callable[[Tenure], Leader],
        catch_up: Callable[[], Awaitable[None]],
        resigned: asyncio.Event,
    ) -> None:
        """`name` is this process's alone. `chance` is drawn from 0 to 1. `catch_up` is back when the picture
        that leaders are made with shows everything that was committed when it was called. `resigned` is set
        when a leader is heard to have let its term go, which nobody may rely on; cleared here."""
        self._name = name
        self._store = store
        self._executor = executor
        self._rules = rules
        self._ticks = ticks
        self._chance = chance
        self._new_leader = new_leader
        self._catch_up = catch_up
        self._resigned = resigned
        self.leader: Leader | None = None
        """The one of this process, while it leads."""
        self.row: LeaderRow | None = None
        """Who leads, as this process has last read it; not kept up to date while it leads itself."""
        self._takeovers = 0

    @property
    def term(self) -> Term | None:
        """None while another process leads, or none does."""
        return None if self.leader is None else self.leader.tenure.term

    def standing(self) -> LeadershipStatus:
        if self.leader is None:
            return LeadershipStatus(takeovers=self._takeovers)
        tenure = self.leader.tenure
        return LeadershipStatus(tenure.term, tenure.seconds_left(self._ticks()), self._takeovers)

    async def run(self) -> None:
        """Raises what makes a leader's picture useless: PictureDiverged, and what a listener raised."""
        await self._executor.connect()
        while True:
            tenure = await self._win()
            over = self._stand_back
            try:
                await self._lead(tenure)
            except asyncio.CancelledError:
                over = self._hand_over
                raise
            finally:
                self.leader = None
                await over(tenure)

    async def wind_up(self) -> None:
        """Before `run` is cancelled, which lets the term go: see `Leader.wind_up`."""
        if self.leader is not None:
            await self.leader.wind_up()

    async def _win(self) -> Tenure:
        """Back with a term of our own, as soon as nobody else has one."""
        watched: ObservedLeader | None = None
        is_away = False
        while True:
            self._resigned.clear()
            try:
                self.row = await self._store.leader()
                now = self._ticks()
                watched = ObservedLeader(self.row, now) if watched is None else watched.next(self.row, now)
                if watched.may_take(now, self._rules) and (tenure := await self._take(self.row)):
                    return tenure
                is_away = False
            except StoreUnavailable as fault:
                if not is_away:
                    log.warning("the leader's row is not reached; trying again", fault=str(fault))
                is_away = True
            soonest, latest = LOOK_SECONDS
            with suppress(TimeoutError):
                async with asyncio.timeout(soonest + (latest - soonest) * self._chance()):
                    await self._resigned.wait()

    async def _take(self, seen: LeaderRow) -> Tenure | None:
        asked_at = self._ticks()
        term = await self._store.take_term(self._name, self._rules.ttl_seconds, instead_of=seen)
        return None if term is None else Tenure(term, self._rules.trusted_until(asked_at))

    async def _lead(self, tenure: Tenure) -> None:
        """Until the term is over. No TaskGroup: while one is ending because of one of its own, it takes no
        notice of who cancels it, and whoever was asked to stop would go on."""
        self._takeovers += 1
        parts = [asyncio.create_task(part) for part in (self._keep(tenure), self._decide(tenure))]
        try:
            ended, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)
        faults = [fault for part in parts if (fault := _fault(part, asked_to_end=part not in ended))]
        try:
            raise BaseExceptionGroup("a term is over", faults)
        except* StaleTerm as over:
            log.warning("standing back", term=tenure.term, why=_text(over))

    async def _decide(self, tenure: Tenure) -> None:
        await self._see_all()
        self.leader = self._new_leader(tenure)
        await self.leader.run()

    async def _see_all(self) -> None:
        """Whoever led before may have committed until the term was taken; that must be in the picture."""
        while True:
            try:
                return await self._catch_up()
            except StoreUnavailable as fault:
                log.warning("the log is not reached; trying again", fault=str(fault))
                await asyncio.sleep(RETRY_SECONDS)

    async def _keep(self, tenure: Tenure) -> None:
        """Renew, again and again. Raises StaleTerm, and TenureOver when that did not succeed in time."""
        next_at = self._rules.renew_at(tenure.until)
        while True:
            await asyncio.sleep(max(0.0, min(next_at, tenure.until) - self._ticks()))
            asked_at = self._ticks()
            if tenure.is_over(asked_at):
                raise TenureOver(f"term {tenure.term} was not renewed in time; stop leading")
            next_at = Ticks(asked_at + RETRY_SECONDS)
            try:
                async with asyncio.timeout(tenure.seconds_left(asked_at)):
                    await self._store.renew(tenure.term, self._rules.ttl_seconds)
            except StoreUnavailable as fault:
                log.warning("the term is not renewed; trying again", term=tenure.term, fault=str(fault))
            except TimeoutError:
                continue
            else:
                tenure.extend(self._rules.trusted_until(asked_at))
                next_at = self._rules.renew_at(tenure.until)

    async def _hand_over(self, tenure: Tenure) -> None:
        """The term first, for which somebody may wait: no agent takes orders of this one any more once it has
        heard of the next. Nothing is committed from here on."""
        await self._resign(tenure)
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_SECONDS):
                await self._executor.flush()
        await self._executor.stand_back()

    async def _stand_back(self, tenure: Tenure) -> None:
        """Nothing more leaves, of a term that may be somebody else's by now."""
        await self._executor.stand_back()
        await self._resign(tenure)

    async def _resign(self, tenure: Tenure) -> None:
        """Whoever waits need not wait for the lease to end."""
        with suppress(StoreUnavailable, TimeoutError):
            async with asyncio.timeout(RESIGN_SECONDS):
                await self._store.resign(tenure.term)


def _fault(part: asyncio.Task[None], *, asked_to_end: bool) -> BaseException | None:
    """Why it ended; None only for one that was asked to."""
    fault = None if part.cancelled() else part.exception()
    if fault is None and not asked_to_end:
        return RuntimeError("a part of the leader ended, though nobody had asked it to")
    return fault


def _text(over: BaseExceptionGroup[BaseException]) -> str:
    """Of the first one, however deep it is."""
    first = over.exceptions[0]
    return _text(first) if isinstance(first, BaseExceptionGroup) else str(first)
