"""The leader's row: taken, renewed and let go in small transactions of their own."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from service.adapters.sql import statements as sql
from service.adapters.sql.session import Collided, CommitUnknown, ConnectionLost, Session
from service.core.tenure import LeaderRow
from service.core.units import Instant, Seconds, Term
from service.ports import StaleTerm, StoreUnavailable

T = TypeVar("T")
Act = Callable[[Session], T]
"""Within a transaction. Done twice it does no more than once."""

_TRIES = 2


def read_leader(session: Session) -> LeaderRow:
    at = session.now()
    [(term, holder, until)] = session.fetch(sql.LEADER, [(1,)])
    return LeaderRow(Term(term), holder, Instant(until), at)


def take_term(holder: str, ttl_seconds: Seconds, seen: LeaderRow) -> Act[Term | None]:
    def act(session: Session) -> Term | None:
        session.end_hanging()
        at = session.now()
        row = (1, holder, at, at + ttl_seconds, seen.term, seen.lease_until)
        for (taken,) in session.fetch(sql.TAKE_TERM, [row]):
            session.write(sql.INSERT_AUDIT, [(at, "", holder, "term.taken", str(taken), "")])
            return Term(taken)
        mine = read_leader(session)
        # Ours if the answer to the commit was lost: a name is that of one process, which asks once at a time.
        return mine.term if (mine.holder, mine.term) == (holder, seen.term + 1) else None

    return act


def renew_term(term: Term, ttl_seconds: Seconds) -> Act[None]:
    def act(session: Session) -> None:
        # What stopped in the middle of a transaction may hold this very row.
        session.end_hanging()
        if not session.fetch(sql.RENEW_TERM, [(term, session.now() + ttl_seconds)]):
            leader = read_leader(session)
            raise StaleTerm(f"term {term} is over: {leader.holder} leads term {leader.term}; stop leading")

    return act


def resign_term(term: Term) -> Act[None]:
    def act(session: Session) -> None:
        if session.fetch(sql.RENEW_TERM, [(term, 0.0)]):
            session.tell_resigned()

    return act


class OwnConnection:
    """One connection and one thread for the leader's row: neither waits for what others write, nor behind it.

    Opened when it is first needed, since most processes never lead.
    """

    def __init__(self, connect: Callable[[], Session]) -> None:
        self._connect = connect
        self._session: Session | None = None
        self._is_closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gpubroker-term")

    async def run(self, act: Act[T]) -> T:
        """Raises StoreUnavailable, and what `act` raises; then nothing was written."""
        if self._is_closed:
            raise StoreUnavailable("the store is closed")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._transact, act)

    def close(self) -> None:
        self._is_closed = True
        self._thread.submit(self._drop)
        self._thread.shutdown()

    def _transact(self, act: Act[T]) -> T:
        fault: Exception | None = None
        for _ in range(_TRIES):
            try:
                session = self._session = self._session or self._connect()
                session.begin()
                answer = act(session)
                session.commit()
            except (ConnectionLost, CommitUnknown) as lost:
                fault = lost
                self._drop()
            except Collided as collided:
                fault = collided
                self._roll_back()
            except Exception:
                self._roll_back()
                raise
            else:
                return answer
        raise StoreUnavailable(f"the leader's row cannot be reached: {fault}") from fault

    def _roll_back(self) -> None:
        if self._session is not None:
            self._session.rollback()

    def _drop(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()
