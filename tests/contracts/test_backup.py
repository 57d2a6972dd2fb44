"""A backup is taken beside a service at work, and what is restored is one state of it, on any database."""

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from gpubroker_server.adapters.blobs.directory import DirectoryBlobs
from gpubroker_server.adapters.sql.copying import backup as rows_of
from gpubroker_server.adapters.sql.store import SqlStore
from gpubroker_server.bootstrap import backups
from gpubroker_server.bootstrap.backups import back_up
from gpubroker_server.bootstrap.object_store import open_blobs
from gpubroker_server.bootstrap.start_checks import StartRefused
from gpubroker_server.core.domain.stored_objects import Quota, StoredObject
from gpubroker_server.core.domain.units import Instant, Position
from gpubroker_server.ports.store import TaskFilter
from gpubroker_server.settings.loading import Settings, load_settings

from tests.builders import NOW
from tests.chaos.database import Checker, Reader
from tests.contracts.lived_in import all_of, live_in
from tests.contracts.scenes import a_submission, opened

PIXELS = b"pixels" * 1000
DIGEST = hashlib.sha256(PIXELS).hexdigest()


def silent(_line: str) -> None: ...


def at(folder: Path, url: str = "") -> Settings:
    return load_settings(data_dir=folder, database_url=url or None)


@pytest.fixture(params=["sqlite", "postgres"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    url = request.getfixturevalue("empty_postgres_url") if request.param == "postgres" else ""
    return at(tmp_path / "served", url)


@pytest.fixture
def new(tmp_path: Path) -> Settings:
    return at(tmp_path / "new")


@asynccontextmanager
async def at_work(settings: Settings) -> AsyncIterator[SqlStore]:
    """A service in which there is something of everything, and that has its database open."""
    settings.data_dir.mkdir(exist_ok=True)
    async with opened(settings.database) as store:
        await live_in(store)
        blobs = await open_blobs(settings, store)
        assert await blobs.put(PIXELS, owner="the test") == DIGEST
        await blobs.put(b"state", owner="the checkpoint that was reported")
        await store.keep_object(
            StoredObject("default", DIGEST, len(PIXELS), NOW, Instant(NOW + 10)), Quota(10**6, 1)
        )
        yield store


async def test_what_is_restored_is_what_could_be_read_when_it_was_backed_up(
    served: Settings, new: Settings, tmp_path: Path
) -> None:
    async with at_work(served) as store:
        assert await asyncio.to_thread(back_up, served, tmp_path / "backup", silent)
        before = await all_of(store)
        lineage = (await store.leader()).lineage
        blobs = await store.blobs()
    backups.restore(new, tmp_path / "backup", silent)
    async with opened(new.database) as store:
        after = await all_of(store)
        assert {**after, "leader": None} == {**before, "leader": None}
        assert after["leader"][0] == before["leader"][0] + 1
        assert (await store.leader()).lineage > lineage
        objects = await open_blobs(new, store)
        assert await objects.get(DIGEST) == PIXELS
        assert await store.blobs() != blobs, "no two databases share a directory of objects"
        assert await Checker(Reader(new.database)).check(store) == []


async def test_a_backup_of_a_file_is_restored_to_a_server(
    new: Settings, tmp_path: Path, empty_postgres_url: str
) -> None:
    async with at_work(new) as store:
        await asyncio.to_thread(back_up, new, tmp_path / "backup", silent)
        before = await all_of(store)
    there = at(tmp_path / "there", empty_postgres_url)
    backups.restore(there, tmp_path / "backup", silent)
    async with opened(there.database) as store:
        assert (await all_of(store))["records"] == before["records"]
        await store.audit(by="admin", tenant="default", action="noted", subject="the restore")
        assert await (await open_blobs(there, store)).get(DIGEST) == PIXELS


async def test_a_backup_under_load_is_one_state(served: Settings, new: Settings, tmp_path: Path) -> None:
    async with at_work(served) as store:
        known = len(await store.records(TaskFilter("default", limit=1000)))
        offered, accepted = list[str](), list[Any]()

        async def load() -> None:
            while True:
                offered.append(f"load-{len(offered):04}")
                await store.submit(a_submission(offered[-1]))
                accepted.append(await store.head())

        loading = asyncio.create_task(load())
        while len(accepted) < 50:  # noqa: ASYNC110  # until there is load
            await asyncio.sleep(0)
        before = len(accepted)
        await asyncio.to_thread(back_up, served, tmp_path / "backup", silent)
        loading.cancel()
        with suppress(asyncio.CancelledError):
            await loading
        assert len(accepted) > before, "nothing was accepted while the backup was taken"
    backups.restore(new, tmp_path / "backup", silent)
    async with opened(new.database) as store:
        assert await Checker(Reader(new.database)).check(store) == []
        tasks = len(await store.records(TaskFilter("default", limit=1000))) - known
        assert before <= tasks <= len(offered), "the last one may have been cancelled after it was stored"
        assert await store.head() == len(await store.events(Position(0), 10_000))


async def test_objects_pruned_during_a_backup_make_it_read_the_rows_again(
    new: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with at_work(new) as store:
        loop, folder = asyncio.get_running_loop(), new.objects
        copies: list[Any] = []

        async def prune() -> None:
            assert await store.drop_object("default", DIGEST)
            await DirectoryBlobs(folder).delete(DIGEST)

        def told(line: str) -> None:
            if line.startswith("usage:") and not copies:
                copies.append(line)
                asyncio.run_coroutine_threadsafe(prune(), loop).result()

        assert await asyncio.to_thread(back_up, new, tmp_path / "backup", told)
    about = json.loads((tmp_path / "backup" / "backup.json").read_text())
    assert (copies != [], about["objects"], about["missing_objects"]) == (True, 1, [])


async def test_uploads_that_are_deleted_again_and_again_are_left_out(new: Settings, tmp_path: Path) -> None:
    async with at_work(new) as store:
        loop, blobs = asyncio.get_running_loop(), DirectoryBlobs(new.objects)
        uploads = [DIGEST]

        async def replace_upload() -> None:
            assert await store.drop_object("default", uploads[-1])
            await blobs.delete(uploads[-1])
            uploads.append(await blobs.put(b"%d" % len(uploads), owner="the test"))
            kept = StoredObject("default", uploads[-1], 1, NOW, Instant(NOW + 10))
            assert await store.keep_object(kept, Quota(10**6, 1))

        def told(line: str) -> None:
            if line.startswith("usage:"):
                asyncio.run_coroutine_threadsafe(replace_upload(), loop).result()

        assert await asyncio.to_thread(back_up, new, tmp_path / "backup", told)
    about = json.loads((tmp_path / "backup" / "backup.json").read_text())
    assert (len(uploads), about["objects"], about["missing_objects"]) == (4, 1, [uploads[-2]])
    backups.restore(at(tmp_path / "there"), tmp_path / "backup", silent)


async def test_backup_tells_of_a_damaged_object_and_copies_the_rest(new: Settings, tmp_path: Path) -> None:
    told: list[str] = []
    async with at_work(new):
        (new.objects / DIGEST[:2] / DIGEST[2:4] / DIGEST).write_bytes(b"other")
        assert not await asyncio.to_thread(back_up, new, tmp_path / "backup", told.append)
    assert any(f"object {DIGEST} is missing or damaged" in line for line in told)
    there = at(tmp_path / "there")
    backups.restore(there, tmp_path / "backup", silent)
    async with opened(there.database) as store:
        assert await Checker(Reader(there.database)).check(store) == []


@pytest.fixture
async def backup(tmp_path: Path) -> Path:
    settings = at(tmp_path / "source")
    async with at_work(settings):
        await asyncio.to_thread(back_up, settings, tmp_path / "backup", silent)
    return tmp_path / "backup"


def damage_rows(folder: Path) -> None:
    with (folder / "gpubroker.db").open("r+b") as file:
        file.seek(5000)
        file.write(b"x")


def damage_object(folder: Path) -> None:
    (folder / "blobs" / DIGEST[:2] / DIGEST[2:4] / DIGEST).write_bytes(b"other")


def leave_unfinished(folder: Path) -> None:
    (folder / "backup.json").unlink()


def be_of_a_later_release(folder: Path) -> None:
    about = json.loads((folder / "backup.json").read_text())
    (folder / "backup.json").write_text(json.dumps({**about, "form": 99}))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (damage_rows, "gpubroker.db is damaged"),
        (damage_object, "1 of its 2 objects are missing or differ"),
        (leave_unfinished, "is no finished backup"),
        (be_of_a_later_release, "in a form that this release does not read"),
    ],
)
def test_a_spoiled_backup_is_refused_and_leaves_no_database(
    backup: Path, new: Settings, spoil: object, says: str
) -> None:
    whole = shutil.copytree(backup, backup.with_name("whole"))
    assert callable(spoil)
    spoil(backup)
    with pytest.raises(StartRefused, match=says):
        backups.restore(new, backup, silent)
    assert not (new.data_dir / "gpubroker.db").exists()
    backups.restore(new, whole, silent)  # and then in the same place


def test_nothing_is_overwritten(backup: Path, new: Settings) -> None:
    with pytest.raises(StartRefused, match="is not empty; name a new folder for each backup"):
        back_up(at(backup.with_name("source")), backup, silent)
    backups.restore(new, backup, silent)
    with pytest.raises(StartRefused, match="exists, and a backup is restored where there is no database"):
        backups.restore(new, backup, silent)
    (new.data_dir / "gpubroker.db").unlink()
    with pytest.raises(StartRefused, match="blobs is not empty, and objects are restored where"):
        backups.restore(new, backup, silent)


async def test_nothing_is_restored_into_a_server_with_something_in_it(
    backup: Path, tmp_path: Path, empty_postgres_url: str
) -> None:
    async with opened(empty_postgres_url) as store:
        await store.submit(a_submission("theirs"))
    with pytest.raises(StartRefused, match="is not empty: it has 1 rows in event"):
        backups.restore(at(tmp_path / "there", empty_postgres_url), backup, silent)
    async with opened(empty_postgres_url) as store:
        assert await store.head() == 1


def test_a_backup_that_cannot_be_written_says_so(new: Settings, tmp_path: Path) -> None:
    with pytest.raises(StartRefused, match=r"there is no .*gpubroker\.db; name the database of the service"):
        back_up(new, tmp_path / "backup", silent)
    with pytest.raises(StartRefused, match="cannot be used"):
        back_up(new, Path(os.devnull) / "x", silent)


async def test_database_of_another_schema_is_not_backed_up_without_its_columns(
    new: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with at_work(new):
        monkeypatch.setattr(rows_of, "NEWEST", "9999")
        with pytest.raises(StartRefused, match="this gpubroker knows 9999: back it up with the release"):
            await asyncio.to_thread(back_up, new, tmp_path / "backup", silent)
