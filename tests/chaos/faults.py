"""A database session that breaks at one of the boundaries between what is asked of it."""

import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, TypeVar

from gpubroker_server.adapters.sql.postgres import PostgresSession
from gpubroker_server.adapters.sql.rowset import Row, Rows, SetStatement
from gpubroker_server.adapters.sql.session import CommitUnknown, Session
from gpubroker_server.core.domain.units import Instant, Position, Term
from gpubroker_server.ports.store import StoreUnavailable

T = TypeVar("T")


class Fault(StrEnum):
    CUT = "cut"
    """The connection breaks; a file, which is never disconnected, fails once."""
    KILL = "kill"
    """kill -9 of the process."""
    STOP = "stop"
    """The process sleeps, and wakes up when much has happened."""


class Breaker:
    """Says where it breaks: between any two statements, or on either side of COMMIT."""

    def __init__(self) -> None:
        self.fault = Fault.CUT
        self._point: int | None = None
        self.passed: list[str] = []
        """The boundaries since it was armed."""

    def arm(self, fault: Fault, point: int | None) -> None:
        """It breaks at the boundary of this number, counted from here; None: only count."""
        self.fault, self._point, self.passed = fault, point, []

    def disarm(self) -> None:
        self._point = None

    def is_here(self, boundary: str) -> bool:
        self.passed.append(boundary)
        return len(self.passed) - 1 == self._point


class FaultySession:
    """One of the connections of a process."""

    def __init__(self, session: Session, breaker: Breaker) -> None:
        self._session = session
        self._breaker = breaker

    def begin(self) -> None:
        self._then("begin", self._session.begin)

    def write(self, statement: SetStatement, rows: Sequence[Row] | Rows) -> None:
        self._then(statement.name, lambda: self._session.write(statement, rows))

    def fetch(self, statement: SetStatement, rows: Sequence[Row]) -> Sequence[Sequence[Any]]:
        return self._then(statement.name, lambda: self._session.fetch(statement, rows))

    def ask(self, statement: SetStatement, rows: Sequence[Row]) -> Callable[[], Sequence[Sequence[Any]]]:
        return self._then(statement.name, lambda: self._session.ask(statement, rows))

    def require_term(self, term: Term) -> None:
        self._then("term", lambda: self._session.require_term(term))

    def number(self, events: int) -> tuple[Position, Instant]:
        return self._then("log head", lambda: self._session.number(events))

    def commit(self) -> None:
        """Cut after it: it has been done, and the answer is lost."""
        self._pass("before commit")
        self._session.commit()
        if self._pass("after commit"):
            raise CommitUnknown("the answer to COMMIT was cut off")

    def __getattr__(self, name: str) -> Any:
        """All else goes through as it is."""
        return getattr(self._session, name)

    def _then(self, name: str, act: Callable[[], T]) -> T:
        self._pass(f"before {name}")
        return act()

    def _pass(self, boundary: str) -> bool:
        """Whether it broke here."""
        is_file = not isinstance(self._session, PostgresSession)
        fault = self._breaker.fault
        if boundary == "after commit" and is_file and fault is Fault.CUT:
            return False  # what a file has kept it has kept
        if not self._breaker.is_here(boundary):
            return False
        if fault is not Fault.CUT:
            # To this very thread: sent to the process, it may go on for a while before it is stopped.
            signal.pthread_kill(
                threading.get_ident(), signal.SIGKILL if fault is Fault.KILL else signal.SIGSTOP
            )
            return False
        if is_file:
            raise StoreUnavailable("disk I/O error")
        hang_up(self._session)
        return True


def hang_up(session: PostgresSession) -> None:
    """As if the line were cut: neither side is told, and each finds out by itself."""
    with socket.socket(fileno=os.dup(session._connection.fileno())) as line:
        line.shutdown(socket.SHUT_RDWR)
