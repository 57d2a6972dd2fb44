"""From a URL to an open database: checked, locked if it is a file, and brought to the newest schema."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import ExceptionContext, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import NullPool, QueuePool

from gpubroker_server.adapters.sql import connections, postgres
from gpubroker_server.adapters.sql.relocation import check_served_here
from gpubroker_server.adapters.sql.schema import bring_to
from gpubroker_server.adapters.sql.session import SETTING, DatabaseRefused, Session
from gpubroker_server.adapters.sql.sqlite import SqliteFile, SqliteSession

READERS = 4
"""Threads and connections that read; each query takes one for its time."""


@dataclass(frozen=True, slots=True)
class Database:
    session: Session
    readers: Engine
    begin_snapshot: str
    """SQL that begins a transaction in which all reads see one state."""
    release: Callable[[], None]
    """Let others open it; after the session and the readers are closed."""
    listener: Callable[[], Any] | None = None
    """Opens a connection that listens for wake-ups; None where nobody else writes, or nobody notifies."""
    is_shared: bool = False
    """Other processes may write to it."""
    connect_term: Callable[[], Session] | None = None
    """One more connection, for the leader's row; None where there can be no second one that writes."""


def open_database(url: str, *, pooled: bool = False) -> Database:
    """Open and migrate. Raises DatabaseRefused."""
    return _open_file(path_of(url)) if is_file(url) else _open_server(url, pooled=pooled)


def migrate(url: str, revision: str, *, drop_everything: bool = False) -> str:
    """Bring the schema to a revision (`head`, `base`, `0003`, ...); the revision it has now.

    Going back needs the database for itself, and a word of its own where nothing would be left. Raises
    DatabaseRefused; the database is unchanged.
    """
    if not is_file(url):
        connections.check_server(url)
        return bring_to(server_engine(url), revision, "the database", drop_everything=drop_everything)
    file = SqliteFile(path_of(url))
    try:
        return bring_to(file_engine(file), revision, str(file.path), drop_everything=drop_everything)
    finally:
        file.close()


def is_file(url: str, named: str = SETTING) -> bool:
    """`named`: what a refusal calls the place where it was given. Raises DatabaseRefused."""
    if url.startswith(("postgresql://", "postgres://")):
        return False
    if url.startswith("sqlite:///"):
        return True
    raise DatabaseRefused(f"{named} must begin with sqlite:/// or postgresql://, but is {_beginning(url)}")


def _beginning(url: str) -> str:
    """Without what may be a password."""
    scheme, colon, _ = url.partition(":")
    return f'"{scheme}:..."' if colon else "another text" if url else "empty"


def path_of(url: str) -> Path:
    try:
        name = make_url(url).database
    except ArgumentError:
        name = None
    if not name or name == ":memory:":
        raise DatabaseRefused(
            "database_url (or --database-url) must name a file, such as sqlite:////var/lib/gpubroker/gpubroker.db"
        )
    return Path(name)


def _open_file(path: Path) -> Database:
    file = SqliteFile(path)
    try:
        bring_to(file_engine(file), "head", str(path))
        check_served_here(file_engine(file), str(path))
        readers = _readers("sqlite://", file.reader)
        session = SqliteSession(file.writer())
        session.end_terms()
        return Database(session, readers, "BEGIN", file.close)
    except BaseException:
        file.close()
        raise


def file_engine(file: SqliteFile) -> Engine:
    """For migrations: one connection, and real transactions around changes of tables as well."""
    engine = create_engine("sqlite://", creator=file.writer, poolclass=NullPool)

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def _open_server(url: str, *, pooled: bool) -> Database:
    connections.check_server(url)
    session = postgres.PostgresSession(url, pooled=pooled)
    try:
        bring_to(server_engine(url), "head", "the database")
        check_served_here(server_engine(url), connections.told(url))
    except BaseException:
        session.close()
        raise
    readers = _readers("postgresql+psycopg://", partial(connections.connect_reader, url, pooled=pooled))

    @event.listens_for(readers, "handle_error")
    def _hear_goodbyes(context: ExceptionContext) -> None:
        if isinstance(context.original_exception, postgres.GOODBYES):
            context.is_disconnect = True

    snapshot = "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY"
    listener = None if pooled else partial(connections.connect_listener, url)
    term = partial(postgres.term_session, url, pooled=pooled)
    return Database(session, readers, snapshot, lambda: None, listener, is_shared=True, connect_term=term)


def _readers(dialect: str, connect: Callable[[], Any]) -> Engine:
    return create_engine(dialect, creator=connect, poolclass=QueuePool, pool_size=READERS, max_overflow=0)


def server_engine(url: str) -> Engine:
    return create_engine(
        "postgresql+psycopg://", creator=partial(connections.connect_migrator, url), poolclass=NullPool
    )
