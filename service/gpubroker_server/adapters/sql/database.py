"""Open the database that a URL names. The database is checked, locked if it is a file, migrated to the newest
schema, and refused if `move_data` has moved its data away.

psycopg is imported only where a PostgreSQL server is used: a service on SQLite runs without psycopg.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from sqlalchemy import Connection, Engine, create_engine, delete, event, insert, select, text, update
from sqlalchemy.engine import ExceptionContext, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError
from sqlalchemy.pool import NullPool, QueuePool

from gpubroker_server.adapters.sql.reads import leader, now
from gpubroker_server.adapters.sql.session import READERS, SETTING, DatabaseRefused, Session
from gpubroker_server.adapters.sql.sqlite import SqliteFile, SqliteSession
from gpubroker_server.adapters.sql.system_tables import SCHEMA, MoveStage, audit, leadership, relocation
from gpubroker_server.core.domain.leader_term import next_lineage
from gpubroker_server.core.domain.units import Lineage
from gpubroker_server.ports.store import Clock, StoreExhausted

if TYPE_CHECKING:
    from gpubroker_server.adapters.sql.connections import Hints

NEWEST = f"{SCHEMA:04}"
_REVISION = text("SELECT version_num FROM alembic_version")
HOLD_SECONDS = 4.0
"""Time for which a starting process tries to open all its connections. A closed connection counts until the
server has ended its process, which a busy server does late, and this process or its predecessor has closed
several."""


class Database(Struct, frozen=True):
    session: Session
    readers: Engine
    begin_snapshot: str
    """SQL that begins a transaction in which all reads see one state."""
    release: Callable[[], None]
    """Unlocks the database. Called after `session` and `readers` are closed."""
    hints: "Callable[[], Hints] | None" = None
    """Makes the object that sends and receives hints; None if processes do not notify each other."""
    is_shared: bool = False
    """True if other processes may write to the database."""
    connect_term: Callable[[], Session] | None = None
    """Opens a second writing connection, for the leader's row; None if there can be only one."""


def open_database(
    url: str,
    *,
    pooled: bool = False,
    may_lose_commits: bool = False,
    leads: bool = True,
    clock: Clock | None = None,
) -> Database:
    """Open the database, and migrate it. A server must have room for all connections that a process keeps.

    `pooled` is True if a pooler assigns connections by transaction. `may_lose_commits` accepts several hosts
    of which none waits for another. `leads` is True if the process needs a connection for the leader's row.
    `clock` is the clock of a file, by default the wall clock; a server has its own clock. Raises
    DatabaseRefused.
    """
    if is_file(url):
        return _open_file(path_of(url), clock)
    import psycopg

    from gpubroker_server.adapters.sql import connections

    try:
        return _open_server(url, pooled=pooled, may_lose_commits=may_lose_commits, leads=leads)
    except StoreExhausted as short:
        raise DatabaseRefused(
            f"PostgreSQL at {connections.display_name(url)} is {short}; this process keeps "
            f"{connections_kept(pooled=pooled, leads=leads)} connections: 1 that writes, {READERS} that read"
            f"{'' if pooled else ', 1 that listens'}{', 1 for the leader' if leads else ''}; "
            f"{connections.GET_CONNECTIONS}"
        ) from None
    except psycopg.OperationalError as error:
        raise connections.unusable(url, error) from None
    except OperationalError as error:
        raise connections.unusable(url, error.orig) from None


def migrate(url: str, revision: str, *, drop_everything: bool = False) -> str:
    """Bring the schema to a revision, such as `head`, `base` or `0003`. Returns the revision that is reached.

    A downgrade is refused while other processes use the database, and a downgrade to `base` without
    `drop_everything`. Raises DatabaseRefused, and then has changed nothing.
    """
    if not is_file(url):
        from gpubroker_server.adapters.sql import connections

        connections.check_server(url)
        return bring_to(server_engine(url), revision, "the database", drop_everything=drop_everything)
    file = SqliteFile(path_of(url))
    try:
        return bring_to(file_engine(file), revision, str(file.path), drop_everything=drop_everything)
    finally:
        file.close()


def begin_lineage(url: str) -> Lineage:
    """Begin a new lineage of the database, under a new term. Raises DatabaseRefused."""
    if not is_file(url):
        from gpubroker_server.adapters.sql import connections

        connections.check_server(url)
        return _begin_lineage(server_engine(url), "the database")
    if not path_of(url).exists():
        raise DatabaseRefused(f"there is no {path_of(url)}; name the restored file with {SETTING}")
    file = SqliteFile(path_of(url))
    try:
        return _begin_lineage(file_engine(file), str(file.path))
    finally:
        file.close()


def _begin_lineage(engine: Engine, name: str) -> Lineage:
    bring_to(engine, "head", name)
    with engine.begin() as connection:
        return set_next_lineage(connection, "gpubroker new-lineage")


def set_next_lineage(connection: Connection, reason: str, **values: str) -> Lineage:
    """Begin a lineage under a new term. `values` are further columns of the leader's row."""
    row_before = leader(connection)
    lineage = next_lineage(row_before.lineage, row_before.at)
    # The higher term refuses commits of an earlier leader. Without a lease the next leader need not wait.
    row = {"term": leadership.c.term + 1, "lease_until": 0.0, "lineage": lineage, **values}
    connection.execute(update(leadership).values(row))
    about = {"at": row_before.at, "tenant": "", "actor": "operator", "action": "lineage.begun"}
    connection.execute(insert(audit).values(**about, subject=str(lineage), reason=reason))
    return lineage


def bring_to(engine: Engine, revision: str, name: str, *, drop_everything: bool = False) -> str:
    """Migrate up or down to a revision, such as `head`, `base` or `0003`. Returns the revision that is
    reached.

    `name` is the database's name in error messages. Raises DatabaseRefused, and then has changed nothing.
    """
    if revision == "head" and _is_newest(engine):
        return NEWEST
    # alembic takes a tenth of a start to load, and few starts have anything to migrate.
    from gpubroker_server.adapters.sql.migrate import migrate_to

    return migrate_to(engine, revision, name, drop_everything=drop_everything)


def _is_newest(engine: Engine) -> bool:
    try:
        with engine.connect() as connection:
            return connection.execute(_REVISION).scalars().all() == [NEWEST]
    except DBAPIError:
        return False  # The schema is missing or unusable: the migration says why.


class MoveMark(Struct, frozen=True):
    """A database's record of a move of its data. `move` is an id that the two databases of a move share."""

    move: str
    stage: MoveStage
    other: str


def read_mark(connection: Connection) -> MoveMark | None:
    row = relocation.c
    mark = connection.execute(select(row.move, row.stage, row.other)).one_or_none()
    return None if mark is None else MoveMark(mark[0], MoveStage(mark[1]), mark[2])


def set_mark(connection: Connection, mark: MoveMark) -> None:
    connection.execute(delete(relocation))
    values = {"id": 1, "move": mark.move, "stage": mark.stage.value, "other": mark.other}
    connection.execute(insert(relocation).values(**values, at=now(connection)))


def check_not_moved(engine: Engine, name: str) -> None:
    """Check that the database may be served. Raises DatabaseRefused if its data has been moved away, or a
    move to it is not complete."""
    with engine.connect() as connection:
        mark = read_mark(connection)
    match mark:
        case MoveMark(stage=MoveStage.GONE, other=other):
            raise DatabaseRefused(
                f"{name} has been moved to {other}; name that one with database_url (or --database-url), or "
                "move this one away"
            )
        case MoveMark(stage=MoveStage.COMING, other=other):
            raise DatabaseRefused(
                f"the move of {other} to {name} is not finished; run the same `gpubroker migrate-data` "
                "again, or name another database with database_url (or --database-url)"
            )


def is_file(url: str, named: str = SETTING) -> bool:
    """Return True if the URL names a SQLite file, and False if it names a PostgreSQL server. `named` is the
    name of the setting in error messages. Raises DatabaseRefused for any other URL, and for a server if
    psycopg is not installed."""
    if url.startswith(("postgresql://", "postgres://")):
        if find_spec("psycopg") is None:
            raise DatabaseRefused(
                f"{named} is a PostgreSQL database, and psycopg is not installed: "
                "pip install 'gpubroker-server[postgres]'"
            )
        return False
    if url.startswith("sqlite:///"):
        return True
    raise DatabaseRefused(f"{named} must begin with sqlite:/// or postgresql://, but is {_beginning(url)}")


def _beginning(url: str) -> str:
    """Return the beginning of the URL for error messages, without the part that may have a password."""
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


def _open_file(path: Path, clock: Clock | None) -> Database:
    file = SqliteFile(path, clock)
    try:
        bring_to(file_engine(file), "head", str(path))
        check_not_moved(file_engine(file), str(path))
        readers = _readers("sqlite://", file.reader)
        session = SqliteSession(file.writer(), clock)
        session.end_terms()
        return Database(session, readers, "BEGIN", file.close)
    except BaseException:
        file.close()
        raise


def file_engine(file: SqliteFile) -> Engine:
    """Return an engine for migrations. It has one connection, and its transactions include changes of
    tables."""
    engine = create_engine("sqlite://", creator=file.writer, poolclass=NullPool)

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def connections_kept(*, pooled: bool, leads: bool) -> int:
    """Return the number of connections that a process keeps to PostgreSQL: one that writes, READERS that
    read, one that listens unless `pooled`, and one for the leader's row if `leads`."""
    return 1 + READERS + (not pooled) + leads


def _open_server(url: str, *, pooled: bool, may_lose_commits: bool, leads: bool) -> Database:
    """Open a PostgreSQL database. Raises StoreExhausted, DatabaseRefused."""
    from gpubroker_server.adapters.sql import connections, postgres

    connections.check_server(url)
    if not may_lose_commits:
        connections.check_waits_for_standby(url)
    # The session is opened before the revision is read. A process that migrates down either sees the session
    # and refuses, or this process finds the new revision (`migrate._OTHERS`).
    session = postgres.PostgresSession(url, pooled=pooled)
    try:
        bring_to(server_engine(url), "head", "the database")
        check_not_moved(server_engine(url), connections.display_name(url))
    except BaseException:
        session.close()
        raise
    readers = _readers("postgresql+psycopg://", partial(connections.connect_reader, url, pooled=pooled))

    @event.listens_for(readers, "handle_error")
    def _notice_disconnects(context: ExceptionContext) -> None:
        if isinstance(context.original_exception, postgres.GOODBYES):
            context.is_disconnect = True

    snapshot = "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY"
    term = partial(postgres.term_session, url, pooled=pooled)
    listen = None if pooled else partial(connections.connect_listener, url)
    hints = None if listen is None else partial(connections.Hints, listen)
    try:
        _hold_all(readers, *([] if listen is None else [listen]), *([term] if leads else []))
    except BaseException:
        session.close()
        readers.dispose()
        raise
    return Database(session, readers, snapshot, lambda: None, hints, is_shared=True, connect_term=term)


def _hold_all(readers: Engine, *others: Callable[[], Any]) -> None:
    """Open all connections of the process at once, so that the process starts with all of them or not at all.
    The readers stay open in their pool; the others are closed, and opened again when they are needed. Raises
    what opening a connection raises."""
    opening = [readers.connect] * READERS + list(others)
    until = time.monotonic() + HOLD_SECONDS
    with ThreadPoolExecutor(len(opening)) as threads:
        opened = [threads.submit(_connect_by, until, connect) for connect in opening]
    faults = [fault for attempt in opened if (fault := attempt.exception()) is not None]
    for attempt in opened:
        if attempt.exception() is None:
            attempt.result().close()
    if faults:
        # Of several faults raise a shortage of connections, whose message names a remedy.
        raise next((fault for fault in faults if isinstance(fault, StoreExhausted)), faults[0])


def _connect_by(until: float, connect: Callable[[], Any]) -> Any:
    import psycopg

    while True:
        try:
            return connect()
        except (StoreExhausted, psycopg.OperationalError, OperationalError):
            if time.monotonic() >= until:
                raise
        time.sleep(0.1)


def _readers(dialect: str, connect: Callable[[], Any]) -> Engine:
    return create_engine(dialect, creator=connect, poolclass=QueuePool, pool_size=READERS, max_overflow=0)


def server_engine(url: str) -> Engine:
    from gpubroker_server.adapters.sql import connections

    return create_engine(
        "postgresql+psycopg://", creator=partial(connections.connect_migrator, url), poolclass=NullPool
    )
