"""Everything of a SQLite file, on PostgreSQL, and never two services of one."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpubroker_server.adapters.sql.copying.move_data import move_data
from gpubroker_server.adapters.sql.session import DatabaseRefused
from gpubroker_server.adapters.sql.store import SqlStore, migrate
from gpubroker_server.adapters.sql.tables import metadata
from gpubroker_server.core.domain.stored_objects import Quota, StoredObject
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.ports.store import TaskFilter

from tests.builders import GIB, NOW
from tests.chaos.database import Checker, Reader
from tests.chaos.scene import Scene
from tests.contracts.lived_in import all_of, live_in
from tests.contracts.scenes import a_submission, next_term, opened

ROOT = Path(__file__).resolve().parents[2]
COPIED = [name for name in metadata.tables if name != "relocation"]
"""A move tells of each once it is copied, then that all is committed, then that the file has said so."""


@pytest.fixture
async def file(tmp_path: Path) -> str:
    """One in which there is something of everything."""
    url = f"sqlite:///{tmp_path / 'gpubroker.db'}"
    async with opened(url) as store:
        await live_in(store)
    return url


async def test_everything_readable_of_a_service_is_the_same_after_its_move(
    file: str, empty_postgres_url: str
) -> None:
    uploaded = StoredObject("default", "digest", 10, NOW, Instant(NOW + 10))
    async with opened(file) as store:
        await store.keep_object(uploaded, Quota(10**6, 1))
        before = await all_of(store)
    told: list[str] = []
    move_data(file, empty_postgres_url, told.append)
    assert len(told) == len(COPIED) + 2
    async with opened(empty_postgres_url) as store:
        assert await all_of(store) == before
        assert await store.stored_object("default", "digest") == uploaded
        assert await Checker(Reader(empty_postgres_url)).check(store) == []


async def test_a_moved_service_goes_on_where_it_was(file: str, empty_postgres_url: str) -> None:
    async with opened(file) as store:
        term = (await store.leader()).term
    move_data(file, empty_postgres_url, lambda _: None)
    async with opened(empty_postgres_url) as store:
        taken = await next_term(store)
        assert taken == term + 1
        scene = await Scene.on(store, taken)
        assert (await scene.submit("again", key="a key", gpu_mb=70 * GIB)).task == "keyed"
        await store.audit(by="admin", tenant="default", action="noted", subject="the move")
        await scene.submit("new")
        await scene.finish()
        assert await Checker(Reader(empty_postgres_url)).check(store) == []


async def test_a_file_that_was_moved_is_refused_and_names_where_it_went(
    file: str, empty_postgres_url: str
) -> None:
    move_data(file, empty_postgres_url, lambda _: None)
    with pytest.raises(DatabaseRefused, match=r"has been moved to .*gpubroker_test"):
        async with opened(file):
            pass
    move_data(file, empty_postgres_url, lambda _: None)  # once more: there is nothing left to do
    async with opened(empty_postgres_url) as store:
        assert await store.record(await a_task_of(store)) is not None


async def a_task_of(store: SqlStore) -> Any:
    [newest] = await store.records(TaskFilter("default", limit=1))
    return newest.task.id


KILLED_AT = """
import os, sys
from gpubroker_server.adapters.sql.copying.move_data import move_data
source, target, fatal = sys.argv[1:]
told = 0
def tell(line):
    global told
    told += 1
    if told == int(fatal):
        os.kill(os.getpid(), 9)
move_data(source, target, tell)
"""


def move_killed_at(step: int, source: str, target: str) -> None:
    command = [sys.executable, "-c", KILLED_AT, source, target, str(step)]
    assert subprocess.run(command, cwd=ROOT).returncode == -9


@pytest.mark.parametrize(
    ("step", "left"),
    [
        (len(COPIED) // 2, {"file", "server"}),  # nothing has come there yet: it is a new database
        (len(COPIED) + 1, {"file"}),
        (len(COPIED) + 2, set()),
    ],
    ids=["copying", "all is committed", "the file has said so"],
)
async def test_killed_move_never_leaves_two_to_be_served_and_the_next_ends_it(
    file: str, empty_postgres_url: str, step: int, left: set[str]
) -> None:
    async with opened(file) as store:
        before = await all_of(store)
    move_killed_at(step, file, empty_postgres_url)
    served = {
        name for name, url in (("file", file), ("server", empty_postgres_url)) if await may_be_served(url)
    }
    assert served == left
    move_data(file, empty_postgres_url, lambda _: None)
    async with opened(empty_postgres_url) as store:
        assert await all_of(store) == before
    assert not await may_be_served(file)


async def test_what_is_served_on_after_a_move_broke_off_is_moved_as_it_is_then(
    file: str, empty_postgres_url: str
) -> None:
    move_killed_at(len(COPIED) + 1, file, empty_postgres_url)
    async with opened(file) as store:
        scene = await Scene.on(store, await next_term(store))
        await scene.submit("later")
        before = await all_of(store)
    move_data(file, empty_postgres_url, lambda _: None)
    async with opened(empty_postgres_url) as store:
        assert await all_of(store) == before


async def test_a_database_with_something_in_it_is_left_alone(file: str, empty_postgres_url: str) -> None:
    async with opened(empty_postgres_url) as store:
        await store.submit(a_submission("theirs"))
    with pytest.raises(DatabaseRefused, match="is not empty: it has 1 rows in event"):
        move_data(file, empty_postgres_url, lambda _: None)
    async with opened(empty_postgres_url) as store:
        assert await store.head() == 1
    assert await may_be_served(file)


async def test_a_database_that_took_another_file_is_left_alone(
    file: str, tmp_path: Path, empty_postgres_url: str
) -> None:
    other = f"sqlite:///{tmp_path / 'other.db'}"
    migrate(other, "head")
    move_killed_at(len(COPIED) + 1, other, empty_postgres_url)
    with pytest.raises(DatabaseRefused, match=r"has the data of .*other\.db"):
        move_data(file, empty_postgres_url, lambda _: None)
    assert await may_be_served(file)


async def test_a_database_in_use_is_left_alone(file: str, empty_postgres_url: str) -> None:
    async with opened(empty_postgres_url):
        with pytest.raises(DatabaseRefused, match="in use by a gpubroker"):
            move_data(file, empty_postgres_url, lambda _: None)
    assert await may_be_served(file)


async def test_a_file_in_use_is_left_alone(file: str, empty_postgres_url: str) -> None:
    async with opened(file) as store:
        with pytest.raises(DatabaseRefused, match="is in use by process"):
            move_data(file, empty_postgres_url, lambda _: None)
        await store.submit(a_submission("more"))


@pytest.mark.parametrize(
    ("source", "target"), [("sqlite:///a.db", "sqlite:///b.db"), ("postgresql:///a", "postgresql:///b")]
)
def test_data_moves_from_a_file_to_a_server_only(source: str, target: str) -> None:
    with pytest.raises(DatabaseRefused, match="from a file to a server"):
        move_data(source, target, lambda _: None)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("mysql://u:secret@host/db", '--to must begin with .* but is "mysql:..."'),
        ("", "--to must begin with .* but is empty"),
        ("postgresql://u@127.0.0.1:1/db?foo=secret", "--to is not an address of PostgreSQL"),
        ("postgresql://u:secret@127.0.0.1:1/db", "cannot use PostgreSQL at 127.0.0.1.* or correct --to$"),
    ],
)
def test_an_address_that_nothing_can_be_moved_to_is_named_by_its_option(
    tmp_path: Path, target: str, says: str
) -> None:
    source = tmp_path / "source.db"
    source.touch()
    with pytest.raises(DatabaseRefused, match=re.compile(says, re.DOTALL)) as refused:
        move_data(f"sqlite:///{source}", target, lambda _: None)
    assert "secret" not in str(refused.value)


async def may_be_served(url: str) -> bool:
    try:
        async with opened(url):
            return True
    except DatabaseRefused:
        return False
