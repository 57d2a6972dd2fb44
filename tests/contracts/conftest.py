"""One suite, two databases: what a test here claims of the store holds on SQLite and on PostgreSQL."""

import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from gpubroker_server.ports.store import TaskStore

from tests.contracts.fake_runners import FakeRunners, Leader, a_leader
from tests.contracts.scenes import opened
from tests.mounts import mounted
from tests.stores import migrated_file

Open = Callable[[], Awaitable[TaskStore]]


def database_url(name: str, request: pytest.FixtureRequest, folder: Path) -> str:
    """At the newest schema, as it is right after its migration."""
    if name == "sqlite":
        shutil.copy(migrated_file(), folder / "gpubroker.db")
        return f"sqlite:///{folder / 'gpubroker.db'}"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database that outlives the store that has it open."""
    return database_url(request.param, request, tmp_path)


@pytest.fixture
async def store(url: str) -> AsyncIterator[TaskStore]:
    async with opened(url) as store:
        yield store


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
