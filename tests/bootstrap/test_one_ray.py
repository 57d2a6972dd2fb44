"""What belongs together and is not the same is refused: Rays of one database, databases of one directory."""

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from gpubroker_server.adapters.sql.store import SqlStore, open_store
from gpubroker_server.bootstrap.object_store import open_blobs
from gpubroker_server.bootstrap.process import Process
from gpubroker_server.bootstrap.start_checks import StartRefused, other_ray
from gpubroker_server.core.domain.units import Instant, Seconds, Term
from gpubroker_server.ports.last_values import LastValues, LeaderSeen
from gpubroker_server.settings.loading import Settings, load_settings
from msgspec.structs import replace

from tests.contracts.scenes import next_term

LOCAL = {"home": "one:/data", "address": "127.0.0.1:4711"}
OTHER = {"home": "two:/data", "address": "127.0.0.1:4712"}
JOINED = {"home": "", "address": "10.0.0.5:6379"}


def word(executor: Mapping[str, Any], term: Term = Term(1)) -> LeaderSeen:
    return LeaderSeen(term, "one:1", Instant(0.0), executor)


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (LOCAL, LOCAL),
        (JOINED, JOINED),
        (JOINED, {**JOINED, "address": "head:6379"}),
        ({**JOINED, "address": LOCAL["address"]}, LOCAL),
        (JOINED, {**LOCAL, "address": ""}),
        ({"address": "simulated"}, {"address": "simulated"}),
        (LOCAL, {"address": "127.0.0.1:4712"}),
    ],
)
def test_what_may_be_the_same_ray_is_not_refused(here: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    assert other_ray(here, word(there)) == ""


@pytest.mark.parametrize(("here", "there"), [(LOCAL, OTHER), (LOCAL, JOINED), (JOINED, LOCAL)])
def test_another_ray_is_named_and_so_is_what_to_do(here: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    said = other_ray(here, word(there))
    for of in (here, there):
        assert (of["home"] or of["address"]) in said
    assert "ray.address" in said


@pytest.fixture
async def store(postgres_url: str) -> AsyncIterator[SqlStore]:
    store = await open_store(postgres_url)
    yield store
    await store.close()


async def a_process(folder: Path, url: str) -> tuple[Process, SqlStore]:
    """A broker that would start a Ray of its own."""
    settings = load_settings(data_dir=folder / "two", database_url=url, blob_dir=folder / "objects")
    settings.data_dir.mkdir(exist_ok=True)
    store = await open_store(url)
    return Process(settings, store, await open_blobs(settings, store), listener=None, leads=True), store


async def test_a_broker_with_another_local_ray_than_the_leaders_does_not_start(
    tmp_path: Path, postgres_url: str, store: SqlStore
) -> None:
    term = await next_term(store, "one:1", Seconds(600.0))
    await store.publish(term, 1, LastValues(leader=word(LOCAL, term)))
    process, own = await a_process(tmp_path, postgres_url)
    with pytest.raises(StartRefused, match=f"{socket.gethostname()}:{tmp_path}/two, and one:1.* one:/data"):
        await asyncio.wait_for(process.run(), 30.0)
    await own.close()


async def test_of_two_brokers_started_together_the_one_that_does_not_lead_ends(
    tmp_path: Path, postgres_url: str, store: SqlStore
) -> None:
    term = await next_term(store, "one:1", Seconds(600.0))
    process, own = await a_process(tmp_path, postgres_url)
    await process._lead.begin()
    jobs = dict(process._lead.jobs())
    await store.publish(term, 1, LastValues(leader=word(LOCAL, term)))
    with pytest.raises(StartRefused, match="stop the other one first"):
        await asyncio.wait_for(jobs["last values"], 30.0)
    jobs["forecasts"].close()

    await store.resign(term)
    await process._lead.begin()
    await own.close()


def settings_of(folder: Path, name: str, **changes: Any) -> Settings:
    (folder / name).mkdir()
    return load_settings(data_dir=folder / name, engine="simulated", **changes)


async def test_a_directory_with_the_objects_of_another_database_is_refused(tmp_path: Path) -> None:
    """Each would take the other's for nobody's, and throw them away."""
    shared = tmp_path / "objects"
    first, second = (settings_of(tmp_path, name, blob_dir=shared) for name in ("a", "b"))
    one, two = await open_store(first.database), await open_store(second.database)
    await open_blobs(first, one)
    with pytest.raises(StartRefused, match=r"objects of another database.*remove the file"):
        await open_blobs(second, two)
    await open_blobs(first, one)
    (shared / ".gpubroker").unlink()
    await open_blobs(second, two)
    await one.close()
    await two.close()


async def test_processes_started_together_on_a_new_database_share_its_directory(
    tmp_path: Path, postgres_url: str
) -> None:
    shared = tmp_path / "objects"
    stores = [await open_store(postgres_url) for _ in range(4)]
    many = [settings_of(tmp_path, str(n), database_url=postgres_url, blob_dir=shared) for n in range(4)]
    await asyncio.gather(*(open_blobs(*pair) for pair in zip(many, stores, strict=True)))
    for store in stores:
        await store.close()


async def test_a_new_file_beside_the_old_directory_is_its_database(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "a")
    for _ in range(2):
        store = await open_store(settings.database)
        await open_blobs(settings, store)
        await store.close()
        (settings.data_dir / "gpubroker.db").unlink()


async def cut_off_before_it_was_noted(store: SqlStore) -> None:
    """The database as a first start leaves it that has named its directory, and come no further."""
    known = await store.blobs()
    assert known is not None
    mark, dash, _ = known.partition("-")
    assert await store.claim_blobs(mark + dash, instead_of=known) == mark + dash


async def test_first_start_cut_off_after_naming_its_directory_is_carried_on(
    tmp_path: Path,
) -> None:
    settings = settings_of(tmp_path, "a", blob_dir=tmp_path / "objects")
    store = await open_store(settings.database)
    await open_blobs(settings, store)
    known = await store.blobs()
    await cut_off_before_it_was_noted(store)
    await open_blobs(settings, store)
    assert await store.blobs() == known == (tmp_path / "objects" / ".gpubroker").read_text().strip()
    assert [file.name for file in (tmp_path / "objects").iterdir()] == [".gpubroker"]
    await store.close()


async def test_first_start_cut_off_before_naming_its_directory_is_carried_on(
    tmp_path: Path,
) -> None:
    settings = settings_of(tmp_path, "a", blob_dir=tmp_path / "objects")
    store = await open_store(settings.database)
    await store.claim_blobs("0123456789abcdef-", instead_of="")
    await open_blobs(settings, store)
    assert str(await store.blobs()).startswith("0123456789abcdef-")
    await open_blobs(settings, store)
    await store.close()


async def test_a_start_that_was_cut_off_takes_no_directory_of_another_database(tmp_path: Path) -> None:
    shared = tmp_path / "objects"
    first, second = (settings_of(tmp_path, name, blob_dir=shared) for name in ("a", "b"))
    one, two = await open_store(first.database), await open_store(second.database)
    await open_blobs(first, one)
    await two.claim_blobs("0123456789abcdef-", instead_of="")
    with pytest.raises(StartRefused, match="objects of another database"):
        await open_blobs(second, two)
    await cut_off_before_it_was_noted(one)
    with pytest.raises(StartRefused, match="objects of another database"):
        await open_blobs(second, two)
    await open_blobs(first, one)
    elsewhere = replace(second, blob_dir=tmp_path / "elsewhere")
    await open_blobs(elsewhere, two)
    await one.close()
    await two.close()


async def test_first_directory_noted_for_a_database_is_its_own(
    tmp_path: Path,
) -> None:
    settings = settings_of(tmp_path, "a", blob_dir=tmp_path / "objects")
    other = replace(settings, blob_dir=tmp_path / "elsewhere")
    store = await open_store(settings.database)
    await open_blobs(settings, store)
    first = str(await store.blobs())
    await cut_off_before_it_was_noted(store)
    await open_blobs(other, store)
    with pytest.raises(StartRefused, match="name that one with blob_dir"):
        await open_blobs(settings, store)
    assert await store.claim_blobs(first, instead_of="") != first
    await store.close()
