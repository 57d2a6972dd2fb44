"""The leader's row: taken, renewed and let go in small transactions of their own."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gpubroker_server.adapters.sql import statements as sql
from gpubroker_server.adapters.sql.session import Collided, CommitUnknown, ConnectionLost, Session
from gpubroker_server.core.domain.leader_term import LeaderRow
from gpubroker_server.core.domain.units import Instant, Seconds, Term
from gpubroker_server.ports.store import StoreUnavailable

T = TypeVar("T")
Act = Callable[[Session], Callable[[], T]]
"""Within a transaction, done twice it does no more than once. What comes of it is told after the commit: so
what nobody has to wait for before costs one round trip in all, commit included."""

_TRIES = 2


def read_leader(session: Session) -> Callable[[], LeaderRow]:
    found = session.ask(sql.LEADER, [(1,)])

    def told() -> LeaderRow:
        [(term, holder, until, at)] = found()
        return LeaderRow(Term(term), holder, Instant(until), Instant(at))

    return told


def take_term(holder: str, ttl_seconds: Seconds, seen: LeaderRow) -> Act[Term | None]:
    def act(session: Session) -> Callable[[], Term | None]:
        session.end_hanging()
        session.ask(sql.LOCK_LEADER, [(1,)])
        row = (1, holder, seen.term, seen.lease_until, ttl_seconds)
        for taken, at in session.fetch(sql.TAKE_TERM, [row]):
            session.write(sql.INSERT_AUDIT, [(at, "", holder, "term.taken", str(taken), "")])
            return lambda: Term(taken)
        found = read_leader(session)

        def told() -> Term | None:
            # Ours if the answer to the commit was lost: a name is that of one process, which asks once at a
            # time.
            mine = found()
            return mine.term if (mine.holder, mine.term) == (holder, seen.term + 1) else None

        return told

    return act


def renew_term(term: Term, ttl_seconds: Seconds) -> Act[bool]:
    """Whether it is still the newest."""

    def act(session: Session) -> Callable[[], bool]:
        # What stopped in the middle of taking a term may hold this very row.
        session.end_hanging()
        renewed = session.ask(sql.RENEW_TERM, [(term, ttl_seconds)])
        return lambda: bool(renewed())

    return act


def resign_term(term: Term) -> Act[None]:
    def act(session: Session) -> Callable[[], None]:
        if session.fetch(sql.RESIGN_TERM, [(term,)]):
            session.tell_resigned()
        return lambda: None

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
                told = act(session)
                session.commit()
                return told()
            except (ConnectionLost, CommitUnknown) as lost:
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
