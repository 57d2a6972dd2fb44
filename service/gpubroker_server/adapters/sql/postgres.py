"""The writer's session on PostgreSQL. Statements are sent in pipelines, so that a group commit waits for the
server only twice.

The server ends a transaction that does nothing for two seconds, so a leader that hangs does not hold the head
of the log.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from itertools import cycle
from typing import Any

import psycopg
from psycopg import errors

from gpubroker_server.adapters.sql.connections import (
    NOTIFY_RESIGNED,
    TERM,
    WRITER,
    ServerSettings,
    connect_writer,
    server_of,
    set_statement,
)
from gpubroker_server.adapters.sql.session import (
    POSTGRES,
    SETTING,
    Collided,
    CommitUnknown,
    ConnectionLost,
    ConstraintFailed,
    DatabaseRefused,
    Found,
    GuardMissed,
    Row,
    Rows,
    SetStatement,
    postgres_rows,
    postgres_text,
)
from gpubroker_server.adapters.sql.system_tables import check_schema, is_another_server
from gpubroker_server.core.domain.units import Instant, Position, Term
from gpubroker_server.core.world.events import Event
from gpubroker_server.ports.store import StaleTerm, StoreExhausted, StoreUnavailable, Unstorable

_NOW = "SELECT extract(epoch from clock_timestamp())::float8"
_SHARE_TERM = "SELECT term, holder, server FROM leadership WHERE id = 1 FOR KEY SHARE"
"""Locks the leader's row in shared mode. Taking the next term waits for this lock; renewing this term does
not."""
_TAKE_HEAD = (
    "UPDATE log_head SET position = position + %s WHERE id = 1 "
    "RETURNING position, compatible_from, extract(epoch from clock_timestamp())::float8"
)

_END_STUCK = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND usename = current_user AND application_name LIKE 'gpubroker%'
    AND pid <> pg_backend_pid() AND state = 'active' AND wait_event = 'ClientRead'
    AND query_start < clock_timestamp() - CASE WHEN query ILIKE 'copy%' THEN '30s' ELSE '2s' END::interval
"""
"""Ends sessions of stopped processes. If a process is stopped between two statements of one pipeline, its
session stays `active` and holds its locks. Before PostgreSQL 17 no timeout of the server ends such a
session."""
_COPIED_FROM = 256
"""The number of rows from which a statement uses COPY. COPY waits for the server twice more, but without it a
large batch exceeds the statement timeout (`bench batch`)."""
GOODBYES = (
    errors.AdminShutdown,
    errors.CrashShutdown,
    errors.CannotConnectNow,
    errors.IdleInTransactionSessionTimeout,
    errors.ReadOnlySqlTransaction,
)
"""The errors with which a server closes a connection, or says that it has become a standby. After such an
error the connection counts as lost even if it is open."""


@cache
def _copy_statement(statement: SetStatement) -> str:
    """Return the COPY into the statement's table. COPY fails as a whole if the key of one row exists."""
    quoted = POSTGRES.identifier_preparer.quote
    columns = ", ".join(map(quoted, statement.names))
    return f"COPY {quoted(statement.copied)} ({columns}) FROM STDIN"


def copied_text(rows: Rows) -> Iterator[str]:
    """Yield the text that COPY reads: a line for each row, with its values separated by tabs."""
    yield _lines(rows.single, "\n")
    for heads, tail in rows.alike:
        yield _lines(heads, "".join(["\t" + _copied(value) for value in tail]) + "\n")


def _lines(rows: Sequence[Row], end: str) -> str:
    columns = [_column(values) for values in zip(*rows, strict=True)]
    return "".join([line + end for line in map("\t".join, zip(*columns, strict=True))])


def _column(values: Sequence[Any]) -> Iterable[str]:
    # The values of a column have one type, and most are plain text. To ask this of each value takes a tenth
    # of the time of a task in a batch.
    return values if {*map(type, values)} == {str} and _is_plain("".join(values)) else map(_copied, values)


def _copied(value: Any) -> str:
    if value is None:
        return "\\N"
    if isinstance(value, str):
        return _escaped(value)
    if isinstance(value, bytes):
        # COPY reads two backslashes as one, which begins the hexadecimal form of bytes.
        return "\\\\x" + value.hex()
    return str(value)  # The server reads numbers and booleans as Python writes them.


_ESCAPES = (("\\", "\\\\"), ("\n", "\\n"), ("\t", "\\t"), ("\r", "\\r"))


def _is_plain(text: str) -> bool:
    return not any(character in text for character, _ in _ESCAPES)


def _escaped(text: str) -> str:
    for character, written in _ESCAPES:
        text = text.replace(character, written)
    return text


def server_addresses(url: str) -> list[tuple[str, int]]:
    """Return (host, port) of each server that the URL names, without Unix sockets. Raises DatabaseRefused."""
    try:
        settings = psycopg.conninfo.conninfo_to_dict(url)
        hosts, ports = (str(settings.get(name, "")).split(",") for name in ("host", "port"))
        named = [(host, int(port or 5432)) for host, port in zip(hosts, cycle(ports), strict=False)]
    except (psycopg.ProgrammingError, ValueError):
        raise DatabaseRefused(
            f"{SETTING} is not an address of PostgreSQL; write postgresql://user@host:port/database"
        ) from None
    return [(host, port) for host, port in named if host and not host.startswith("/")]


def term_session(url: str, *, pooled: bool) -> "PostgresSession":
    """Open a session that is used only for the leader's row. Raises StoreUnavailable."""
    try:
        return PostgresSession(url, TERM, pooled=pooled)
    except psycopg.Error as error:
        raise StoreUnavailable(f"the database cannot be reached: {str(error).strip()}") from error


class PostgresSession:
    """The writer's connection to a server."""

    def __init__(self, url: str, settings: ServerSettings = WRITER, *, pooled: bool = False) -> None:
        self._connect = partial(connect_writer, url, settings, pooled=pooled)
        self._connection = self._connect()
        self.server = server_of(self._connection)
        self._at_begin = set_statement(settings, within="transaction") if pooled else None
        self._open = ExitStack()
        self._pipeline: psycopg.Pipeline
        """The pipeline of the open transaction."""
        self._sent: list[tuple[SetStatement, int, psycopg.Cursor[Any]]] = []
        """The guarded statements of the open transaction: each with the number of its rows and the cursor of
        its answer."""
        self._terms: list[tuple[Term, psycopg.Cursor[Any]]] = []
        """The terms that must lead at the commit of the open transaction: each with the cursor that reads the
        leader's row."""

    def begin(self) -> None:
        with self._translated():
            self._sent.clear()
            self._terms.clear()
            self._pipeline = self._open.enter_context(self._connection.pipeline())
            self._connection.execute("BEGIN", prepare=False)
            if self._at_begin is not None:
                self._connection.execute(self._at_begin, prepare=False)

    def write(self, statement: SetStatement, rows: Sequence[Row] | Rows) -> None:
        """Send rows. May raise the errors of statements that were sent before."""
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
        """Copy the rows between two pipelines, because a pipeline cannot copy. Waits for the answers to all
        statements that were sent before."""
        with self._translated():
            self._open.close()
            with self._connection.cursor() as cursor, cursor.copy(_copy_statement(statement)) as copy:
                for text in copied_text(rows):
                    copy.write(text)
            self._pipeline = self._open.enter_context(self._connection.pipeline())

    def fetch(self, statement: SetStatement, rows: Sequence[Row]) -> Found:
        with self._translated():
            return self.fetch_later(statement, rows)()

    def fetch_later(self, statement: SetStatement, rows: Sequence[Row]) -> Callable[[], Found]:
        with self._translated():
            parameters = {"rows": postgres_rows(statement, rows)}
            return self._connection.execute(postgres_text(statement), parameters).fetchall

    def require_term(self, term: Term) -> None:
        with self._translated():
            cursor = self._connection.execute(_SHARE_TERM)
            self._terms.append((term, cursor))

    def take_positions(self, events: int) -> tuple[Position, Instant]:
        try:
            with self._translated():
                head = self._connection.execute(_TAKE_HEAD, [events])
                # Reading the answer would not suffice: only after a sync does the server count the session as
                # idle, and then end a transaction that hangs while it locks the head of the log.
                self._pipeline.sync()
                [(last, compatible_from, at)] = head.fetchall()
        finally:
            self._check_guards()
        check_schema(compatible_from)
        return Position(last - events + 1), Instant(at)

    def _check_guards(self) -> None:
        """Raise the error of the first guard that was missed, if any was. Also called after a failed
        constraint, because a missed guard may be its cause and is then reported instead."""
        # A negative row count means that there is no answer, because an earlier statement has failed.
        for term, leader in self._terms:
            for current, holder, server in leader.fetchall() if leader.rowcount >= 0 else ():
                if current != term:
                    raise StaleTerm(f"term {term} is over: {holder} leads term {current}; stop leading")
                if is_another_server(server, self.server):
                    raise StaleTerm(
                        f"term {term} was taken on the server {server}, and this is {self.server}, which may "
                        "lack the last commits; take a new term"
                    )
        for statement, row_count, written in self._sent:
            if 0 <= written.rowcount != row_count:
                raise GuardMissed(statement, row_count, written.rowcount)

    def commit(self) -> None:
        try:
            with self._translated():
                done = self._connection.execute("COMMIT", prepare=False)
                # Closing waits for the answers to everything sent, and raises the first error.
                self._open.close()
                # The server answers the COMMIT of a failed transaction with ROLLBACK and without an error.
                if done.statusmessage != "COMMIT":
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
        # Our own commit, if still under way, locks the head of the log: wait until it has ended.
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

    def end_stuck_sessions(self) -> None:
        with self._translated():
            self._connection.execute(_END_STUCK)

    def notify_resigned(self) -> None:
        with self._translated():
            # The resignation need not be on disk: if a crash undoes it, the lease ends by itself.
            self._connection.execute("SET LOCAL synchronous_commit = off", prepare=False)
            self._connection.execute(NOTIFY_RESIGNED, prepare=False)

    def reconnect(self) -> None:
        self.close()
        try:
            self._connection = self._connect()
            self.server = server_of(self._connection)
        except psycopg.Error as error:
            raise StoreUnavailable(f"the database cannot be reached: {str(error).strip()}") from error

    def on_idle(self) -> None:
        """Do nothing: the server needs no care."""

    def close(self) -> None:
        with suppress(psycopg.Error):
            self._open.close()
        self._connection.close()

    def _is_out_of_step(self, error: psycopg.Error) -> bool:
        """Return True if the connection can no longer be used. An error without a code comes from the driver:
        the server has closed the connection in the middle of an answer, although it still counts as open."""
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
        except errors.DiskFull as error:
            raise StoreExhausted(f"disk full at the database server: {str(error).strip()}") from error
        except psycopg.Error as error:
            if isinstance(error, GOODBYES) or self._is_out_of_step(error):
                raise ConnectionLost(str(error).strip()) from error
            if isinstance(error, psycopg.OperationalError | psycopg.InternalError):
                raise StoreUnavailable(f"the database failed: {str(error).strip()}") from error
            raise
