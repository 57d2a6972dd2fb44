"""A SQLite file: whose it is, who may open it, and what is said when it is not ours."""

import asyncio
import fcntl
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from gpubroker_server.adapters.sql.session import DatabaseRefused
from gpubroker_server.adapters.sql.sqlite import APPLICATION_ID, SqliteFile
from gpubroker_server.adapters.sql.store import migrate, open_store

from tests.contracts.scenes import a_submission
from tests.patience import PATIENCE_SECONDS


async def refusal(url: str) -> str:
    with pytest.raises(DatabaseRefused) as refused:
        await open_store(url)
    return str(refused.value)


async def made(path: Path) -> str:
    """A database of ours with one task in it; its URL."""
    store = await open_store(f"sqlite:///{path}")
    await store.submit(a_submission("t1"))
    await store.close()
    return f"sqlite:///{path}"


async def test_the_file_has_mode_0600_and_our_application_id(tmp_path: Path) -> None:
    path = tmp_path / "gpubroker.db"
    await made(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


async def test_write_ahead_log_grows_while_a_reader_keeps_it_and_shrinks_then(
    tmp_path: Path,
) -> None:
    path = tmp_path / "gpubroker.db"
    store = await open_store(await made(path))
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM task").fetchall()
    await store.submit(a_submission("t2"))
    before = await store.log_bytes()
    for number in range(30):
        await store.submit(a_submission(f"kept-{number}"))
    assert await store.log_bytes() > before > 0
    reader.execute("COMMIT")
    reader.close()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await store.log_bytes():  # noqa: ASYNC110  # until the writer is idle
            await asyncio.sleep(0.02)
    await store.close()


def test_every_commit_of_the_writer_is_synced_to_disk(tmp_path: Path) -> None:
    file = SqliteFile(tmp_path / "gpubroker.db")
    writer = file.writer()
    assert writer.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
    writer.close()
    file.close()


@contextmanager
def with_a_log(path: Path) -> Iterator[SqliteFile]:
    """A file whose newest row is in its write-ahead log alone, where a checkpoint would take it from."""
    file = SqliteFile(path)
    writer = file.writer()
    writer.execute("CREATE TABLE t (x)")
    writer.execute("INSERT INTO t VALUES (1)")
    yield file
    writer.close()
    file.close()


def bytes_of(path: Path) -> tuple[bytes, bytes]:
    """The file and its write-ahead log."""
    return path.read_bytes(), path.with_name(f"{path.name}-wal").read_bytes()


@pytest.mark.parametrize(
    "act",
    ["INSERT INTO t VALUES (2)", "PRAGMA wal_checkpoint(PASSIVE)", "PRAGMA wal_checkpoint(TRUNCATE)"],
)
def test_a_reader_can_neither_write_nor_checkpoint(tmp_path: Path, act: str) -> None:
    path = tmp_path / "gpubroker.db"
    with with_a_log(path) as file:
        before = bytes_of(path)
        reader = file.reader()
        assert reader.execute("SELECT x FROM t").fetchall() == [(1,)]
        with pytest.raises(sqlite3.OperationalError):
            reader.execute(act)
        reader.close()
        assert bytes_of(path) == before


def test_a_reader_that_is_the_last_to_close_leaves_the_log_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "gpubroker.db"
    with with_a_log(path):
        for name in ("gpubroker.db", "gpubroker.db-wal"):  # what a crash leaves of it
            shutil.copy(tmp_path / name, tmp_path / f"after-{name}")
    after = tmp_path / "after-gpubroker.db"
    before = bytes_of(after)
    file = SqliteFile(after)
    reader = file.reader()
    assert reader.execute("SELECT x FROM t").fetchall() == [(1,)]
    reader.close()
    assert bytes_of(after) == before
    file.close()


def test_a_file_gets_one_writing_connection_at_a_time(tmp_path: Path) -> None:
    file = SqliteFile(tmp_path / "gpubroker.db")
    first = file.writer()
    with pytest.raises(RuntimeError, match="only one"):
        file.writer()
    first.close()
    file.writer().close()
    file.close()


async def test_a_store_has_one_writing_connection_and_the_others_cannot_write(tmp_path: Path) -> None:
    """As the service has them open: looked up among this process's own open files."""
    path = tmp_path / "gpubroker.db"
    store = await open_store(f"sqlite:///{path}")
    await asyncio.gather(*(store.submit(a_submission(f"t{n}")) for n in range(20)))
    await asyncio.gather(*(store.head() for _ in range(20)))
    modes = [how_opened(number) for number in open_files(path)]
    assert modes.count(os.O_RDWR) == 1
    assert modes.count(os.O_RDONLY) >= 1
    await store.close()


def open_files(path: Path) -> list[int]:
    """Descriptors of this process that name the file."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [int(link.name) for link in links if os.path.realpath(link) == str(path)]


def how_opened(descriptor: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE


async def test_a_closed_file_leaves_nothing_in_its_write_ahead_log(tmp_path: Path) -> None:
    await made(tmp_path / "gpubroker.db")
    wal = tmp_path / "gpubroker.db-wal"
    assert not wal.exists() or wal.stat().st_size == 0


async def test_another_programs_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "photos.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE photo (id INTEGER)")
    connection.close()
    before = path.read_bytes()
    text = await refusal(f"sqlite:///{path}")
    assert "is not a gpubroker database, it is the SQLite database of another program" in text
    assert "--database-url" in text
    assert path.read_bytes() == before


async def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("buy milk\n" * 100)
    assert "it is not a SQLite database" in await refusal(f"sqlite:///{path}")
    assert path.read_text() == "buy milk\n" * 100


async def test_an_empty_file_becomes_a_database(tmp_path: Path) -> None:
    path = tmp_path / "gpubroker.db"
    path.touch()
    await made(path)


async def test_a_damaged_database_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "gpubroker.db"
    url = await made(path)
    with path.open("r+b") as file:
        file.seek(100)
        file.write(os.urandom(path.stat().st_size - 100))
    assert "restore it from a backup" in await refusal(url)


async def test_a_second_process_is_refused_with_the_id_of_the_first(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'gpubroker.db'}"
    store = await open_store(url)
    code = (
        "import asyncio, sys\n"
        "from gpubroker_server.adapters.sql.store import DatabaseRefused, migrate, open_store\n"
        "for act in (lambda: asyncio.run(open_store(sys.argv[1])), lambda: migrate(sys.argv[1], 'head')):\n"
        "    try: act()\n"
        "    except DatabaseRefused as refused: print(refused)\n"
    )
    ran = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code, url], capture_output=True, text=True, check=True
    )
    lines = ran.stdout.splitlines()
    assert len(lines) == 2
    assert all(f"is in use by process {os.getpid()}; stop that one first" in line for line in lines)
    await store.close()
    await made(tmp_path / "gpubroker.db")


async def test_a_newer_schema_that_is_not_for_this_software_is_refused_and_kept(tmp_path: Path) -> None:
    url = await made(tmp_path / "gpubroker.db")
    with sqlite3.connect(tmp_path / "gpubroker.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.execute("UPDATE log_head SET compatible_from = 9999")
    connection.close()
    text = await refusal(url)
    assert "has schema 9999: a newer gpubroker took away what this one uses" in text
    assert "upgrade gpubroker to one of schema 9999 or newer" in text
    with pytest.raises(DatabaseRefused, match="newer gpubroker"):
        migrate(url, "head")


@pytest.mark.parametrize("below", ["missing/gpubroker.db", "file/gpubroker.db", "."])
async def test_a_path_that_cannot_be_a_file_is_refused_by_name(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    text = await refusal(f"sqlite:///{tmp_path / below}")
    assert f"cannot open the database {tmp_path}" in text
    assert "--database-url" in text


@pytest.mark.parametrize(
    "url", ["mysql://host/x", "gpubroker.db", "sqlite://", "sqlite:///:memory:", "sqlite:///"]
)
async def test_an_address_of_no_known_kind_is_refused(url: str) -> None:
    assert "database_url (or --database-url) must" in await refusal(url)


async def test_an_address_that_cannot_be_read_is_refused_without_its_password() -> None:
    text = await refusal("postgresql://me:geheim@[host/none")
    assert "write postgresql://user@host:port/database" in text
    assert "geheim" not in text


async def test_unreachable_server_is_refused_quickly_and_without_its_password() -> None:
    text = await refusal("postgresql://me:geheim@127.0.0.1:1/none")
    assert "cannot use PostgreSQL at 127.0.0.1, database none" in text
    assert "geheim" not in text


async def test_a_foreign_table_of_our_name_is_left_alone(empty_postgres_url: str) -> None:
    with psycopg.connect(empty_postgres_url) as connection:
        connection.execute("CREATE TABLE task (todo TEXT)")
    assert "has a table `task` that is not gpubroker's" in await refusal(empty_postgres_url)
