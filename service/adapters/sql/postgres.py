"""PostgreSQL: the same groups of statements, sent in pipelines, so that a group costs two waits.

A connection that answers nothing for two seconds counts as lost, and a transaction of ours that does nothing
for two seconds is ended by the server: so a leader that hangs does not hold the log's head.

Who serves a database holds an advisory lock in it, which goes with its connection. The lock keeps a second
service from taking the term of a living one; that two leaders never write is up to the term alone.
"""

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import psycopg
from psycopg import errors

from service.adapters.boot_clock import boot_seconds
from service.adapters.sql.rowset import Row, SetStatement, postgres_copy, postgres_rows, postgres_text
from service.adapters.sql.session import (
    Collided,
    CommitUnknown,
    ConnectionLost,
    ConstraintFailed,
    DatabaseRefused,
    GuardMissed,
)
from service.core.events import Event
from service.core.units import Instant, Position, Term
from service.ports import StaleTerm, StoreUnavailable, Unstorable

_NOW = "SELECT extract(epoch from clock_timestamp())::float8"
_TAKE_HEAD = (
    "UPDATE log_head SET position = position + %s WHERE id = 1 "
    "RETURNING position, extract(epoch from clock_timestamp())::float8"
)

_CONNECTION: Mapping[str, Any] = {
    "connect_timeout": 2,
    "tcp_user_timeout": 2000,
    "keepalives": 1,
    "keepalives_idle": 1,
    "keepalives_interval": 1,
    "keepalives_count": 2,
    "application_name": "gpubroker",
}
_WRITER_ALONE = {"target_session_attrs": "read-write"}
"""A primary that has become a standby, or was made read-only, is of no use to those who write: of several
hosts in the URL the next one is asked."""
_WRITER = """
SET idle_in_transaction_session_timeout = '2s';
SET lock_timeout = '5s';
SET statement_timeout = '10s';
SET idle_session_timeout = 0;
-- The server notices within seconds when the machine of whoever serves is gone, and lets go of the lock.
SET tcp_keepalives_idle = 1; SET tcp_keepalives_interval = 1;
SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off';
-- Every statement here finds its rows by key. A plan made while a table was small must not scan it later.
SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off; SET jit = off;
"""
_LISTENER = """
SET idle_session_timeout = 0;
-- A word has nothing that would have to be on disk.
SET synchronous_commit = off;
LISTEN gpubroker;
"""
_TERM = "SET lock_timeout = '2s'; SET statement_timeout = '2s';"
"""Beyond the writer's: an answer that comes later is of no use to a leader."""
_WRITER_PATIENCE_SECONDS = 11.0
_TERM_PATIENCE_SECONDS = 2.5
"""More than their statements may take."""
_READER = "SET statement_timeout = '30s'; SET default_transaction_read_only = on;"
_END_HANGING = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND usename = current_user AND application_name LIKE 'gpubroker%'
    AND pid <> pg_backend_pid() AND state = 'active' AND wait_event = 'ClientRead'
    AND query_start < clock_timestamp() - CASE WHEN query ILIKE 'copy%' THEN '30s' ELSE '2s' END::interval
"""
"""A process that is stopped between two statements of one pipeline leaves its session `active`, and its locks
in place: before version 17 no time limit of the server's ends that."""
_OLDEST = 140000

_COPIED_FROM = 256
"""So many rows of one statement are copied, which costs two waits more and per row a fraction."""

_SERVING = 0x67706273
"""Advisory lock of the one service of a database."""
_SERVING_PATIENCE = "2s"
"""One that has just been stopped or killed may still be on its way out."""
_WHO_SERVES = """
SELECT a.application_name FROM pg_locks l JOIN pg_stat_activity a USING (pid)
WHERE l.locktype = 'advisory' AND l.granted AND l.objid = %s AND l.objsubid = 1
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""

GOODBYES = (
    errors.AdminShutdown,
    errors.CrashShutdown,
    errors.CannotConnectNow,
    errors.IdleInTransactionSessionTimeout,
    errors.ReadOnlySqlTransaction,
)
"""What a server says before it hangs up, or when it has become a standby; the connection counts as lost
although it is still open."""


def connect_writer(url: str) -> psycopg.Connection[Any]:
    return _connect(url, _WRITER, **_WRITER_ALONE)


def connect_reader(url: str) -> psycopg.Connection[Any]:
    return _connect(url, _READER)


def connect_listener(url: str) -> psycopg.Connection[Any]:
    return _connect(url, _LISTENER)


def connect_migrator(url: str) -> psycopg.Connection[Any]:
    return psycopg.connect(url, **_CONNECTION)


def connect_mover(url: str) -> psycopg.Connection[Any]:
    """Nobody waits for it: a server that is busy with what it was sent may take its time."""
    patient = {**_CONNECTION, "tcp_user_timeout": 60_000, "application_name": "gpubroker migrate-data"}
    return psycopg.connect(url, **patient)


def check_server(url: str) -> None:
    """Raises DatabaseRefused when the server cannot be reached, is too old, or only repeats another."""
    try:
        psycopg.conninfo.conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        raise DatabaseRefused(
            "--database-url is no address of PostgreSQL; write postgresql://user@host:port/database"
        ) from None
    try:
        with psycopg.connect(url, autocommit=True, **_CONNECTION) as connection:
            version = connection.info.server_version
            standby = connection.execute("SELECT pg_is_in_recovery()").fetchone()
    except psycopg.Error as error:
        raise DatabaseRefused(
            f"cannot use PostgreSQL at {told(url)}: {str(error).strip()}; start it, or correct --database-url"
        ) from None
    if version < _OLDEST:
        raise DatabaseRefused(f"PostgreSQL at {told(url)} is {version // 10000}; 14 is the oldest")
    if standby == (True,):
        raise DatabaseRefused(
            f"PostgreSQL at {told(url)} is a read-only standby; name the primary in --database-url"
        )


def connect_term(url: str) -> psycopg.Connection[Any]:
    return _connect(url, _WRITER + _TERM, **_WRITER_ALONE)


def _connect(url: str, prepare: str, **more: Any) -> psycopg.Connection[Any]:
    connection: psycopg.Connection[Any] = psycopg.connect(
        url, autocommit=True, prepare_threshold=0, **_CONNECTION, **more
    )
    connection.execute(prepare, prepare=False)
    return connection


def told(url: str) -> str:
    """For people: without the password."""
    settings = psycopg.conninfo.conninfo_to_dict(url)
    return f"{settings.get('host', 'the local socket')}, database {settings.get('dbname', '(default)')}"


def term_session(url: str) -> "PostgresSession":
    """For the leader's row alone. Raises StoreUnavailable."""
    try:
        return PostgresSession(url, connect=connect_term, patience_seconds=_TERM_PATIENCE_SECONDS)
    except psycopg.Error as error:
        raise StoreUnavailable(f"the database cannot be reached: {str(error).strip()}") from error


class PostgresSession:
    """The writer's connection to a server.

    With `alone` it keeps other such sessions out of the database. Raises DatabaseRefused if there is one.
    """

    def __init__(
        self,
        url: str,
        *,
        alone: bool = False,
        connect: Callable[[str], psycopg.Connection[Any]] = connect_writer,
        patience_seconds: float = _WRITER_PATIENCE_SECONDS,
    ) -> None:
        self.patience_seconds = patience_seconds
        self.waits_since: float | None = None
        self._url = url
        self._alone = alone
        self._connect = connect
        self._connection = connect(url)
        if alone:
            self._claim()
        self._open = ExitStack()
        self._pipeline: psycopg.Pipeline
        """Of the transaction that is open."""
        self._sent: list[tuple[SetStatement, int, psycopg.Cursor[Any]]] = []
        self._terms: list[tuple[Term, psycopg.Cursor[Any]]] = []

    def _claim(self) -> None:
        self._say_who_serves()
        try:
            with self._connection.transaction():
                self._connection.execute(f"SET LOCAL lock_timeout = '{_SERVING_PATIENCE}'")
                self._connection.execute("SELECT pg_advisory_lock(%s)", [_SERVING])
        except errors.LockNotAvailable:
            others = self._connection.execute(_WHO_SERVES, [_SERVING]).fetchall()
            self._connection.close()
            raise DatabaseRefused(
                f"PostgreSQL at {told(self._url)} is served by "
                f"{', '.join(name for (name,) in others) or 'another gpubroker'}; "
                "stop that one first, or name another database with --database-url"
            ) from None

    def _say_who_serves(self) -> None:
        name = f"gpubroker, process {os.getpid()} on {socket.gethostname()}"
        self._connection.execute("SELECT set_config('application_name', %s, false)", [name])

    def hang_up(self) -> None:
        with socket.socket(fileno=os.dup(self._connection.fileno())) as line:
            line.shutdown(socket.SHUT_RDWR)

    def begin(self) -> None:
        with self._translated():
            self._sent.clear()
            self._terms.clear()
            self._pipeline = self._open.enter_context(self._connection.pipeline())
            self._connection.execute("BEGIN", prepare=False)

    def write(self, statement: SetStatement, rows: Sequence[Row]) -> None:
        if statement.copied and len(rows) >= _COPIED_FROM:
            self._copy(statement, rows)
            return
        with self._translated():
            cursor = self._connection.execute(
                postgres_text(statement), {"rows": postgres_rows(statement, rows)}
            )
            if statement.exact:
                self._sent.append((statement, len(rows), cursor))

    def _copy(self, statement: SetStatement, rows: Sequence[Row]) -> None:
        """Between two pipelines, which cannot copy. What was sent before is waited for."""
        with self._translated():
            self._open.close()
            with self._connection.cursor() as cursor, cursor.copy(postgres_copy(statement)) as copy:
                for row in rows:
                    copy.write_row(row)
                    self.waits_since = boot_seconds()
            self._pipeline = self._open.enter_context(self._connection.pipeline())

    def fetch(self, statement: SetStatement, rows: Sequence[Row]) -> Sequence[Sequence[Any]]:
        with self._translated():
            parameters = {"rows": postgres_rows(statement, rows)}
            return self._connection.execute(postgres_text(statement), parameters).fetchall()

    def require_term(self, term: Term) -> None:
        with self._translated():
            cursor = self._connection.execute("SELECT term, holder FROM leadership WHERE id = 1 FOR UPDATE")
            self._terms.append((term, cursor))

    def number(self, events: int) -> tuple[Position, Instant]:
        try:
            with self._translated():
                head = self._connection.execute(_TAKE_HEAD, [events])
                # A sync, and not a mere read of the answer: only then does the server count us as idle,
                # and end a transaction that hangs with the head of the log in its hand.
                self._pipeline.sync()
                [(last, at)] = head.fetchall()
        finally:
            # Of a guard that missed and a constraint that then failed, the guard is what went wrong.
            self._check_guards()
        return Position(last - events + 1), Instant(at)

    def _check_guards(self) -> None:
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
        self.waits_since = boot_seconds()
        with suppress(psycopg.Error):
            self._open.close()
        with suppress(psycopg.Error):
            if self._connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
                self._connection.execute("ROLLBACK")
        self.waits_since = None

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

    def reconnect(self) -> None:
        self.close()
        try:
            self._connection = self._connect(self._url)
            if self._alone:
                self._say_who_serves()
                # If somebody came in while we were away, our term is over, and the next commit says so.
                self._connection.execute("SELECT pg_try_advisory_lock(%s)", [_SERVING])
        except psycopg.Error as error:
            raise StoreUnavailable(f"the database cannot be reached: {str(error).strip()}") from error

    def close(self) -> None:
        with suppress(psycopg.Error):
            self._open.close()
        self._connection.close()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        self.waits_since = boot_seconds()
        try:
            yield
        except errors.IntegrityError as error:
            raise ConstraintFailed(str(error)) from error
        except (errors.DataError, UnicodeError) as error:
            raise Unstorable(f"a value cannot be stored: {str(error).strip()}") from error
        except (errors.DeadlockDetected, errors.SerializationFailure) as error:
            raise Collided(str(error).strip()) from error
        except psycopg.Error as error:
            if isinstance(error, GOODBYES) or self._connection.closed or self._connection.broken:
                raise ConnectionLost(str(error).strip()) from error
            if isinstance(error, psycopg.OperationalError | psycopg.InternalError):
                raise StoreUnavailable(f"the database did not do it: {str(error).strip()}") from error
            raise
        finally:
            self.waits_since = None
