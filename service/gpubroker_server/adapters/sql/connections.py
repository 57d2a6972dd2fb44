"""Connections to PostgreSQL. A function opens each kind of connection, and `Hints` keeps the one with which
processes wake each other.

No wait is endless. The server's timeouts end long statements, and TCP timeouts end connections without a
peer. Neither helps if something in between accepts every byte and passes none on, so this module limits each
wait, too.

A pooler that assigns connections by transaction (`pooled`) keeps nothing of a session: settings are sent at
the beginning of each transaction, no statement stays prepared, and no process listens.
"""

import asyncio
import os
import socket
from asyncio import Future, TimerHandle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import inf
from typing import Any, Literal

import psycopg
from gpubroker import __version__
from msgspec import Struct
from psycopg import errors
from psycopg.abc import PQGen
from psycopg.generators import send

from gpubroker_server.adapters.clock import boot_seconds
from gpubroker_server.adapters.sql.session import SETTING, DatabaseRefused
from gpubroker_server.ports.store import StoreExhausted


class BatchedPipeline(psycopg.Pipeline):
    """Sends all statements together once an answer is awaited. psycopg sends each statement at once, which
    costs two system calls and wakes the server: a commit takes a sixth longer (`bench pickup` on
    PostgreSQL)."""

    def _enqueue_sync(self) -> None:
        super()._enqueue_sync()
        # The caller of a sync waits, and `_communicate_gen` talks to the server only if the queue is empty.
        self._hand_over()

    def _communicate_gen(self) -> PQGen[None]:
        if not self.command_queue:
            yield from super()._communicate_gen()

    def _fetch_gen(self, *, flush: bool) -> PQGen[None]:
        self._hand_over()
        # The socket may not have taken all bytes. Send the rest before an answer is awaited: the server
        # waits for the rest, too.
        yield from send(self.pgconn)
        yield from super()._fetch_gen(flush=flush)

    def _hand_over(self) -> None:
        """Give the commands to libpq, which sends on a flush or at 64 KiB."""
        while self.command_queue:
            self.command_queue.popleft()()


class ServerSettings(Struct, frozen=True):
    values: Mapping[str, str]
    """Values of the server's settings by name."""
    answer_seconds: float
    """A connection that waits and receives nothing for this time is closed. Writers wait longer than the
    server's `statement_timeout`, so that its error arrives first."""


_WRITER = {
    "idle_in_transaction_session_timeout": "2s",
    "lock_timeout": "5s",
    "statement_timeout": "10s",
    # The connection is kept even if nothing is written for a long time.
    "idle_session_timeout": "0",
    # The server notices within seconds that this machine is gone, and releases the session's locks.
    "tcp_keepalives_idle": "1",
    "tcp_keepalives_interval": "1",
    # Every statement finds its rows by key. A plan made while a table was small must not scan it later.
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
}
WRITER = ServerSettings(_WRITER, answer_seconds=11.0)
TERM = ServerSettings({**_WRITER, "lock_timeout": "2s", "statement_timeout": "2s"}, answer_seconds=2.5)
"""Settings of the connection for the leader's row. A leader cannot use an answer that comes later."""
READER = ServerSettings(
    {"statement_timeout": "30s", "default_transaction_read_only": "on"}, answer_seconds=6.0
)
"""Settings of readers. Slow reads are large, and their rows arrive bit by bit, so `answer_seconds` may be
below `statement_timeout`."""
_LISTENER = ServerSettings({"idle_session_timeout": "0", "synchronous_commit": "off"}, answer_seconds=2.5)
"""Settings of the connection that listens. Its commits do not wait for the disk, because notifications need
not be durable."""
_POLL_SECONDS = 0.1
"""Interval in which a waiting connection checks `answer_seconds`."""

_DURABLE = (
    "set_config('synchronous_commit', CASE current_setting('synchronous_commit') WHEN 'off' THEN 'on' "
    "ELSE current_setting('synchronous_commit') END, "
)
"""Turns `synchronous_commit` on where the server's default is off, and keeps any other value that an
administrator has chosen."""

_CONNECTION: Mapping[str, Any] = {
    # libpq takes `tcp_user_timeout` in milliseconds and the other times in seconds.
    "connect_timeout": 2,
    "tcp_user_timeout": 2000,
    "keepalives": 1,
    "keepalives_idle": 1,
    "keepalives_interval": 1,
    "keepalives_count": 2,
    # The server keeps the first 63 bytes. Releases before 0.3.0 do not write their number.
    "application_name": f"gpubroker {__version__}, pid {os.getpid()} on {socket.gethostname()}",
}
_WAITS_FOR_STANDBY = (
    "SELECT current_setting('synchronous_standby_names'), current_setting('synchronous_commit')"
)
_OLDEST = 140000
_OUT_OF_CONNECTIONS = (
    "too many clients",
    "too many connections",
    "connection slots are reserved",
    "no more connections allowed",
)
"""Texts of refusals for lack of connections. psycopg has no SQLSTATE for a connection that was refused."""
GET_CONNECTIONS = "raise max_connections or the limit of the user, or end other clients"
_SERVER = "SELECT system_identifier, left(pg_walfile_name(pg_current_wal_lsn()), 8) FROM pg_control_system()"
"""Selects the identifier and the timeline of the server. The first eight digits of a WAL file's name are the
timeline, in hexadecimal."""
_CHANNEL = "gpubroker"
_RESIGNED = "resigned"
NOTIFY_RESIGNED = f"NOTIFY {_CHANNEL}, '{_RESIGNED}'"
HINT_PAUSE_SECONDS = 0.01
"""The shortest time between two hints. The first hint after a pause is sent at once."""
RECONNECT_SECONDS = 1.0
PROBE_SECONDS = 2.0
"""Interval in which the listener asks the server for a sign of life: a connection that only listens does not
notice that nothing arrives any more."""


class TimedConnection(psycopg.Connection[Any]):
    """Closes itself when the server sends nothing for too long; waiting callers get an OperationalError."""

    answer_seconds = inf

    def wait(self, gen: PQGen[Any], interval: float = _POLL_SECONDS, *limit: Any, **limits: Any) -> Any:
        return super().wait(self._until_silent(gen), interval, *limit, **limits)

    @contextmanager
    def pipeline(self) -> Iterator[psycopg.Pipeline]:
        # psycopg makes a pipeline of its own class only if `_pipeline` is empty.
        self._pipeline = self._pipeline or BatchedPipeline(self)
        with super().pipeline() as pipeline:
            yield pipeline

    def _until_silent(self, gen: PQGen[Any]) -> PQGen[Any]:
        """Run `gen` until it ends. `gen` yields the events that it waits for, and receives those that are
        ready: none after each interval without an event. Raises OperationalError after `answer_seconds` of
        silence."""
        try:
            awaited = next(gen)
            heard_at = boot_seconds()
            while True:
                ready = yield awaited
                if ready:
                    heard_at = boot_seconds()
                elif boot_seconds() - heard_at > self.answer_seconds:
                    self.close()
                    raise psycopg.OperationalError(f"no answer for {self.answer_seconds:g} s")
                awaited = gen.send(ready)
        except StopIteration as done:
            return done.value


def set_statement(settings: ServerSettings, *, within: Literal["session", "transaction"]) -> str:
    """Return one statement that sets all values. Commits then wait for the disk, whatever the server's
    default, unless `settings` say otherwise."""
    local = "true" if within == "transaction" else "false"
    calls = [f"set_config('{name}', '{value}', {local})" for name, value in settings.values.items()]
    if "synchronous_commit" not in settings.values:
        calls.append(f"{_DURABLE}{local})")
    return f"SELECT {', '.join(calls)}"


def connect_writer(url: str, settings: ServerSettings = WRITER, *, pooled: bool = False) -> TimedConnection:
    """Connect to the first of the URL's hosts that accepts writes."""
    return _connect(url, settings, pooled=pooled, target_session_attrs="read-write")


def server_of(connection: psycopg.Connection[Any]) -> str:
    """Return the system identifier and the timeline of a primary: a restored server has another identifier or
    timeline, a promoted standby another timeline. Returns an empty text if the user may not read them."""
    try:
        [(identifier, timeline)] = connection.execute(_SERVER, prepare=False).fetchall()
    except (errors.InsufficientPrivilege, errors.FeatureNotSupported, errors.ObjectNotInPrerequisiteState):
        return ""
    return f"{identifier}.{int(timeline, 16)}"


def connect_reader(url: str, *, pooled: bool = False) -> TimedConnection:
    return _connect(url, READER, pooled=pooled)


def connect_listener(url: str) -> TimedConnection:
    connection = _connect(url, _LISTENER, pooled=False)
    connection.execute(f"LISTEN {_CHANNEL}")
    return connection


def connect_mover(url: str) -> psycopg.Connection[Any]:
    """Connect for `migrate-data`. The server may take a minute to acknowledge the data that it was sent."""
    patient = {**_CONNECTION, "tcp_user_timeout": 60_000, "application_name": "gpubroker migrate-data"}
    return psycopg.connect(url, **patient)


def connect_migrator(url: str) -> psycopg.Connection[Any]:
    with _telling_shortage():
        return psycopg.connect(url, **_CONNECTION)


def check_server(url: str, named: str = SETTING) -> None:
    """Check the server. Raises DatabaseRefused if it cannot be reached, is too old or is a standby. `named`
    is the setting that the message names."""
    try:
        psycopg.conninfo.conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        raise DatabaseRefused(
            f"{named} is not an address of PostgreSQL; write postgresql://user@host:port/database"
        ) from None
    try:
        # `pooled` sets nothing in the session, so the check also works behind a pooler. A server may be busy
        # when a process starts, so this connection waits longer than later ones.
        with _connect(url, READER, pooled=True, connect_timeout=10) as connection:
            version = connection.info.server_version
            standby = connection.execute("SELECT pg_is_in_recovery()").fetchone()
    except StoreExhausted as short:
        raise DatabaseRefused(f"PostgreSQL at {display_name(url)} is {short}; {GET_CONNECTIONS}") from None
    except psycopg.Error as error:
        raise unusable(url, error, named) from None
    if version < _OLDEST:
        raise DatabaseRefused(
            f"PostgreSQL at {display_name(url)} has version {version // 10000}; use 14 or newer"
        )
    if standby == (True,):
        raise DatabaseRefused(
            f"PostgreSQL at {display_name(url)} is a read-only standby; name the primary in {named}"
        )


def check_waits_for_standby(url: str) -> None:
    """Check that a commit waits for a standby if the URL names several hosts. Raises DatabaseRefused if one
    host confirms a commit alone. Call `check_server` first, which refuses a malformed URL."""
    hosts = str(psycopg.conninfo.conninfo_to_dict(url).get("host", "")).split(",")
    if len(hosts) < 2:
        return
    try:
        with connect_writer(url, pooled=True) as connection:
            [(standbys, waits)] = connection.execute(_WAITS_FOR_STANDBY).fetchall()
    except psycopg.Error as error:
        raise unusable(url, error) from None
    if not standbys or waits == "local":
        why = "synchronous_commit is local" if standbys else "synchronous_standby_names is empty"
        raise DatabaseRefused(
            f"{SETTING} names {len(hosts)} hosts, but a commit waits for one of them alone ({why}): "
            "after a failover the last tasks that were accepted would be gone, with the results that came "
            "last, and their runs would be killed; set synchronous_standby_names on the server, or accept "
            "the loss with database_may_lose_commits: true"
        )


def _connect(url: str, settings: ServerSettings, *, pooled: bool, **more: Any) -> TimedConnection:
    with _telling_shortage():
        connection = TimedConnection.connect(
            url, autocommit=True, prepare_threshold=None if pooled else 0, **{**_CONNECTION, **more}
        )
    connection.answer_seconds = settings.answer_seconds
    if not pooled:
        connection.execute(set_statement(settings, within="session"), prepare=False)
    return connection


@contextmanager
def _telling_shortage() -> Iterator[None]:
    """Raise StoreExhausted instead of the error with which a server, or its pooler, says that it has no
    connection left."""
    try:
        yield
    except psycopg.OperationalError as error:
        message = str(error).strip().rpartition("FATAL:")[2].strip()
        if any(words in message for words in _OUT_OF_CONNECTIONS):
            raise StoreExhausted(f"out of database connections: {message}") from error
        raise


def unusable(url: str, error: BaseException | None, named: str = SETTING) -> DatabaseRefused:
    return DatabaseRefused(
        f"cannot use PostgreSQL at {display_name(url)}: {str(error).strip()}; start it, or correct {named}"
    )


def display_name(url: str) -> str:
    """Return the host and the database that the URL names, without user and password."""
    settings = psycopg.conninfo.conninfo_to_dict(url)
    return f"{settings.get('host', 'the local socket')}, database {settings.get('dbname', '(default)')}"


class Hints:
    """Sends and receives hints between the processes on one PostgreSQL database: a hint says that something
    was committed. All methods are called on the event loop.

    A process that misses a hint finds the commit by polling. A notification has its own transaction: in the
    transaction of a commit it would hold a lock of the whole server until the commit is on disk. Only a
    leader that resigns, which is rare, notifies in the transaction of its resignation, so that no other
    process looks too early.
    """

    def __init__(self, connect: Callable[[], psycopg.Connection[Any]]) -> None:
        self._connect = connect
        self._connection: psycopg.Connection[Any] | None = None
        self._lost: Future[None]
        """Completed when the current connection is lost."""
        self._timer: TimerHandle | None = None
        self._sent_at = 0.0
        """Time of the last hint, by the event loop's clock."""
        self._asked_at = 0.0
        """Time of the last query whose answer is due, by the event loop's clock."""

    async def keep(self, on_hint: Callable[[], None], on_resigned: Callable[[], None]) -> None:
        """Listen until cancelled, and reconnect after a loss. `on_hint` is called when another process has
        committed, and `on_resigned` when a leader has resigned."""
        while True:
            with suppress(psycopg.Error, StoreExhausted):
                await self._listen(on_hint, on_resigned)
            await asyncio.sleep(RECONNECT_SECONDS)

    def send(self) -> None:
        """Have other processes notified soon, if there is a connection. Returns at once."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time(), self._sent_at + HINT_PAUSE_SECONDS), self._notify)

    async def _listen(self, on_hint: Callable[[], None], on_resigned: Callable[[], None]) -> None:
        connection = await self._opened()
        loop = asyncio.get_running_loop()
        self._connection, self._lost = connection, loop.create_future()
        # The loop watches a duplicate, because psycopg closes its own descriptor when the server disconnects.
        socket = os.dup(connection.fileno())
        loop.add_reader(socket, self._read, connection.pgconn, on_hint, on_resigned)
        try:
            # Hints that were sent before this connection listened are lost: look for commits once.
            on_hint()
            while not self._lost.done():
                self._probe(connection.pgconn)
                await asyncio.wait([self._lost], timeout=PROBE_SECONDS)
        finally:
            self._connection = None
            loop.remove_reader(socket)
            os.close(socket)
            connection.close()

    def _probe(self, connection: psycopg.pq.abc.PGconn) -> None:
        """Ask the server for a sign of life. The server must have answered by the next probe."""
        with self._noticing_loss():
            if connection.transaction_status == psycopg.pq.TransactionStatus.IDLE:
                self._asked_at = asyncio.get_running_loop().time()
                connection.send_query(b"")
            # A notification may have been sent just before this probe: its answer gets half an interval.
            elif asyncio.get_running_loop().time() > self._asked_at + PROBE_SECONDS / 2:
                raise psycopg.OperationalError("the server answers nothing")

    def _notify(self) -> None:
        self._timer = None
        self._sent_at = asyncio.get_running_loop().time()
        if self._connection is None:
            return
        if self._connection.pgconn.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            # A connection has one query at a time, and the last one is not answered yet: notify later.
            self.send()
            return
        with self._noticing_loss():
            self._asked_at = self._sent_at
            self._connection.pgconn.send_query(b"NOTIFY " + _CHANNEL.encode())

    def _read(
        self,
        connection: psycopg.pq.abc.PGconn,
        on_hint: Callable[[], None],
        on_resigned: Callable[[], None],
    ) -> None:
        is_hint = has_resigned = False
        with self._noticing_loss():
            connection.consume_input()
            while not connection.is_busy() and connection.get_result() is not None:
                pass  # Answers to our own notifications and probes say nothing.
            while (notice := connection.notifies()) is not None:
                # A process also receives its own notifications, which tell it nothing new.
                is_hint |= notice.be_pid != connection.backend_pid
                has_resigned |= notice.extra == _RESIGNED.encode()
        if is_hint:
            on_hint()
        if has_resigned:
            on_resigned()

    @contextmanager
    def _noticing_loss(self) -> Iterator[None]:
        """End the connection after any error of psycopg, by completing `_lost`."""
        try:
            yield
        except psycopg.Error:
            if not self._lost.done():
                self._lost.set_result(None)

    async def _opened(self) -> psycopg.Connection[Any]:
        # A task would be cancelled with the loop, and its connection would stay open: use the executor.
        opening = asyncio.get_running_loop().run_in_executor(None, self._connect)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close)
            raise


def _close(opening: Future[psycopg.Connection[Any]]) -> None:
    """Close a connection whose caller was cancelled while it was being opened."""
    with suppress(psycopg.Error, StoreExhausted):
        opening.result().close()
