"""The leader's row. A term is taken, renewed and resigned in a small transaction of its own."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Column, Double, FromClause, literal_column, select, update

from gpubroker_server.adapters.sql.session import (
    Collided,
    CommitUnknown,
    ConnectionLost,
    Session,
    over,
    run_on,
)
from gpubroker_server.adapters.sql.statements import INSERT_AUDIT, ONE, columns_of
from gpubroker_server.adapters.sql.system_tables import is_another_server, leadership, now
from gpubroker_server.core.domain.leader_term import LeaderRow, next_lineage
from gpubroker_server.core.domain.units import Instant, Lineage, Seconds, Term
from gpubroker_server.ports.store import StoreUnavailable

T = TypeVar("T")
Act = Callable[[Session], Callable[[], T]]
"""Runs idempotent statements within a transaction, and returns a function that is called after the commit to
get the answer. Answers that are read only then cost one round trip together with the commit."""

_TRIES = 2
_TTL = Column("ttl_seconds", Double)


@over(leadership.c.id)
def leader_row(_insert: Any, r: FromClause) -> Any:
    row = leadership.c
    columns = (row.term, row.holder, row.lease_until, row.lineage, row.server, now().label("now"))
    return select(*columns).select_from(r.join(leadership, leadership.c.id == r.c.id))


@over(leadership.c.id)
def _lock_leader(_insert: Any, r: FromClause) -> Any:
    """Lock the row. The lock waits for the commits of the term, because each of them holds a shared lock on
    the row. A renewal does not wait for these."""
    locked = select(leadership.c.term).select_from(r.join(leadership, leadership.c.id == r.c.id))
    return locked.with_for_update(of=leadership)


@over(
    *columns_of(leadership, ("id", "holder", "term", "lineage", "server")), Column("seen_until", Double), _TTL
)
def _take_term(_insert: Any, r: FromClause) -> Any:
    """Take the next term if the row is still the one that was seen."""
    row = leadership.c
    same = (row.id == r.c.id, row.term == r.c.term, row.lease_until == r.c.seen_until)
    change = update(leadership).values(
        term=row.term + ONE,
        holder=r.c.holder,
        taken_at=now(),
        lease_until=now() + r.c.ttl_seconds,
        lineage=r.c.lineage,
        server=r.c.server,
    )
    return change.where(*same).returning(row.term, row.taken_at)


@over(leadership.c.term, _TTL)
def _renew_term(_insert: Any, r: FromClause) -> Any:
    change = update(leadership).values(lease_until=now() + r.c.ttl_seconds)
    return change.where(leadership.c.term == r.c.term).returning(leadership.c.term)


@over(leadership.c.term)
def _resign_term(_insert: Any, r: FromClause) -> Any:
    change = update(leadership).values(lease_until=literal_column("0", Double))
    return change.where(leadership.c.term == r.c.term).returning(leadership.c.term)


def read_leader(session: Session) -> Callable[[], LeaderRow]:
    fetch_row = session.fetch_later(leader_row, [(1,)])

    def answer() -> LeaderRow:
        [(term, holder, until, lineage, server, at)] = fetch_row()
        return LeaderRow(Term(term), holder, Instant(until), Instant(at), Lineage(lineage), server)

    return answer


def take_term(
    holder: str, ttl_seconds: Seconds, seen: LeaderRow, *, has_lost_commits: bool = False
) -> Act[Term | None]:
    """Return the Act that takes the term after the one in `seen`. The Act answers None if another process was
    faster. The first term on another server, or after commits were lost, begins a lineage."""

    def act(session: Session) -> Callable[[], Term | None]:
        # A process that stopped in the middle of a commit may hold its share of the row for ever.
        session.end_stuck_sessions()
        session.fetch_later(_lock_leader, [(1,)])
        is_new = has_lost_commits or is_another_server(seen.server, session.server)
        lineage = next_lineage(seen.lineage, seen.at) if is_new else seen.lineage
        server = session.server or seen.server
        row = (1, holder, seen.term, lineage, server, seen.lease_until, ttl_seconds)
        for taken, at in session.fetch(_take_term, [row]):
            session.write(INSERT_AUDIT, [(at, "", holder, "term.taken", str(taken), "")])
            if is_new:
                why = "commits were lost" if has_lost_commits else f"{seen.server} was the server before"
                session.write(INSERT_AUDIT, [(at, "", holder, "lineage.begun", str(lineage), why)])
            return lambda: Term(taken)
        read_row = read_leader(session)

        def answer() -> Term | None:
            # If the answer to an earlier commit of this call was lost, this process has the term: a holder is
            # one process, which asks for one term at a time.
            row = read_row()
            return row.term if (row.holder, row.term) == (holder, seen.term + 1) else None

        return answer

    return act


def renew_term(term: Term, ttl_seconds: Seconds) -> Act[bool]:
    """Return the Act that renews the term. The Act answers True if the term is still the newest."""

    def act(session: Session) -> Callable[[], bool]:
        # A process that stopped while it took a term may hold this row.
        session.end_stuck_sessions()
        renewed = session.fetch_later(_renew_term, [(term, ttl_seconds)])
        return lambda: bool(renewed())

    return act


def resign_term(term: Term) -> Act[None]:
    def act(session: Session) -> Callable[[], None]:
        if session.fetch(_resign_term, [(term,)]):
            session.notify_resigned()
        return lambda: None

    return act


class TermConnection:
    """One connection and one thread for the leader's row, so that a renewal does not queue behind group
    commits.

    The connection is opened when it is first needed: most processes never lead.
    """

    def __init__(self, connect: Callable[[], Session]) -> None:
        self._connect = connect
        self._session: Session | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gpubroker-term")

    async def run(self, act: Act[T]) -> T:
        """Run `act` in a transaction. Raises StoreUnavailable, and what `act` raises; in both cases nothing
        was written."""
        return await run_on(self._thread, partial(self._transact, act))

    def close(self) -> None:
        # If the connection were dropped first, an act that is already queued would connect again.
        self._thread.shutdown()
        self._drop()

    def _transact(self, act: Act[T]) -> T:
        fault: Exception | None = None
        for _ in range(_TRIES):
            try:
                session = self._session = self._session or self._connect()
                session.begin()
                answer = act(session)
                session.commit()
                return answer()
            except (ConnectionLost, CommitUnknown) as lost:
                # An act is idempotent, so it may be repeated even if its commit succeeded.
                fault = lost
                self._drop()
            except Collided as collided:
                fault = collided
                self._roll_back()
            except Exception:
                self._roll_back()
                raise
        raise StoreUnavailable(f"the leader's row cannot be reached: {fault}") from fault

    def _roll_back(self) -> None:
        if self._session is not None:
            self._session.rollback()

    def _drop(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()
