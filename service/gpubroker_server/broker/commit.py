"""Commits decisions, then dispatches their orders. Counts the subjects whose decisions the database refuses
in cycle after cycle."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import structlog

from gpubroker_server.broker.dispatch import Dispatcher
from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.leader_term import LeaderTerm
from gpubroker_server.core.domain.orders import Report
from gpubroker_server.core.lifecycle.worker_sets import with_notices
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.store import (
    CommitVerdict,
    LeaderTermOver,
    ReadTicks,
    StoreUnavailable,
    TaskStore,
)

log = structlog.get_logger("gpubroker.broker")

TRIES = 20
"""The number of refusals in a row after which the World must be wrong. Only the leader changes states, so the
database has no other reason for so many refusals."""

LATELY_SECONDS = 10.0
"""The time for which the duration of the last commit is reported."""

COMMITTED = CommitVerdict.COMMITTED
_REJECTED = frozenset({CommitVerdict.REFUSED, CommitVerdict.UNSTORABLE})


class PictureDiverged(Exception):
    """The World in memory does not match the rows of the database. None of the refused decisions was
    written."""

    @staticmethod
    def of(subject: str) -> "PictureDiverged":
        return PictureDiverged(
            f"{TRIES} times in a row the database refused the leader's decisions about {subject}; restart "
            "the service, which reads all rows again"
        )


@dataclass(eq=False)
class Committer:
    """Commits the decisions of one term and dispatches their orders."""

    leader_term: LeaderTerm
    ticks: ReadTicks
    world: World
    store: TaskStore
    dispatcher: Dispatcher
    wake: Callable[[], None]
    """Asks for another cycle."""
    hear: Callable[[Sequence[Report]], None]
    """Receives reports about starts that could not be sent."""
    committed: Callable[[Sequence[Decision]], None]
    """Receives the committed decisions, also if others of the same commit were refused."""

    def __post_init__(self) -> None:
        self._undispatched: list[Decision] = []
        """The decisions that are committed, but whose orders were not sent yet."""
        self._began_at: float | None = None
        """The time when the present commit began; None between commits."""
        self._last = (-inf, 0.0)
        """The time when the last commit ended, and the seconds that it took."""
        self._refused: set[str] = set()
        """The subjects of which the database accepted no decision in this cycle and refused at least one."""
        self._refusals: Mapping[str, int] = {}
        """The number of cycles in a row in which each subject was refused."""

    async def carry_out(self, decisions: Sequence[Decision]) -> Sequence[CommitVerdict]:
        """Commit decisions, then dispatch the orders of those that were committed. When orders are
        dispatched, the World already shows the committed decisions, because the store's listener has applied
        them. Raises StaleTerm and StoreUnavailable."""
        if not decisions:
            return ()
        self.check_leader_term()
        if self.world.worker_sets:
            decisions = [with_notices(self.world, decision) for decision in decisions]
        writing = [decision for decision in decisions if not decision.is_empty()]
        written = await self._commit(writing) if writing else ()
        by_id = {id(decision): verdict for decision, verdict in zip(writing, written, strict=True)}
        verdicts = [by_id.get(id(decision), COMMITTED) for decision in decisions]
        self._note(decisions, verdicts)
        if CommitVerdict.STALE in verdicts:
            self.wake()
        await self.dispatch()
        if CommitVerdict.UNAVAILABLE in verdicts:
            raise StoreUnavailable("the database went away during a commit")
        return verdicts

    async def dispatch(self) -> None:
        """Send the orders of committed decisions. Raises LeaderTermOver, and StoreUnavailable if the orders
        must wait for the next cycle. The executor checks the term again before it sends an order."""
        if self._undispatched:
            self.check_leader_term()
            self.hear(await self.dispatcher.send(self._undispatched))
            self._undispatched = []

    def seconds(self) -> float:
        """Return the seconds that commits take now; 0 if no commit ended within the last LATELY_SECONDS."""
        now = self.ticks()
        if self._began_at is not None:
            return now - self._began_at
        ended_at, seconds = self._last
        return seconds if now - ended_at < LATELY_SECONDS else 0.0

    def check_leader_term(self) -> None:
        """Check that the term still lasts. Raises LeaderTermOver."""
        if self.leader_term.is_over(self.ticks()):
            raise LeaderTermOver(f"term {self.leader_term.term} was not renewed in time; stop leading")

    def begin_cycle(self) -> None:
        self._refused.clear()

    def end_cycle(self) -> None:
        """Count the refusals of this cycle, except those of decisions about reports, which the leader counts.
        Raises PictureDiverged once a subject was refused in TRIES cycles in a row."""
        self._refusals = {subject: self._refusals.get(subject, 0) + 1 for subject in self._refused}
        for subject, cycles in self._refusals.items():
            if cycles == TRIES:
                raise PictureDiverged.of(subject)

    async def _commit(self, decisions: Sequence[Decision]) -> Sequence[CommitVerdict]:
        self._began_at = began_at = self.ticks()
        try:
            written = self.store.commit(self.leader_term.term, decisions)
            verdicts, _ = await asyncio.gather(written, self.dispatcher.look_up(decisions))
        finally:
            now, self._began_at = self.ticks(), None
            self._last = now, now - began_at
        return verdicts

    def _note(self, decisions: Sequence[Decision], verdicts: Sequence[CommitVerdict]) -> None:
        committed = [d for d, v in zip(decisions, verdicts, strict=True) if v is COMMITTED]
        self._undispatched += committed
        self.committed(committed)
        accepted = {decision.subject for decision in committed}
        for decision, verdict in zip(decisions, verdicts, strict=True):
            if decision.subject not in accepted and verdict is not CommitVerdict.UNAVAILABLE:
                self._refused.add(decision.subject)
            if verdict in _REJECTED:
                log.error(
                    "the database refused a decision",
                    subject=decision.subject, why=decision.why, fault=verdict.value,
                )  # fmt: skip


def rejected(decisions: Sequence[Decision], verdicts: Sequence[CommitVerdict]) -> list[Decision]:
    """Return the decisions that the database would refuse again."""
    return [d for d, verdict in zip(decisions, verdicts, strict=True) if verdict in _REJECTED]
