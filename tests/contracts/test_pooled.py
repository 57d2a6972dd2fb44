"""The store behind a pooler that hands connections out by transaction: nothing of one is counted on later."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
from gpubroker_server.adapters.sql.connections import TERM, set_statement
from gpubroker_server.adapters.sql.store import SqlStore, open_store
from gpubroker_server.core.domain.units import TaskId, Term
from gpubroker_server.core.world.events import Event
from gpubroker_server.ports.last_values import LastValues, LeaderSeen
from gpubroker_server.ports.store import CommitVerdict, SubmitVerdict, TokenRow

from tests.builders import NOW, a_sample, a_task
from tests.contracts.pooler import a_pooler
from tests.contracts.scenes import a_submission, admission, log_of, with_gpu


@asynccontextmanager
async def pooled(url: str) -> AsyncIterator[SqlStore]:
    async with a_pooler(url) as through:
        store = await open_store(through, pooled=True)
        try:
            yield store
        finally:
            await store.close()


async def test_a_queue_works_through_it(postgres_url: str) -> None:
    task = a_task("t1")
    async with pooled(postgres_url) as store:
        term = await with_gpu(store, task)
        assert await store.commit(term, [admission(task)]) == [CommitVerdict.COMMITTED]
        outcomes = await asyncio.gather(*(store.submit(a_submission(f"t{n}", f"k{n}")) for n in range(2, 40)))
        assert {outcome.verdict for outcome in outcomes} == {SubmitVerdict.ACCEPTED}
        again = await store.submit(a_submission("other", "k2"))
        assert (again.verdict, again.task) == (SubmitVerdict.DUPLICATE, "t2")
        await store.put_token(TokenRow("ci", "lab", ("*",), 100, sha256="hash", created_at=NOW), by="alice")
        record = await store.record(TaskId("t39"))
        assert record is not None
        snapshot = await store.snapshot()
        assert (len(snapshot.tasks), snapshot.position) == (39, await store.head())


async def test_followers_hear_all_of_each_other_through_it(postgres_url: str) -> None:
    heard: list[Event] = []
    async with pooled(postgres_url) as one, pooled(postgres_url) as two:
        two.listen(heard.extend)
        assert not two.gives_hints
        for n in range(5):
            await one.submit(a_submission(f"one{n}"))
            await two.submit(a_submission(f"two{n}"))
        await one.submit(a_submission("last"))
        assert await two.catch_up() is False
        assert heard == await log_of(one)
        leader = LeaderSeen(Term(1), "here:1", NOW, {"state": "connected"})
        word = LastValues((a_sample("gpu0"),), {}, leader)
        await one.publish(Term(1), 1, word)
        assert (await two.published(0))[1] == word


async def test_what_a_connection_keeps_is_not_there_behind_it(postgres_url: str) -> None:
    """So this pooler is one."""
    async with a_pooler(postgres_url) as through:

        def kept() -> str:
            with psycopg.connect(through, autocommit=True) as connection:
                connection.execute("SET lock_timeout = '7s'")
                return setting(connection, "lock_timeout")

        assert await asyncio.to_thread(kept) == "0"


def test_settings_of_a_transaction_hold_in_it_and_are_gone_after_it(postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        with connection.transaction():
            connection.execute(set_statement(TERM, within="transaction"))
            assert all(
                setting(connection, name) == value for name, value in TERM.values.items() if "tcp" not in name
            )
        assert setting(connection, "lock_timeout") == "0"
        connection.execute(set_statement(TERM, within="session"))
        assert setting(connection, "lock_timeout") == TERM.values["lock_timeout"]


def setting(connection: psycopg.Connection[Any], name: str) -> str:
    [(value,)] = connection.execute("SELECT current_setting(%s)", [name])
    return str(value)
