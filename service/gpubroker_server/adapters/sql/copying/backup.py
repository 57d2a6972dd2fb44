"""The database of a backup: a SQLite file with all rows of a SQLite or PostgreSQL database, as they were at
one moment."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from msgspec import Struct
from sqlalchemy import Connection, Engine, create_engine, event, func, select, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from gpubroker_server.adapters.blobs.directory import sync_folder
from gpubroker_server.adapters.sql import reads, tables
from gpubroker_server.adapters.sql.copying.copied_tables import (
    Report,
    copy_all,
    copying_engine,
    plain_errors,
    take_empty_server,
)
from gpubroker_server.adapters.sql.database import (
    NEWEST,
    bring_to,
    check_not_moved,
    file_engine,
    is_file,
    path_of,
    server_engine,
    set_next_lineage,
)
from gpubroker_server.adapters.sql.session import SETTING, DatabaseRefused
from gpubroker_server.adapters.sql.sqlite import SqliteFile, connect_beside
from gpubroker_server.adapters.sql.system_tables import installation
from gpubroker_server.core.domain.units import Instant

_REVISION = text("SELECT version_num FROM alembic_version")


class BackupFacts(Struct, frozen=True):
    """Facts from the rows of a backup."""

    at: Instant
    """The time at which the rows were read, by the database's clock."""
    digests: frozenset[str]
    """The digests of all objects that rows name."""
    uploads: frozenset[str]
    """The digests that only the rows of uploaded objects name. Tenants may delete these objects at any
    time."""
    tasks: Mapping[str, int]
    """State -> the number of unfinished tasks in it."""


def write_backup(url: str, path: Path, report: Report) -> BackupFacts:
    """Write all rows to a new file. Services keep running meanwhile, because none of their locks is taken.
    Raises DatabaseRefused."""
    source = _source(url)
    file = SqliteFile(path)
    try:
        target = file_engine(file)
        bring_to(target, "head", str(path))
        with plain_errors("the backup", "the backup"), source.connect() as reading, target.begin() as writing:
            _check_schema(reading)
            facts = _facts_of(reading)
            copy_all(reading, writing, report)
    finally:
        file.close()
        Path(f"{path}.lock").unlink(missing_ok=True)
        source.dispose()
    return facts


def named_in(url: str, digests: frozenset[str]) -> frozenset[str]:
    """Return the ones of `digests` that a row of the database names now."""
    with _source(url).connect() as reading:
        return reads.referenced(reading, sorted(digests))


def restore_backup(
    backup: Path, url: str, bring_objects: Callable[[frozenset[str]], str], report: Report
) -> BackupFacts:
    """Restore a whole backup, or nothing, into a database that does not exist or is empty.

    `bring_objects` gets the digests that rows name, puts their objects in place, and returns the name of the
    directory of objects. The rows are written after that. Raises DatabaseRefused.
    """
    if is_file(url):
        path = path_of(url)
        with _locked(path):
            # The draft is complete and on disk before the rename, so a crash leaves all of it or nothing.
            facts = _prepare(backup, draft := path.with_name(f"{path.name}.restoring"), bring_objects)
            os.replace(draft, path)
            sync_folder(path.parent)
        return facts
    from gpubroker_server.adapters.sql import connections

    connections.check_server(url)
    bring_to(server_engine(url), "head", "the database")
    name = connections.display_name(url)
    with TemporaryDirectory(prefix="gpubroker-restore-") as folder:
        facts = _prepare(backup, draft := Path(folder) / "gpubroker.db", bring_objects)
        source, target = _beside(draft), copying_engine(url)
        with plain_errors("the restore", SETTING), source.connect() as reading, target.begin() as writing:
            take_empty_server(writing, name, SETTING)
            copy_all(reading, writing, report)
    return facts


def check_is_free(url: str) -> None:
    """Check that a backup may be restored into the file that the URL names. Raises DatabaseRefused. A server
    is checked only when the restore begins."""
    if is_file(url):
        with _locked(path_of(url)):
            pass


def _prepare(backup: Path, draft: Path, bring_objects: Callable[[frozenset[str]], str]) -> BackupFacts:
    """Make a durable copy of the backup with the newest schema and a new lineage."""
    # A restore that broke off may have left these files, and SQLite would apply an old log to the new copy.
    for ending in ("", "-wal", "-shm"):
        Path(f"{draft}{ending}").unlink(missing_ok=True)
    draft.touch(mode=0o600)
    shutil.copyfile(backup, draft)
    file = SqliteFile(draft)
    try:
        engine = file_engine(file)
        bring_to(engine, "head", str(backup))
        with engine.begin() as connection:
            facts = _facts_of(connection)
            set_next_lineage(connection, "gpubroker restore", server="")
            connection.execute(update(installation).values(blobs=bring_objects(facts.digests)))
    finally:
        file.close()
        Path(f"{draft}.lock").unlink()
    with draft.open("rb") as copied:
        os.fsync(copied.fileno())
    return facts


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock a path at which there is no database, so that no service creates one there."""
    file = SqliteFile(path)
    try:
        if path.exists():
            raise DatabaseRefused(
                f"{path} exists, and a backup is restored where there is no database: move it away together "
                f"with its -wal, or name another with {SETTING}"
            )
        yield
    finally:
        file.close()


def _source(url: str) -> Engine:
    """Open the database for transactions in which all reads see one state. Raises DatabaseRefused if the
    database must not, or cannot, be backed up."""
    if is_file(url):
        path = path_of(url)
        if not path.exists():
            raise DatabaseRefused(f"there is no {path}; name the database of the service with {SETTING}")
        engine = _beside(path)
        name = str(path)
    else:
        from gpubroker_server.adapters.sql import connections

        connections.check_server(url)
        engine = copying_engine(url).execution_options(
            isolation_level="REPEATABLE READ", postgresql_readonly=True
        )
        name = connections.display_name(url)
    with plain_errors("the backup", "the backup"):
        check_not_moved(engine, name)
    return engine


def _beside(path: Path) -> Engine:
    engine = create_engine("sqlite://", creator=partial(connect_beside, path), poolclass=NullPool)

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine


def _check_schema(reading: Connection) -> None:
    try:
        [schema] = reading.execute(_REVISION).scalars()
    except DBAPIError:
        schema = "none"
    if schema != NEWEST:
        raise DatabaseRefused(
            f"the schema of the database is {schema}, and this gpubroker knows {NEWEST}: back it up with the "
            "release that serves it, or start the service with this one first, which brings it up to date"
        )


def _facts_of(connection: Connection) -> BackupFacts:
    task = tables.task.c
    counted = select(task.state, func.count()).where(~task.finished).group_by(task.state)
    named = {
        column: frozenset(connection.execute(select(column).where(column.is_not(None)).distinct()).scalars())
        for column in tables.DIGESTS
    }
    uploads = named.pop(tables.stored_object.c.digest)
    others = frozenset[str]().union(*named.values())
    return BackupFacts(
        at=reads.now(connection),
        digests=uploads | others,
        uploads=uploads - others,
        tasks={row[0]: row[1] for row in connection.execute(counted)},
    )
