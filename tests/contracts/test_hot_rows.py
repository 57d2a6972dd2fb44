"""Rows that change often do so on their own page: no index holds what changes before their end."""

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest
from gpubroker_server.core.domain.task import HOT_FIELDS
from gpubroker_server.ports.store import HeldBack, TaskStore

from tests.builders import a_task
from tests.contracts.scenes import a_new_lease, admission, claimed, end, opened, release, start, with_gpu
from tests.postgres import a_server_of_its_own

AT_ITS_END = {"finished", "ended_as", "finished_at", "released"}
"""Columns that change once, when a row changes for the last time."""

CHANGING = {
    "task": {*HOT_FIELDS, "version"},
    "lease": {"state", "version", "overused_mb"},
    "device": {"leased_mb", "version", "present"},
    "node": {
        "ready",
        "cordoned",
        "cordon_reason",
        "draining_since",
        "drain_deadline_at",
        "incarnation",
        "version",
    },
    "leadership": {"term", "holder", "lease_until", "taken_at", "lineage", "server"},
    "log_head": {"position"},
    "finished": {"n"},
    "estimate": {"counts", "learned_at"},
    "usage": {"held_mb", "mb_seconds", "at"},
}

TASKS = 40


def asked(url: str, query: str) -> list[Any]:
    with psycopg.connect(url, autocommit=True) as connection:
        return connection.execute(query).fetchall()


@pytest.mark.parametrize("table", sorted(CHANGING))
def test_no_index_holds_a_column_that_changes_before_the_end(postgres_url: str, table: str) -> None:
    indexes = asked(postgres_url, f"SELECT indexname, indexdef FROM pg_indexes WHERE tablename = '{table}'")
    assert indexes
    for name, definition in indexes:
        columns = set(re.findall(r"\w+", definition.partition(" USING ")[2]))
        assert columns & (CHANGING[table] - AT_ITS_END) == set(), name


@pytest.mark.parametrize("table", sorted(CHANGING))
def test_changing_tables_leave_room_on_pages_and_are_vacuumed_early(postgres_url: str, table: str) -> None:
    [(options,)] = asked(postgres_url, f"SELECT reloptions FROM pg_class WHERE oid = '{table}'::regclass")
    told = dict(option.split("=") for option in options)
    assert int(told["fillfactor"]) <= 70
    assert float(told["autovacuum_vacuum_scale_factor"]) <= 0.02


async def test_changes_of_tasks_before_their_end_stay_on_their_pages(postgres_url: str) -> None:
    tasks = [a_task(f"t{number:02}", gpu_mb=1024) for number in range(TASKS)]
    async with opened(postgres_url) as store:
        term = await with_gpu(store, *tasks)
        before = updates(postgres_url, "task")
        for task in tasks:
            await store.commit(term, [admission(task, 1024)])
            await store.commit(term, [start(claimed(task))])
    all_, hot = await counted(postgres_url, "task", before, 2 * TASKS)
    assert all_ == 2 * TASKS
    assert hot >= 0.9 * all_


async def test_last_change_of_a_task_or_lease_leaves_the_index_of_live_rows(
    postgres_url: str,
) -> None:
    """The row leaves its page as well: of two changes of a row one stays, however much room there is."""
    tasks = [a_task(f"t{number:02}", gpu_mb=1024) for number in range(TASKS)]
    before = {table: updates(postgres_url, table) for table in ("task", "lease")}
    async with opened(postgres_url) as store:
        term = await with_gpu(store, *tasks)
        for task in tasks:
            await store.commit(term, [admission(task, 1024)])
            await store.commit(term, [end(claimed(task))])
            await store.commit(term, [release(a_new_lease(claimed(task), 1024))])
    assert await counted(postgres_url, "lease", before["lease"], TASKS) == (TASKS, 0)
    all_, hot = await counted(postgres_url, "task", before["task"], 2 * TASKS)
    assert all_ == 2 * TASKS
    assert 0.45 * all_ <= hot <= 0.5 * all_


async def counted(url: str, table: str, before: tuple[int, int], expected: int) -> tuple[int, int]:
    """Updates since then; the server counts what a connection did when it has ended."""
    until = time.monotonic() + 10
    while True:
        all_, hot = (now - then for now, then in zip(updates(url, table), before, strict=True))
        if all_ >= expected or time.monotonic() > until:
            return all_, hot
        await asyncio.sleep(0.05)


def updates(url: str, table: str) -> tuple[int, int]:
    """(all, those that stayed on their page), as the server has counted them."""
    with psycopg.connect(url, autocommit=True) as connection:
        query = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = %s"
        [(all_, hot)] = connection.execute(query, [table]).fetchall()
        return all_, hot


async def test_the_oldest_transaction_is_shown_while_it_keeps_a_snapshot(postgres_url: str) -> None:
    async with opened(postgres_url) as store:
        with psycopg.connect(postgres_url) as reader:
            reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            reader.execute("SELECT count(*) FROM task")
            await asyncio.sleep(0.05)
            held_back = await store.held_back()
            assert held_back is not None
            assert held_back.transaction_seconds >= 0.05
        assert await store.held_back() == HeldBack(transaction_seconds=0.0, slot_transactions=0)


async def test_a_replication_slot_is_shown_in_transactions() -> None:
    with a_server_of_its_own() as server:
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET wal_level = logical")
        server.stop()
        server.start()
        async with opened(server.url) as store:
            assert (await slot_transactions(store), await store.log_bytes()) == (0, 0)
            with psycopg.connect(server.url, autocommit=True) as connection:
                connection.execute("SELECT pg_create_logical_replication_slot('away', 'pgoutput')")
                for _ in range(20):
                    connection.execute("SELECT pg_current_xact_id()")
                assert 20 <= await slot_transactions(store) < 1000
                connection.execute("SELECT pg_logical_emit_message(true, 'test', repeat('x', 100000))")
                assert 100_000 <= await store.log_bytes() < 2**24
                connection.execute("SELECT pg_drop_replication_slot('away')")
            assert await slot_transactions(store) == 0


async def slot_transactions(store: TaskStore) -> int:
    held_back = await store.held_back()
    assert held_back is not None
    return held_back.slot_transactions


async def test_a_file_has_no_transactions_of_others(tmp_path: Path) -> None:
    async with opened(f"sqlite:///{tmp_path / 'gpubroker.db'}") as store:
        assert await store.held_back() is None
