"""Leader election: a candidate waits for a term, leads while its lease is valid, stands back, and waits
again.

The leader's row says which process leads and until when, by the database's clock (`core.domain.leader_term`).
Even with wrong clocks two leaders cannot both act: every commit locks that row and checks the term, and node
agents refuse orders of every term but the newest they know.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import structlog

from gpubroker_server.broker.loop import Leader
from gpubroker_server.core.domain.leader_term import (
    LeaderRow,
    LeaderTerm,
    LeaderTermRules,
    ObservedLeader,
)
from gpubroker_server.core.domain.units import MonotonicSeconds, Seconds, Term
from gpubroker_server.ports.executor import Executor
from gpubroker_server.ports.store import (
    LeaderTermOver,
    LostCommits,
    ReadTicks,
    StaleTerm,
    StoreUnavailable,
    TaskStore,
)

log = structlog.get_logger("gpubroker.leadership")

POLL_SECONDS = (0.05, 0.2)
"""The shortest and the longest pause of a candidate between two reads of the leader's row. A pause is
random, and ends early when a leader resigns."""

RETRY_SECONDS = 0.1
"""The time from the beginning of a failed renewal to the next try. A renewal has one or two seconds to
succeed before the lease ends."""

RESIGN_SECONDS = 1.0
"""The time limit for resigning. Without it the lease ends by itself, only later."""

FLUSH_SECONDS = 0.25
"""The time that agents get for the last orders of a leader that stops. The next leader sends the rest
again."""


@dataclass(eq=False, kw_only=True)
class LeaderCandidate:
    """Leads whenever no other process does, from `run` until it is cancelled."""

    name: str
    """A name unique to this process."""
    store: TaskStore
    executor: Executor
    rules: LeaderTermRules
    ticks: ReadTicks
    chance: Callable[[], float]
    """Returns random numbers from 0 to 1."""
    new_leader: Callable[[LeaderTerm], Leader]
    catch_up: Callable[[], Awaitable[None]]
    """Returns when the World shows all that was committed when it was called."""
    resigned: asyncio.Event
    """Set when a leader has resigned. The candidate clears it."""

    def __post_init__(self) -> None:
        self.leader: Leader | None = None
        """The leader, while this process leads."""
        self.row: LeaderRow | None = None
        """The leader's row, as last read. It is not read while this process leads."""
        self._has_lost_commits = False
        """True if the database has lost commits, so that the next term must begin a new lineage."""
        self._end_early: Callable[[str], None] | None = None
        """Ends the present term, for the given reason."""

    @property
    def term(self) -> Term | None:
        """The term that this process leads; None while it does not lead."""
        return None if self.leader is None else self.leader.leader_term.term

    def seconds_left(self) -> Seconds:
        """Return the seconds that this process may lead without another renewal; 0 while it does not lead."""
        return Seconds(0.0) if self.leader is None else self.leader.leader_term.seconds_left(self.ticks())

    def end_term(self, why: str, *, has_lost_commits: bool) -> None:
        """End the present term early, because the World was read again and the leader decided by the earlier
        one. `has_lost_commits` is True if the database is known to have lost commits."""
        self._has_lost_commits = has_lost_commits
        if self._end_early is not None and (self.leader is not None or has_lost_commits):
            self._end_early(why)

    async def run(self) -> None:
        """Lead whenever this process wins a term, until cancelled. Raises PictureDiverged, and any exception
        that a listener raised."""
        await self.executor.connect()
        while True:
            leader_term = await self._win()
            over = self._stand_back
            try:
                await self._lead(leader_term)
            except asyncio.CancelledError:
                over = self._hand_over
                raise
            finally:
                self.leader = None
                await over(leader_term)

    async def wind_up(self) -> None:
        """Stop planning and settle what is under way, as `Leader.wind_up` describes. Call this before `run`
        is cancelled; the cancellation then gives up the term."""
        if self.leader is not None:
            await self.leader.wind_up()

    async def _win(self) -> LeaderTerm:
        """Wait until no other process has a valid term, and return a new term of this process."""
        watched: ObservedLeader | None = None
        named = ""
        while True:
            self.resigned.clear()
            try:
                self.row = await self.store.leader()
                now = self.ticks()
                watched = ObservedLeader(self.row, now) if watched is None else watched.next(self.row, now)
                if watched.may_take(now, self.rules) and (leader_term := await self._take(self.row)):
                    return leader_term
                if not self.row.is_past and self.row.holder != named:
                    named = self.row.holder
                    log.info("standing by", leader=named, term=self.row.term)
            except StoreUnavailable as fault:  # the follower of this process reports it to the operator
                log.debug("the leader's row cannot be reached; trying again", fault=str(fault))
            soonest, latest = POLL_SECONDS
            with suppress(TimeoutError):
                async with asyncio.timeout(soonest + (latest - soonest) * self.chance()):
                    await self.resigned.wait()

    async def _take(self, seen: LeaderRow) -> LeaderTerm | None:
        asked_at = self.ticks()
        lost = self._has_lost_commits
        term = await self.store.take_term(
            self.name, self.rules.ttl_seconds, instead_of=seen, has_lost_commits=lost
        )
        if term is None:
            return None
        self._has_lost_commits = False
        return LeaderTerm(term, self.rules.trusted_until(asked_at))

    async def _lead(self, leader_term: LeaderTerm) -> None:
        """Lead until the term is over. This uses no TaskGroup: while a group ends because one of its tasks
        has failed, it ignores its own cancellation, and the process would not stop."""
        early: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def end_early(cause: str) -> None:
            leader_term.end()
            if not early.done():
                early.set_exception(StaleTerm(f"term {leader_term.term} is over: {cause}"))

        self._end_early = end_early
        works = (self._keep(leader_term), self._decide(leader_term))
        parts = [early, *(asyncio.create_task(work) for work in works)]
        try:
            ended, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._end_early = None
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)
        faults = [fault for part in parts if (fault := _fault(part, asked_to_end=part not in ended))]
        try:
            raise BaseExceptionGroup("a term is over", faults)
        except* StaleTerm as over:
            self._has_lost_commits |= over.subgroup(LostCommits) is not None
            log.warning("standing back", term=leader_term.term, why=_text(over))

    async def _decide(self, leader_term: LeaderTerm) -> None:
        await self._catch_up_fully()
        self.leader = self.new_leader(leader_term)
        await self.leader.run()

    async def _catch_up_fully(self) -> None:
        """Wait until the World shows everything that the last leader committed before this term was taken."""
        while True:
            try:
                return await self.catch_up()
            except StoreUnavailable as fault:
                log.warning("the log cannot be reached; trying again", fault=str(fault))
                await asyncio.sleep(RETRY_SECONDS)

    async def _keep(self, leader_term: LeaderTerm) -> None:
        """Renew the term again and again. Raises StaleTerm, and LeaderTermOver if no renewal succeeded in
        time."""
        next_at = self.rules.renew_at(leader_term.until)
        while True:
            await asyncio.sleep(max(0.0, min(next_at, leader_term.until) - self.ticks()))
            asked_at = self.ticks()
            if leader_term.is_over(asked_at):
                raise LeaderTermOver(f"term {leader_term.term} was not renewed in time; stop leading")
            next_at = MonotonicSeconds(asked_at + RETRY_SECONDS)
            try:
                async with asyncio.timeout(leader_term.seconds_left(asked_at)):
                    await self.store.renew(leader_term.term, self.rules.ttl_seconds)
            except StoreUnavailable as fault:
                log.warning("the term was not renewed; trying again", term=leader_term.term, fault=str(fault))
            except TimeoutError:
                continue
            else:
                leader_term.extend(self.rules.trusted_until(asked_at))
                next_at = self.rules.renew_at(leader_term.until)

    async def _hand_over(self, leader_term: LeaderTerm) -> None:
        """Resign, then send the last orders. Resigning comes first, because another candidate may wait.
        Nothing is committed from here on, and agents refuse orders of this term once they know the next
        one."""
        await self._resign(leader_term)
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_SECONDS):
                await self.executor.flush()
        await self.executor.stand_back()

    async def _stand_back(self, leader_term: LeaderTerm) -> None:
        """Stop sending, because another process may already have the next term, and resign."""
        await self.executor.stand_back()
        await self._resign(leader_term)

    async def _resign(self, leader_term: LeaderTerm) -> None:
        """Give up the term, so that other candidates need not wait until the lease ends."""
        with suppress(StoreUnavailable, TimeoutError):
            async with asyncio.timeout(RESIGN_SECONDS):
                await self.store.resign(leader_term.term)


def _fault(part: asyncio.Future[None], *, asked_to_end: bool) -> BaseException | None:
    """Return the exception with which the part of the leader ended; None if it ended as asked."""
    fault = None if part.cancelled() else part.exception()
    if fault is None and not asked_to_end:
        return RuntimeError("a part of the leader ended although it was not asked to")
    return fault


def _text(over: BaseExceptionGroup[BaseException]) -> str:
    """Return the text of the first exception in the group."""
    first = over.exceptions[0]
    return _text(first) if isinstance(first, BaseExceptionGroup) else str(first)
