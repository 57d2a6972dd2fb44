"""How connections to PostgreSQL are made, and what each sort of them asks of the server.

Nobody waits for ever for an answer that does not come. The server's limits end statements that take too long,
and those of the connection end what has no other side. Neither helps where something in between takes every
byte and passes none on: so who waits gives up by itself.

A pooler that hands connections out by transaction (`pooled`) keeps nothing of one for the next: then wishes
are said again at the begin of each transaction, no statement stays prepared, and nobody listens.
"""

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

import psycopg
from psycopg.abc import PQGen

from gpubroker_server.adapters.clock import boot_seconds
from gpubroker_server.adapters.sql.session import SETTING, DatabaseRefused


class Batch(psycopg.Pipeline):
    """Statements leave together, when somebody waits for an answer. The library sends each one at once: two
    system calls here, and a server that is woken for each."""

    def _enqueue_sync(self) -> None:
        super()._enqueue_sync()
        self._hand_over()

    def _communicate_gen(self) -> PQGen[None]:
        if not self.command_queue:
            yield from super()._communicate_gen()

    def _fetch_gen(self, *, flush: bool) -> PQGen[None]:
        self._hand_over()
        yield from super()._fetch_gen(flush=flush)

    def _hand_over(self) -> None:
        """To the driver, which sends when it is told to, or has 64 KiB."""
        while self.command_queue:
            self.command_queue.popleft()()


@dataclass(frozen=True)
class Wishes:
    settings: Mapping[str, str]
    """Of the server, by name."""
    patience_seconds: float
    """More than the server may take to say anything: who has heard nothing for so long hangs up."""


_WRITER = {
    "idle_in_transaction_session_timeout": "2s",
    "lock_timeout": "5s",
    "statement_timeout": "10s",
    "idle_session_timeout": "0",
    # The server notices within seconds when the machine of whoever writes is gone, and lets go of its locks.
    "tcp_keepalives_idle": "1",
    "tcp_keepalives_interval": "1",
    # Every statement here finds its rows by key. A plan made while a table was small must not scan it later.
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
}
WRITER = Wishes(_WRITER, patience_seconds=11.0)
TERM = Wishes({**_WRITER, "lock_timeout": "2s", "statement_timeout": "2s"}, patience_seconds=2.5)
"""An answer that comes later is of no use to a leader."""
READER = Wishes({"statement_timeout": "30s", "default_transaction_read_only": "on"}, patience_seconds=6.0)
"""What takes long is long because it is much, and comes bit by bit."""
_LISTENER = Wishes({"idle_session_timeout": "0", "synchronous_commit": "off"}, patience_seconds=2.5)
"""A word has nothing that would have to be on disk."""
_LOOK_SECONDS = 0.1

_DURABLE = (
    "set_config('synchronous_commit', CASE current_setting('synchronous_commit') WHEN 'off' THEN 'on' "
    "ELSE current_setting('synchronous_commit') END, "
)
"""Whatever else an administrator has chosen is kept."""

_CONNECTION: Mapping[str, Any] = {
    "connect_timeout": 2,
    "tcp_user_timeout": 2000,
    "keepalives": 1,
    "keepalives_idle": 1,
    "keepalives_interval": 1,
    "keepalives_count": 2,
    "application_name": f"gpubroker, process {os.getpid()} on {socket.gethostname()}",
}
_OLDEST = 140000


class Line(psycopg.Connection[Any]):
    """Hangs up when the server says nothing for too long; whoever waits then finds the connection lost."""

    patience_seconds = inf

    def wait(self, gen: PQGen[Any], interval: float = _LOOK_SECONDS, *limit: Any, **limits: Any) -> Any:
        return super().wait(self._while_patient(gen), interval, *limit, **limits)

    @contextmanager
    def pipeline(self) -> Iterator[psycopg.Pipeline]:
        self._pipeline = self._pipeline or Batch(self)
        with super().pipeline() as pipeline:
            yield pipeline

    def _while_patient(self, gen: PQGen[Any]) -> PQGen[Any]:
        """As `gen`, which yields what it waits for and is sent what came, now and then that nothing did."""
        try:
            awaited = next(gen)
            heard_at = boot_seconds()
            while True:
                came = yield awaited
                if came:
                    heard_at = boot_seconds()
                elif boot_seconds() - heard_at > self.patience_seconds:
                    self.close()
                    raise psycopg.OperationalError(f"no answer for {self.patience_seconds:g} s")
                awaited = gen.send(came)
        except StopIteration as done:
            return done.value


def wished(wishes: Wishes, *, within: Literal["session", "transaction"]) -> str:
    """One statement that says all wishes. A commit of a writer is durable whatever the server's default."""
    local = "true" if within == "transaction" else "false"
    said = [f"set_config('{name}', '{value}', {local})" for name, value in wishes.settings.items()]
    if "synchronous_commit" not in wishes.settings:
        said.append(f"{_DURABLE}{local})")
    return f"SELECT {', '.join(said)}"


def connect_writer(url: str, wishes: Wishes = WRITER, *, pooled: bool = False) -> Line:
    """A primary that has become a standby, or was made read-only, is of no use: of several hosts in the URL
    the next one is asked."""
    return _connect(url, wishes, pooled=pooled, target_session_attrs="read-write")


def connect_reader(url: str, *, pooled: bool = False) -> Line:
    return _connect(url, READER, pooled=pooled)


def connect_listener(url: str) -> Line:
    connection = _connect(url, _LISTENER, pooled=False)
    connection.execute("LISTEN gpubroker")
    return connection


def connect_mover(url: str) -> psycopg.Connection[Any]:
    """Nobody waits for it: a server that is busy with what it was sent may take its time."""
    patient = {**_CONNECTION, "tcp_user_timeout": 60_000, "application_name": "gpubroker migrate-data"}
    return psycopg.connect(url, **patient)


def connect_migrator(url: str) -> psycopg.Connection[Any]:
    return psycopg.connect(url, **_CONNECTION)


def check_server(url: str, named: str = SETTING) -> None:
    """Raises DatabaseRefused when the server cannot be reached, is too old, or only repeats another. `named`:
    what that calls the place where it was given."""
    try:
        psycopg.conninfo.conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        raise DatabaseRefused(
            f"{named} is no address of PostgreSQL; write postgresql://user@host:port/database"
        ) from None
    try:
        with _connect(url, READER, pooled=True) as connection:
            version = connection.info.server_version
            standby = connection.execute("SELECT pg_is_in_recovery()").fetchone()
    except psycopg.Error as error:
        raise DatabaseRefused(
            f"cannot use PostgreSQL at {told(url)}: {str(error).strip()}; start it, or correct {named}"
        ) from None
    if version < _OLDEST:
        raise DatabaseRefused(f"PostgreSQL at {told(url)} is {version // 10000}; 14 is the oldest")
    if standby == (True,):
        raise DatabaseRefused(
            f"PostgreSQL at {told(url)} is a read-only standby; name the primary in {named}"
        )


def _connect(url: str, wishes: Wishes, *, pooled: bool, **more: Any) -> Line:
    connection = Line.connect(
        url, autocommit=True, prepare_threshold=None if pooled else 0, **_CONNECTION, **more
    )
    connection.patience_seconds = wishes.patience_seconds
    if not pooled:
        connection.execute(wished(wishes, within="session"), prepare=False)
    return connection


def told(url: str) -> str:
    """For people: without the password."""
    settings = psycopg.conninfo.conninfo_to_dict(url)
    return f"{settings.get('host', 'the local socket')}, database {settings.get('dbname', '(default)')}"
