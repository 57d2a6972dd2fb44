"""A database with a network in front of it: what is asked arrives late, and so does the answer."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any, Protocol, TypeVar

from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.leader_term import LeaderRow
from gpubroker_server.core.domain.policy import Cutoffs
from gpubroker_server.core.domain.units import Instant, Lineage, Position, Seconds, TaskId, Term
from gpubroker_server.core.world.events import Event
from gpubroker_server.ports.store import (
    CommitVerdict,
    EventListener,
    LogShortened,
    RunSpec,
    Snapshot,
    StaleTerm,
    StoredCheckpoint,
    StoredState,
    StoreUnavailable,
)

from tests.simulation.timeline import Timeline
from tests.simulation.virtual_loop import VirtualLoop
from tests.stores import SteppedStore, at_once

T = TypeVar("T")
Call = Callable[[], Coroutine[Any, Any, Any]]

QUICK_SECONDS = (0.0002, 0.008)
"""From a process to the database, and back."""
LOST_ANSWER_SECONDS = (0.2, 6.0)
"""Until a process has reconnected, and read what became of an unanswered commit."""


class Database(SteppedStore):
    """Its clock may be set, and run too fast or too slow; now and then it cannot be reached."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._set_at, self._set_to, self._rate = timeline.now(), float(timeline.now()), 1.0
        self.latest = Instant(0.0)
        """The latest time that it ever was."""
        self.is_away = False
        self.answers_lost = 0.0
        """So many of a hundred commits are kept, and not answered."""
        self.plain: list[Event] = []
        """The log as it is read from its rows."""
        self.first = Position(1)
        """Of the events that are not pruned; every process asks for it each time it looks at the log."""
        super().__init__(self)
        self.listen(self._on_events)

    async def prune(self, term: Term, cutoffs: Cutoffs) -> bool:
        pruned = await super().prune(term, cutoffs)
        self.first = await self.oldest()
        return pruned

    def now(self) -> Instant:
        now = Instant(self._set_to + (self._timeline.now() - self._set_at) * self._rate)
        self.latest = max(self.latest, now)
        return now

    def set_clock(self, to: float, rate: float = 1.0) -> None:
        """From now on it is that time, and goes on at that rate."""
        self._set_at, self._set_to, self._rate = self._timeline.now(), to, rate

    def _on_events(self, events: Sequence[Event]) -> None:
        self.plain += at_once(self.events(Position(len(self.plain)), len(events)))


class Guard(Protocol):
    """The process that asks."""

    loop: VirtualLoop
    is_dead: bool
    is_cut_off: bool

    async def pass_by(self, where: str) -> None:
        """Something may happen to it here."""
        ...


class Session:
    """The store as one process has it: `ports.store.TaskStore`, as far as a broker uses it, and what
    `SqlStore` has besides. What is written goes there in order, and is answered in order."""

    is_shared = True
    gives_hints = False

    def __init__(self, database: Database, process: Guard, timeline: Timeline, chance: Random) -> None:
        self._database, self._process = database, process
        self._timeline, self._chance = timeline, chance
        self._listeners: list[EventListener] = []
        self._heard = 0
        """At the database: what was read up to there is on its way, if it has not come."""
        self._there = dict.fromkeys(("read", "write", "term"), 0.0)
        self._back = dict.fromkeys(("read", "write", "term"), 0.0)

    def listen(self, listener: EventListener) -> None:
        self._listeners.append(listener)

    async def snapshot(self) -> Snapshot:
        found = await self._ask("snapshot", self._database.snapshot)
        if not self._listeners:
            self._heard = found.position
        return found

    async def catch_up(self) -> bool:
        async def tail() -> bool:
            """All there is comes with the answer."""
            if self._heard + 1 < self._database.first:
                raise LogShortened("it was away for too long")
            return False

        return await self._ask("catch up", tail, "write")

    async def go_on_at(self, position: Position, _lineage: Lineage) -> None:
        self._heard = max(self._heard, position)

    async def leader(self) -> LeaderRow:
        return await self._ask("leader", self._database.leader, "term")

    async def take_term(
        self, holder: str, ttl_seconds: Seconds, *, instead_of: LeaderRow, has_lost_commits: bool = False
    ) -> Term | None:
        lost = {"has_lost_commits": has_lost_commits}
        take = partial(self._database.take_term, holder, ttl_seconds, instead_of=instead_of, **lost)
        return await self._ask("take term", take, "term")

    async def renew(self, term: Term, ttl_seconds: Seconds) -> None:
        await self._ask("renew", partial(self._database.renew, term, ttl_seconds), "term")

    async def resign(self, term: Term) -> None:
        await self._ask("resign", partial(self._database.resign, term), "term")

    async def commit(self, term: Term, decisions: Sequence[Decision]) -> Sequence[CommitVerdict]:
        try:
            written = partial(self._database.commit, term, decisions)
            return await self._ask("commit", written, "write")
        except StoreUnavailable:
            return [CommitVerdict.UNAVAILABLE] * len(decisions)

    async def prune(self, term: Term, cutoffs: Cutoffs) -> bool:
        return await self._ask("prune", partial(self._database.prune, term, cutoffs), "write")

    async def specs(self, tasks: Sequence[TaskId]) -> Mapping[TaskId, RunSpec]:
        return await self._ask("specs", partial(self._database.specs, tasks))

    async def checkpoints(self, task: TaskId) -> Sequence[StoredCheckpoint]:
        found = partial(self._database.checkpoints, task)
        return await self._ask("checkpoints", found)

    async def states(self, tasks: Sequence[TaskId]) -> Mapping[TaskId, StoredState]:
        return await self._ask("states", partial(self._database.states, tasks))

    async def database_time(self) -> Instant:
        return await self._ask("time", self._database.database_time)

    async def _ask(self, what: str, call: Callable[[], Coroutine[Any, Any, T]], line: str = "read") -> T:
        """Once sent it arrives, whatever becomes of its sender."""
        await self._process.pass_by(f"before {what}")
        answer = self._process.loop.create_future()
        at = max(self._there[line], self._timeline.now() + self._chance.uniform(*QUICK_SECONDS))
        self._there[line] = at
        self._timeline.at(at, lambda: self._carry_out(answer, call, line))
        found: T = await answer
        await self._process.pass_by(f"after {what}")
        return found

    def _carry_out(self, answer: Any, call: Call, line: str) -> None:
        database = self._database
        seconds = self._chance.uniform(*QUICK_SECONDS)
        try:
            if database.is_away or self._process.is_cut_off:
                seconds = self._chance.uniform(0.01, 1.0)
                raise StoreUnavailable("not reached")
            found, error = at_once(call()), None
        except (StaleTerm, StoreUnavailable, LogShortened) as fault:
            found, error = None, fault
        if line != "read" and 100.0 * self._chance.random() < database.answers_lost:
            seconds = self._chance.uniform(*LOST_ANSWER_SECONDS)
        at = max(self._back[line], self._timeline.now() + seconds)
        self._back[line] = at
        news = self._news() if line == "write" and error is None else []
        loop = self._process.loop
        self._timeline.at(at, lambda: loop.call_soon(self._tell, answer, found, error, news))

    def _news(self) -> Sequence[Event]:
        """What was appended since the last time, without a gap. Nothing, if some of it has been removed:
        the reader learns that when it catches up."""
        if self._heard + 1 < self._database.first:
            return []
        news = self._database.plain[self._heard :]
        self._heard += len(news)
        return news

    def _tell(self, answer: Any, found: Any, error: Exception | None, news: Sequence[Event]) -> None:
        """First what was appended until then, in order and once, then the answer."""
        if news:
            for listener in self._listeners:
                listener(news)
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(found)
