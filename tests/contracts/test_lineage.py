"""A database that went back: restored, or replaced by a standby that lacked the last commits."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from gpubroker_server.adapters.sql.session import DatabaseRefused
from gpubroker_server.adapters.sql.store import begin_lineage, open_store
from gpubroker_server.bootstrap.follower import LogFollower, fill
from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.policy import HALF_LIFE_SECONDS
from gpubroker_server.core.domain.units import TaskId, Term
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.store import CommitVerdict, LineageChanged, StaleTerm, StoreUnavailable, TaskStore

from tests.builders import a_task
from tests.contracts.scenes import a_submission, admission, next_term, node_seen, opened, picture, with_gpu
from tests.contracts.test_followers import fails
from tests.places import short_place
from tests.postgres import OwnServer, a_server_of_its_own

WENT_BACK = """
DELETE FROM event WHERE position > {0};
DELETE FROM task_label WHERE task = 'lost';
DELETE FROM task_spec WHERE task = 'lost';
DELETE FROM task WHERE id = 'lost';
UPDATE log_head SET position = {0};
"""
"""As a backup leaves a database that is restored in its place: `lost` came after the backup."""


async def test_the_term_after_lost_commits_begins_a_lineage(store: TaskStore) -> None:
    await next_term(store)
    first = await store.leader()
    again = await store.take_term("two", HALF_LIFE_SECONDS, instead_of=first, has_lost_commits=True)
    row = await store.leader()
    assert (first.lineage, again) == (0, first.term + 1)
    assert row.lineage > 365 * 86_400
    await next_term(store)
    assert (await store.leader()).lineage == row.lineage


async def test_claims_of_a_new_lineage_have_fences_no_earlier_one_can_have_used(
    store: TaskStore,
) -> None:
    await with_gpu(store, task := a_task("t1"))
    await store.take_term("two", HALF_LIFE_SECONDS, instead_of=await store.leader(), has_lost_commits=True)
    world = World()
    fill(world, await store.snapshot())
    assert world.lineage == (await store.leader()).lineage
    assert world.next_fence(task) == world.lineage + 1


async def test_process_that_has_read_further_than_the_log_reads_all_again(postgres_url: str) -> None:
    async with opened(postgres_url) as one, opened(postgres_url) as two:
        seen = LogFollower(two, HALF_LIFE_SECONDS, fails)
        faults: list[Any] = []
        seen.on_reread.append(faults.append)
        await seen.begin()
        await with_gpu(one, a_task("kept"))
        at = await one.head()
        await two.submit(a_submission("lost"))
        await seen.catch_up()
        assert set(seen.world.tasks) == {"kept", "lost"}
        with psycopg.connect(postgres_url) as connection:
            connection.execute(WENT_BACK.format(at))

        with pytest.raises(StoreUnavailable, match="the database was restored"):
            await two.submit(a_submission("early"))  # or events of both histories would be mixed
        await seen.catch_up()
        assert [fault.has_lost_commits for fault in faults] == [True]
        assert set(seen.world.tasks) == {"kept"}
        assert await two.record(TaskId("lost")) is None
        await two.submit(a_submission("later"))
        await seen.catch_up()
        whole = World()
        fill(whole, await one.snapshot())
        assert picture(seen.world) == picture(whole)


async def test_lineage_begun_by_another_process_is_noticed_at_the_next_reading(
    postgres_url: str,
) -> None:
    async with opened(postgres_url) as one, opened(postgres_url) as two:
        await next_term(one)
        assert await two.catch_up() is False
        row = await one.leader()
        await one.take_term("one", HALF_LIFE_SECONDS, instead_of=row, has_lost_commits=True)
        with pytest.raises(LineageChanged) as changed:
            await two.catch_up()
        assert not changed.value.has_lost_commits
        snapshot = await two.snapshot()
        await two.go_on_at(snapshot.position, snapshot.lineage)
        assert await two.catch_up() is False


@contextmanager
def a_standby_of(primary: OwnServer) -> Iterator[OwnServer]:
    with tempfile.TemporaryDirectory(prefix="gpubroker-pg-", dir=short_place()) as folder:
        standby = OwnServer.standby_of(primary, folder)
        standby.start()
        try:
            yield standby
        finally:
            standby.stop("immediate")


async def until_answered(store: TaskStore, term: Term, decision: Decision) -> None:
    """Repeated until the writer is connected again."""
    while await store.commit(term, [decision]) == [CommitVerdict.UNAVAILABLE]:
        pass


def both(primary: OwnServer, standby: OwnServer) -> str:
    hosts = ",".join(server.url.partition("host=")[2] for server in (primary, standby))
    return f"postgresql://postgres@/postgres?host={hosts}"


async def test_failover_ends_the_old_term_and_the_next_one_begins_a_lineage() -> None:
    with a_server_of_its_own() as primary, a_standby_of(primary) as standby:
        url = both(primary, standby)
        async with opened(url, may_lose_commits=True) as store:
            seen = LogFollower(store, HALF_LIFE_SECONDS, fails)
            faults: list[Any] = []
            seen.on_reread.append(faults.append)
            await seen.begin()
            term = await with_gpu(store, kept := a_task("kept"))
            with psycopg.connect(primary.url, autocommit=True) as connection:
                wait = "SELECT pg_current_wal_lsn() <= replay_lsn FROM pg_stat_replication"
                while connection.execute(wait).fetchone() != (True,):
                    pass
            with psycopg.connect(standby.url, autocommit=True) as connection:
                connection.execute("SELECT pg_wal_replay_pause()")
            standby.stop("immediate")  # what comes now never arrives there
            await store.submit(a_submission("lost"))
            await seen.catch_up()
            primary.stop("immediate")
            standby.start()
            standby.promote()

            with pytest.raises(StaleTerm, match="was taken on the server"):
                await until_answered(store, term, admission(kept))
            await seen.catch_up()
            assert [fault.has_lost_commits for fault in faults] == [False]
            assert set(seen.world.tasks) == {"kept"}
            await next_term(store)
            await seen.catch_up()
            assert seen.world.lineage == (await store.leader()).lineage > 0


async def test_hosts_of_which_none_waits_for_another_are_refused_with_the_risk() -> None:
    """The refusal names what a failover would lose."""
    with a_server_of_its_own() as primary, a_standby_of(primary) as standby:
        url = both(primary, standby)
        with pytest.raises(DatabaseRefused, match="the last tasks that were accepted would be gone"):
            await open_store(url)
        with psycopg.connect(primary.url, autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            connection.execute("SELECT pg_reload_conf()")
        async with opened(url) as store:
            await store.submit(a_submission("t1"))
        with psycopg.connect(standby.url) as connection:
            assert connection.execute("SELECT id FROM task").fetchall() == [("t1",)]


async def test_an_operator_goes_on_with_a_restored_database_in_a_new_lineage(url: str) -> None:
    async with opened(url) as store:
        term = await next_term(store)
        if not store.is_shared:
            with pytest.raises(DatabaseRefused, match="in use"):
                begin_lineage(url)
    lineage = begin_lineage(url)
    async with opened(url) as store:
        row = await store.leader()
        assert (row.lineage, row.term, row.is_past) == (lineage, term + 1, True)
        with pytest.raises(StaleTerm):
            await store.commit(term, [node_seen()])
