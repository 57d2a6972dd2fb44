"""An old and a new release on one database: together while the new one only adds, not in silence after."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import psycopg
import pytest
from gpubroker_server.adapters.sql.session import DatabaseRefused
from gpubroker_server.adapters.sql.store import migrate
from gpubroker_server.adapters.sql.system_tables import READER
from gpubroker_server.ports.store import Outgrown

from tests.bootstrap.refusals import WAITING, refusal
from tests.chaos.forked import ForkedService
from tests.contracts.lived_in import all_of, live_in
from tests.contracts.scenes import a_submission, opened
from tests.e2e.service_process import ServiceProcess, until
from tests.migrations.newer import CONTRACT, EXPAND, NEXT, migrate_as_newer_software_does
from tests.migrations.test_migrations import url
from tests.patience import PATIENCE_SECONDS

__all__ = ["url"]


async def test_old_software_opens_a_database_newer_software_has_only_added_to(
    url: str, tmp_path: Path
) -> None:
    async with opened(url) as store:
        await live_in(store)
        before = await all_of(store)
    migrate_as_newer_software_does(url, tmp_path / "newer", *EXPAND)
    async with opened(url) as store:
        assert await all_of(store) == before
        await store.submit(a_submission("new"))
    with pytest.raises(DatabaseRefused, match=f"its schema is {NEXT:04}"):
        migrate(url, "base")


async def test_old_software_refuses_a_database_newer_software_took_away_from(
    url: str, tmp_path: Path
) -> None:
    async with opened(url) as store:
        await live_in(store)
    migrate_as_newer_software_does(url, tmp_path / "newer", *CONTRACT)
    reason = f"a newer gpubroker took away what this one uses.*; upgrade gpubroker to one of schema {NEXT:04}"
    with pytest.raises(DatabaseRefused, match=reason):
        async with opened(url):
            pass


async def test_nothing_is_written_any_more_once_newer_software_has_taken_away(
    empty_postgres_url: str, tmp_path: Path
) -> None:
    async with opened(empty_postgres_url) as store:
        await store.submit(a_submission("before"))
        migrate_as_newer_software_does(empty_postgres_url, tmp_path / "newer", *CONTRACT)
        with pytest.raises(Outgrown, match=f"of schema {NEXT} or newer"):
            await store.submit(a_submission("after"))
        with pytest.raises(Outgrown, match="upgrade this process"):
            await store.catch_up()
        assert await store.head() == 1


@pytest.fixture
def service(tmp_path: Path, empty_postgres_url: str) -> Iterator[ServiceProcess]:
    with ForkedService(tmp_path / "data", database_url=empty_postgres_url, **WAITING) as running:
        yield running


def test_service_survives_a_migration_that_adds_and_ends_at_one_that_drops(
    service: ServiceProcess, tmp_path: Path, empty_postgres_url: str
) -> None:
    migrate_as_newer_software_does(empty_postgres_url, tmp_path / "expands", *EXPAND)
    task = service.broker.submit("tests.e2e.work:add", cpu=0.5)
    assert service.broker.wait(task.id, timeout_seconds=PATIENCE_SECONDS).state == "succeeded"
    assert service.terminate() == 0
    service.start()
    with psycopg.connect(empty_postgres_url) as newer:
        newer.execute(f"UPDATE log_head SET compatible_from = {NEXT}")
    assert service.ended() == 1
    assert "upgrade this process" in service.log()
    assert "upgrade gpubroker" in refusal(service)


def test_no_downgrade_under_a_running_service(service: ServiceProcess, empty_postgres_url: str) -> None:
    for revision in ("0003", "base"):
        with pytest.raises(DatabaseRefused, match=r"in use: gpubroker 0\.\S+, pid \d+ on .*so stop them"):
            migrate(empty_postgres_url, revision, drop_everything=True)
    task = service.broker.submit("tests.e2e.work:add", cpu=0.5)
    assert service.broker.wait(task.id, timeout_seconds=PATIENCE_SECONDS).state == "succeeded"
    assert service.terminate() == 0
    until(lambda: went_back(empty_postgres_url, "0003"), "the database goes back")
    service.start()
    assert service.broker.get(task.id).state == "succeeded"


def went_back(url: str, revision: str) -> bool:
    """A server may know the sessions of a process for a moment longer than it lived."""
    try:
        return migrate(url, revision) == revision
    except DatabaseRefused:
        return False


def test_process_that_cannot_read_the_log_stands_back_and_takes_tasks(
    service: ServiceProcess, empty_postgres_url: str
) -> None:
    before = service.broker.submit("tests.e2e.work:add", cpu=0.5)
    service.broker.wait(before.id, timeout_seconds=PATIENCE_SECONDS)
    with psycopg.connect(empty_postgres_url) as newer:
        newer.execute(
            "WITH head AS (UPDATE log_head SET position = position + 1 RETURNING position) "
            "INSERT INTO event (position, at, kind, key, version, tenant, fields, reader) "
            "SELECT position, 0, 'news.told', 'n', 1, '', '{}', %s FROM head",
            [READER + 1],
        )
    known = json.loads((service.data_dir / "client.json").read_text(encoding="utf-8"))
    with httpx.Client(
        base_url=known["url"], headers={"Authorization": f"Bearer {known['token']}"}, timeout=PATIENCE_SECONDS
    ) as client:
        until(lambda: client.get("/stats").status_code == 503, "the overview is refused")
        refused = client.get("/stats").json()
        assert refused["code"] == "follower-stale"
        assert "upgrade this process" in refused["detail"]
        assert client.get(f"/tasks/{before.id}").json()["state"] == "succeeded"
        run = {"entrypoint": "tests.e2e.work:add", "kwargs": {"seconds": 0.0}}
        assert client.post("/tasks", json={"run": run}).status_code == 202
        assert client.get("/readyz").json()["parts"]["world"] == "stale"

    def let_go() -> bool:
        with psycopg.connect(empty_postgres_url) as other:
            return other.execute("SELECT lease_until FROM leadership").fetchall() == [(0.0,)]

    until(let_go, "the term is let go")
    assert service.terminate() == 0
