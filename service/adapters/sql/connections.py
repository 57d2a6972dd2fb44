"""How connections to PostgreSQL are made, and what each sort of them asks of the server.

A pooler that hands connections out by transaction (`pooled`) keeps nothing of one for the next: then wishes
are said again at the begin of each transaction, no statement stays prepared, and nobody listens.
"""

import os
import socket
from collections.abc import Mapping
from typing import Any, Literal

import psycopg

from service.adapters.sql.session import DatabaseRefused

Wishes = Mapping[str, str]
"""Settings of the server by name."""

WRITER: Wishes = {
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
TERM: Wishes = {**WRITER, "lock_timeout": "2s", "statement_timeout": "2s"}
"""An answer that comes later is of no use to a leader."""
READER: Wishes = {"statement_timeout": "30s", "default_transaction_read_only": "on"}
_LISTENER: Wishes = {"idle_session_timeout": "0", "synchronous_commit": "off"}
"""A word has nothing that would have to be on disk."""

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


def wished(wishes: Wishes, *, within: Literal["session", "transaction"]) -> str:
    """One statement that says all wishes. A commit of a writer is durable whatever the server's default."""
    local = "true" if within == "transaction" else "false"
    said = [f"set_config('{name}', '{value}', {local})" for name, value in wishes.items()]
    if "synchronous_commit" not in wishes:
        said.append(f"{_DURABLE}{local})")
    return f"SELECT {', '.join(said)}"


def connect_writer(url: str, wishes: Wishes = WRITER, *, pooled: bool = False) -> psycopg.Connection[Any]:
    """A primary that has become a standby, or was made read-only, is of no use: of several hosts in the URL
    the next one is asked."""
    return _connect(url, wishes, pooled=pooled, target_session_attrs="read-write")


def connect_reader(url: str, *, pooled: bool = False) -> psycopg.Connection[Any]:
    return _connect(url, READER, pooled=pooled)


def connect_listener(url: str) -> psycopg.Connection[Any]:
    connection = _connect(url, _LISTENER, pooled=False)
    connection.execute("LISTEN gpubroker")
    return connection


def connect_mover(url: str) -> psycopg.Connection[Any]:
    """Nobody waits for it: a server that is busy with what it was sent may take its time."""
    patient = {**_CONNECTION, "tcp_user_timeout": 60_000, "application_name": "gpubroker migrate-data"}
    return psycopg.connect(url, **patient)


def connect_migrator(url: str) -> psycopg.Connection[Any]:
    return psycopg.connect(url, **_CONNECTION)


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


def _connect(url: str, wishes: Wishes, *, pooled: bool, **more: Any) -> psycopg.Connection[Any]:
    connection: psycopg.Connection[Any] = psycopg.connect(
        url, autocommit=True, prepare_threshold=None if pooled else 0, **_CONNECTION, **more
    )
    if not pooled:
        connection.execute(wished(wishes, within="session"), prepare=False)
    return connection


def told(url: str) -> str:
    """For people: without the password."""
    settings = psycopg.conninfo.conninfo_to_dict(url)
    return f"{settings.get('host', 'the local socket')}, database {settings.get('dbname', '(default)')}"
