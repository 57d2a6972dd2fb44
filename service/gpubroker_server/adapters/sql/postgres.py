"""PostgreSQL: the same groups of statements, sent in pipelines, so that a group costs two waits.

A connection that answers nothing for two seconds counts as lost, and a transaction of ours that does nothing
for two seconds is ended by the server: so a leader that hangs does not hold the log's head.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import psycopg
from psycopg import errors

from gpubroker_server.adapters.sql.compatibility import check_schema
from gpubroker_server.adapters.sql.connections import TERM, WRITER, Wishes, connect_writer, wished
from gpubroker_server.adapters.sql.hints import TELL_RESIGNED
from gpubroker_server.adapters.sql.rowset import (
    Row,
    Rows,
    SetStatement,
    copied_text,
    postgres_copy,
    postgres_rows,
    postgres_text,
)
from gpubroker_server.adapters.sql.session import (
    Collided,
    CommitUnknown,
    ConnectionLost,
    ConstraintFailed,
    GuardMissed,
)
from gpubroker_server.core.domain.units import Instant, Position, Term
from gpubroker_server.core.world.events import Event
from gpubroker_server.ports.store import StaleTerm, StoreUnavailable, Unstorable

_NOW = "SELECT extract(epoch from clock_timestamp())::float8"
_SHARE_TERM = "SELECT term, holder FROM leadership WHERE id = 1 FOR KEY SHARE"
"""Whoever takes the next term waits for it, and who renews this one does not."""
_TAKE_HEAD = (
    "UPDATE log_head SET position = position + %s WHERE id = 1 "
    "RETURNING position, compatible_from, extract(epoch from clock_timestamp())::float8"
)

_END_HANGING = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND usename = current_user AND application_name LIKE 'gpubroker%'
    AND pid <> pg_backend_pid() AND state = 'active' AND wait_event = 'ClientRead'
    AND query_start < clock_timestamp() - CASE WHEN query ILIKE 'copy%' THEN '30s' ELSE '2s' END::interval
"""
"""A process that is stopped between two statements of one pipeline leaves its session `active`, and its locks
in place: before version 17 no time limit of the server's ends that."""
_COPIED_FROM = 256
"""So many rows of one statement are copied, which costs two waits more and per row a fraction."""

GOODBYES = (
    errors.AdminShutdown,
    errors.CrashShutdown,
    errors.CannotConnectNow,
    errors.IdleInTransactionSessionTimeout,
    errors.ReadOnlySqlTransaction,
)
"""What a server says before it hangs up, or when it has become a standby; the connection counts as lost
although it is still open."""


def term_session(url: str, *, pooled: bool) -> "PostgresSession":
    """For the leader's row alone. Raises StoreUnavailable."""
    try:
        return PostgresSession(url, TERM, pooled=pooled)
    except psycopg.Error as error:
        raise StoreUnavailable(f"the database cannot be reached: {str(error).strip()}") from error


class PostgresSession:
    """The writer's connection to a server."""

    def __init__(self, url: str, wishes: Wishes = WRITER, *, pooled: bool = False) -> None:
        self._connect = partial(connect_writer, url, wishes, pooled=pooled)
        self._connection = self._connect()
        self._at_begin = wished(wishes, within="transaction") if pooled else None
        self._open = ExitStack()
        self._pipeline: psycopg.Pipeline
        """Of the transaction that is open."""
        self._sent: list[tuple[SetStatement, int, psycopg.Cursor[Any]]] = []
        self._terms: list[tuple[Term, psycopg.Cursor[Any]]] = []

    def begin(self) -> None:
        with self._translated():
            self._sent.clear()
            self._terms.clear()
            self._pipeline = self._open.enter_context(self._connection.pipeline())
            self._connection.execute("BEGIN", prepare=False)
            if self._at_begin is not None:
                self._connection.execute(self._at_begin, prepare=False)

    def write(self, statement: SetStatement, rows: Sequence[Row] | Rows) -> None:
        """The server may complain here of what was sent before."""
        try:
            if statement.copied and len(rows) >= _COPIED_FROM:
                self._copy(statement, rows if isinstance(rows, Rows) else Rows(rows))
            else:
                self._send(statement, rows)
        except ConstraintFailed:
            self._check_guards()
            raise

    def _send(self, statement: SetStatement, rows: Sequence[Row] | Rows) -> None:
        with self._translated():
            cursor = self._connection.execute(
                postgres_text(statement), {"rows": postgres_rows(statement, list(rows))}
            )
            if statement.exact:
                self._sent.append((statement, len(rows), cursor))

    def _copy(self, statement: SetStatement, rows: Rows) -> None:
        """Between two pipelines, which cannot copy. What was sent before is waited for."""
        with self._translated():
            self._open.close()
            with self._connection.cursor() as cursor, cursor.copy(postgres_copy(statement)) as copy:
                for text in copied_text(rows):
                    copy.write(text)
            self._pipeline = self._open.enter_context(self._connection.pipeline())

    def fetch(self, statement: SetStatement, rows: Sequence[Row]) -> Sequence[Sequence[Any]]:
        with self._translated():
            parameters = {"rows": postgres_rows(statement, rows)}
            return self._connection.execute(postgres_text(statement), parameters).fetchall()

    def ask(self, statement: SetStatement, rows: Sequence[Row]) -> Callable[[], Sequence[Sequence[Any]]]:
        with self._translated():
            parameters = {"rows": postgres_rows(statement, rows)}
            return self._connection.execute(postgres_text(statement), parameters).fetchall

    def require_term(self, term: Term) -> None:
        with self._translated():
            cursor = self._connection.execute(_SHARE_TERM)
            self._terms.append((term, cursor))

    def number(self, events: int) -> tuple[Position, Instant]:
        try:
            with self._translated():
                head = self._connection.execute(_TAKE_HEAD, [events])
                # A sync, and not a mere read of the answer: only then does the server count us as idle,
                # and end a transaction that hangs with the head of the log in its hand.
                self._pipeline.sync()
                [(last, compatible_from, at)] = head.fetchall()
        finally:
            self._check_guards()
        check_schema(compatible_from)
        return Position(last - events + 1), Instant(at)

    def _check_guards(self) -> None:
        """Of a guard that missed and a constraint that then failed, the guard is what went wrong."""
        for term, leader in self._terms:
            for current, holder in leader.fetchall() if leader.rowcount >= 0 else ():
                if current != term:
                    raise StaleTerm(f"term {term} is over: {holder} leads term {current}; stop leading")
        for statement, given, written in self._sent:
            if 0 <= written.rowcount != given:
                raise GuardMissed(statement, given, written.rowcount)

    def commit(self) -> None:
        try:
            with self._translated():
                done = self._connection.execute("COMMIT", prepare=False)
                self._open.close()  # waits for everything sent; raises the first error of it
                if done.statusmessage != "COMMIT":  # a failed transaction answers ROLLBACK, and no error
                    raise StoreUnavailable(f"the database answered COMMIT with {done.statusmessage}")
        except ConnectionLost as lost:
            raise CommitUnknown(str(lost)) from lost

    def rollback(self) -> None:
        with suppress(psycopg.Error):
            self._open.close()
        with suppress(psycopg.Error):
            if self._connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
                self._connection.execute("ROLLBACK")

    def has_event(self, event: Event) -> bool:
        # A commit of ours that is still under way holds the head of the log until it is over.
        with self._translated(), self._connection.transaction():
            self._connection.execute("SELECT position FROM log_head WHERE id = 1 FOR UPDATE")
            cursor = self._connection.execute(
                "SELECT kind, key, version, at FROM event WHERE position = %s", [event.position]
            )
            return cursor.fetchall() == [(event.kind, event.key, event.version, event.at)]

    def now(self) -> Instant:
        with self._translated():
            [(at,)] = self._connection.execute(_NOW).fetchall()
            return Instant(at)

    def end_hanging(self) -> None:
        with self._translated():
            self._connection.execute(_END_HANGING)

    def tell_resigned(self) -> None:
        with self._translated():
            # Nobody waits for the disk: if a crash takes it back, the lease ends by itself.
            self._connection.execute("SET LOCAL synchronous_commit = off", prepare=False)
            self._connection.execute(TELL_RESIGNED, prepare=False)

    def reconnect(self) -> None:
        self.close()
        try:
            self._connection = self._connect()
        except psycopg.Error as error:
            raise StoreUnavailable(f"the database cannot be reached: {str(error).strip()}") from error

    def rest(self) -> None:
        """The server sees to that."""

    def close(self) -> None:
        with suppress(psycopg.Error):
            self._open.close()
        self._connection.close()

    def _is_out_of_step(self, error: psycopg.Error) -> bool:
        """Whether the server's next word can no longer be told. What has no code was not said by the server:
        a goodbye in the middle of an answer shows as an error of the driver, on an open connection."""
        says_nothing = isinstance(error, psycopg.OperationalError) and error.sqlstate is None
        is_consequence = isinstance(error, errors.PipelineAborted)
        return self._connection.closed or self._connection.broken or (says_nothing and not is_consequence)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except errors.IntegrityError as error:
            raise ConstraintFailed(str(error)) from error
        except (errors.DataError, UnicodeError) as error:
            raise Unstorable(f"a value cannot be stored: {str(error).strip()}") from error
        except (errors.DeadlockDetected, errors.SerializationFailure) as error:
            raise Collided(str(error).strip()) from error
        except psycopg.Error as error:
            if isinstance(error, GOODBYES) or self._is_out_of_step(error):
                raise ConnectionLost(str(error).strip()) from error
            if isinstance(error, psycopg.OperationalError | psycopg.InternalError):
                raise StoreUnavailable(f"the database did not do it: {str(error).strip()}") from error
            raise
