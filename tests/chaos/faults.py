"""A database session with a fault at one boundary between its statements."""

import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, TypeVar

from gpubroker_server.adapters.sql.postgres import PostgresSession
from gpubroker_server.adapters.sql.session import CommitUnknown, Found, Row, Rows, Session, SetStatement
from gpubroker_server.core.domain.units import Instant, Position, Term
from gpubroker_server.ports.store import StoreUnavailable

T = TypeVar("T")


class Fault(StrEnum):
    CUT = "cut"
    """The connection breaks; a SQLite file, which has none, fails once."""
    KILL = "kill"
    """kill -9 of the process."""
    PAUSE = "pause"
    """The process is paused by SIGSTOP."""


class FaultPoint:
    """The boundary at which the fault occurs: between two statements, or before or after COMMIT."""

    def __init__(self) -> None:
        self.fault = Fault.CUT
        self._number: int | None = None
        self.passed: list[str] = []
        """The boundaries passed since it was armed."""

    def arm(self, fault: Fault, number: int | None) -> None:
        """The fault occurs at this boundary, counted from here; None: only record boundaries."""
        self.fault, self._number, self.passed = fault, number, []

    def disarm(self) -> None:
        self._number = None

    def is_here(self, boundary: str) -> bool:
        self.passed.append(boundary)
        return len(self.passed) - 1 == self._number


class FaultySession:
    """Wraps a session; calls pass through except at the fault point."""

    def __init__(self, session: Session, fault_point: FaultPoint) -> None:
        self._session = session
        self._fault_point = fault_point

    @property
    def server(self) -> str:
        return self._session.server

    def begin(self) -> None:
        self._then("begin", self._session.begin)

    def write(self, statement: SetStatement, rows: Sequence[Row] | Rows) -> None:
        self._then(statement.name, lambda: self._session.write(statement, rows))

    def fetch(self, statement: SetStatement, rows: Sequence[Row]) -> Found:
        return self._then(statement.name, lambda: self._session.fetch(statement, rows))

    def fetch_later(self, statement: SetStatement, rows: Sequence[Row]) -> Callable[[], Found]:
        return self._then(statement.name, lambda: self._session.fetch_later(statement, rows))

    def require_term(self, term: Term) -> None:
        self._then("term", lambda: self._session.require_term(term))

    def take_positions(self, events: int) -> tuple[Position, Instant]:
        return self._then("log head", lambda: self._session.take_positions(events))

    def commit(self) -> None:
        """A cut after it loses the answer of a commit that is done."""
        self._pass("before commit")
        self._session.commit()
        if self._pass("after commit"):
            raise CommitUnknown("the connection was cut before the answer to COMMIT")

    def __getattr__(self, name: str) -> Any:
        """Everything else is passed through."""
        return getattr(self._session, name)

    def _then(self, name: str, act: Callable[[], T]) -> T:
        self._pass(f"before {name}")
        return act()

    def _pass(self, boundary: str) -> bool:
        """Whether the connection was cut here."""
        fault = self._fault_point.fault
        if (
            boundary == "after commit"
            and not isinstance(self._session, PostgresSession)
            and fault is Fault.CUT
        ):
            return False  # a file has no answer to lose
        if not self._fault_point.is_here(boundary):
            return False
        if fault is not Fault.CUT:
            # To this thread: a signal to the process may take effect only later.
            signal.pthread_kill(
                threading.get_ident(), signal.SIGKILL if fault is Fault.KILL else signal.SIGSTOP
            )
            return False
        if not isinstance(self._session, PostgresSession):
            raise StoreUnavailable("disk I/O error")
        cut_connection(self._session)
        return True


def cut_connection(session: PostgresSession) -> None:
    """Shut the socket down without a message of the protocol to either side."""
    with socket.socket(fileno=os.dup(session._connection.fileno())) as line:
        line.shutdown(socket.SHUT_RDWR)
