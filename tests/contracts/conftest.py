"""One suite, three stores: what a test here claims holds in memory, on SQLite and on PostgreSQL."""

import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from gpubroker_server.adapters.memory.store import MemoryStore
from gpubroker_server.adapters.sql.store import migrate, open_store
from gpubroker_server.ports.store import TaskStore

from tests.contracts.fake_runners import FakeRunners, Leader, a_leader
from tests.mounts import mounted

Open = Callable[[], Awaitable[TaskStore]]


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of SQLite, to be copied: two hundred tests would take its way through all revisions anew."""
    path = tmp_path_factory.mktemp("migrated") / "gpubroker.db"
    migrate(f"sqlite:///{path}", "head")
    return path


def database_url(name: str, request: pytest.FixtureRequest, folder: Path) -> str:
    """At the newest schema, as it is right after its migration."""
    if name == "sqlite":
        shutil.copy(request.getfixturevalue("migrated_file"), folder / "gpubroker.db")
        return f"sqlite:///{folder / 'gpubroker.db'}"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture(params=["memory", "sqlite", "postgres"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[TaskStore]:
    store: TaskStore
    if request.param == "memory":
        store = MemoryStore()
    else:
        store = await open_store(database_url(request.param, request, tmp_path))
    yield store
    await store.close()


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database that outlives the store that has it open."""
    return database_url(request.param, request, tmp_path)


@pytest.fixture
def runners() -> Iterator[FakeRunners]:
    """Their processes are ended when the test's event loop is closed: no agent hears of it any more."""
    with closing(FakeRunners()) as runners:
        yield runners


@pytest.fixture
def open_leader(runners: FakeRunners, tmp_path: Path) -> Callable[..., Leader]:
    return partial(a_leader, runners, tmp_path)


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("disk")
    with mounted(place, "-t", "tmpfs", "-o", "size=4m", "none"):
        yield place


@pytest.fixture
def top(small_disk: Path, request: pytest.FixtureRequest) -> Path:
    """A directory of the test's own on a small file system. Needs the right to mount."""
    place = small_disk / re.sub(r"\W", "-", request.node.name)
    place.mkdir()
    return place
