"""What only a database can promise: rows outlive the process, and connections may break."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psycopg
import pytest

from service.adapters.sql.postgres import PostgresSession
from service.adapters.sql.session import CommitUnknown
from service.adapters.sql.store import SqlStore, open_store
from service.core.events import Event
from service.core.task import TaskState
from service.core.units import TaskId
from service.ports import CommitVerdict, StaleTerm, StoreUnavailable, SubmitVerdict, TokenRow
from tests.builders import NOW, a_task
from tests.contracts.scenes import (
    a_checkpoint,
    a_submission,
    admission,
    claimed,
    end,
    log_of,
    with_gpu,
)
from tests.contracts.wire import Cut, a_wire

DEADLINE_SECONDS = 20.0


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[SqlStore]:
    store = await open_store(url)
    try:
        yield store
    finally:
        await store.close()


async def test_everything_is_there_after_a_restart(url: str) -> None:
    first, second = a_task("t1"), a_task("t2")
    async with opened(url) as store:
        term = await with_gpu(store, first, second)
        await store.commit(term, [admission(first), admission(second), end(claimed(second))])
        await store.commit(term, [a_checkpoint(claimed(first), 1)])
        await store.put_token(TokenRow("ci", "hash", "lab", ("*",), 100, NOW), by="admin")
        before, log = await store.snapshot(), await log_of(store)
    async with opened(url) as store:
        after = await store.snapshot()
        assert await log_of(store) == log
        assert (after.position, after.tasks, after.leases) == (before.position, before.tasks, before.leases)
        assert after.finished == {("default", TaskState.SUCCEEDED): 1}
        assert [token.name for token in await store.tokens()] == ["ci"]
        assert len(await store.checkpoints(first.id)) == 1
        assert await store.take_term("next") == term + 1
        await store.submit(a_submission("t3"))
        assert await store.head() == before.position + 1


async def test_a_closed_store_refuses_writes(url: str) -> None:
    store = await open_store(url)
    await store.close()
    with pytest.raises(StoreUnavailable):
        await store.submit(a_submission("t1"))


async def test_close_writes_what_was_waiting(url: str) -> None:
    store = await open_store(url)
    waiting = [asyncio.create_task(store.submit(a_submission(f"t{n}"))) for n in range(20)]
    await asyncio.sleep(0)
    await store.close()
    assert {(await task).verdict for task in waiting} == {SubmitVerdict.ACCEPTED}
    async with opened(url) as store:
        assert await store.head() == 20


async def test_what_cannot_be_stored_fails_alone(url: str) -> None:
    async with opened(url) as store:
        bad = a_submission(a_task("bad", name="half a pair: \ud800"))
        good = [store.submit(a_submission(f"t{n}")) for n in range(3)]
        outcomes = await asyncio.gather(*good, store.submit(bad), return_exceptions=True)
        assert isinstance(outcomes[-1], ValueError)
        assert [outcome.verdict for outcome in outcomes[:3]] == [SubmitVerdict.ACCEPTED] * 3
        assert await store.head() == 3


async def test_what_postgresql_alone_refuses_fails_alone(postgres_url: str) -> None:
    async with opened(postgres_url) as store:
        bad = a_submission(a_task("bad", name="nul: \0"))
        good = [store.submit(a_submission(f"t{n}")) for n in range(3)]
        outcomes = await asyncio.gather(*good, store.submit(bad), return_exceptions=True)
        assert isinstance(outcomes[-1], ValueError)
        assert await store.head() == 3


SUBMITTER = """
import asyncio, sys
from service.adapters.sql.postgres import PostgresSession
from service.adapters.sql.session import CommitUnknown
from service.adapters.sql.store import open_store
from tests.contracts.scenes import a_submission

async def submit_for_ever(url):
    store = await open_store(url)
    async def client(name):
        for n in range(100_000):
            await store.submit(a_submission(f"{name}-{n:06}", key=f"{name}-{n}"))
            print(f"{name}-{n:06}", flush=True)
    await asyncio.gather(*(client(f"c{c}") for c in range(8)))

asyncio.run(submit_for_ever(sys.argv[1]))
"""


def acknowledged_before_the_kill(url: str, enough: int) -> list[str]:
    """Start a process that submits, kill it with SIGKILL in the middle; the tasks it was told of."""
    process = subprocess.Popen([sys.executable, "-c", SUBMITTER, url], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    told = [process.stdout.readline().strip() for _ in range(enough)]
    os.kill(process.pid, signal.SIGKILL)
    rest = process.stdout.read().splitlines(keepends=True)
    process.wait()
    return told + [line.strip() for line in rest if line.endswith("\n")]


async def test_nothing_acknowledged_is_lost_when_the_process_is_killed(url: str) -> None:
    told = await asyncio.to_thread(acknowledged_before_the_kill, url, 200)
    async with opened(url) as store:
        log = await log_of(store)
        assert {event.key for event in log} >= set(told)
        assert [event.position for event in log] == list(range(1, len(log) + 1))
        specs = await store.specs([TaskId(event.key) for event in log])
        assert len(specs) == len(log)


async def test_a_broken_connection_is_made_again(postgres_url: str) -> None:
    async with opened(postgres_url) as store:
        await store.submit(a_submission("t1"))
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        assert (await store.submit(a_submission("t2"))).verdict is SubmitVerdict.ACCEPTED
        assert await store.record(TaskId("t2")) is not None
        assert await store.head() == 2


@pytest.mark.parametrize("cut", [Cut.BEFORE_COMMIT, Cut.AFTER_COMMIT])
async def test_a_commit_whose_answer_is_lost_is_done_once(postgres_url: str, cut: Cut) -> None:
    heard: list[Event] = []
    async with a_wire(postgres_url) as (wire, url), opened(url) as store:
        store.listen(heard.extend)
        await store.submit(a_submission("t1"))
        wire.cut = cut
        group = [store.submit(a_submission(f"t{n}", key=f"k{n}")) for n in range(2, 10)]
        outcomes = await asyncio.wait_for(asyncio.gather(*group), DEADLINE_SECONDS)
        assert wire.was_cut.is_set()
        assert {outcome.verdict for outcome in outcomes} == {SubmitVerdict.ACCEPTED}
        log = await log_of(store)
        assert [event.position for event in log] == list(range(1, 10))
        assert heard == log


@pytest.mark.parametrize("cut", [Cut.BEFORE_COMMIT, Cut.AFTER_COMMIT])
async def test_a_decision_whose_commit_is_lost_is_committed_not_stale(postgres_url: str, cut: Cut) -> None:
    task = a_task("t1")
    async with a_wire(postgres_url) as (wire, url), opened(url) as store:
        term = await with_gpu(store, task)
        wire.cut = cut
        assert await store.commit(term, [admission(task)]) == [CommitVerdict.COMMITTED]
        assert wire.was_cut.is_set()
        assert [row.version for row in (await store.snapshot()).tasks] == [2]


async def test_while_the_database_is_away_callers_are_told_and_later_served(postgres_url: str) -> None:
    async with a_wire(postgres_url) as (wire, url), opened(url) as store:
        await store.submit(a_submission("t1"))
        wire.go_down()
        with pytest.raises(StoreUnavailable):
            await store.submit(a_submission("t2"))
        with pytest.raises(StoreUnavailable):
            await store.record(TaskId("t1"))
        with pytest.raises(StoreUnavailable):
            await store.take_term("leader")
        wire.come_back()
        assert (await store.submit(a_submission("t2"))).verdict is SubmitVerdict.ACCEPTED
        assert [event.key for event in await log_of(store)] == ["t1", "t2"]
        assert await store.take_term("leader") == 1


async def test_an_unknown_commit_waits_until_it_can_be_read_back(postgres_url: str) -> None:
    async with a_wire(postgres_url) as (wire, url), opened(url) as store:
        await store.submit(a_submission("t1"))
        wire.cut, wire.is_down = Cut.AFTER_COMMIT, True
        waiting = asyncio.create_task(store.submit(a_submission("t2")))
        await wire.was_cut.wait()
        with pytest.raises(StoreUnavailable):
            await store.submit(a_submission("t3"))
        assert not waiting.done()
        wire.come_back()
        outcome = await asyncio.wait_for(waiting, DEADLINE_SECONDS)
        assert outcome.verdict is SubmitVerdict.ACCEPTED
        assert [event.key for event in await log_of(store)] == ["t1", "t2"]


async def test_two_processes_number_one_log_and_each_hears_all_of_it(postgres_url: str) -> None:
    async with opened(postgres_url) as one, opened(postgres_url) as two:
        heard: list[Event] = []
        one.listen(heard.extend)
        names = [(store, f"{name}-{n:02}") for n in range(40) for store, name in ((one, "one"), (two, "two"))]
        await asyncio.gather(*(store.submit(a_submission(name)) for store, name in names))
        await one.submit(a_submission("last"))
        log = await log_of(two)
        assert [event.position for event in log] == list(range(1, 82))
        assert heard == log


async def test_one_key_at_two_processes_is_one_task(postgres_url: str) -> None:
    async with opened(postgres_url) as one, opened(postgres_url) as two:
        submissions = [
            store.submit(a_submission(f"{name}{n}", key=f"k{n}"))
            for n in range(20)
            for store, name in ((one, "one"), (two, "two"))
        ]
        outcomes = await asyncio.gather(*submissions)
        accepted = [outcome for outcome in outcomes if outcome.verdict is SubmitVerdict.ACCEPTED]
        assert len(accepted) == 20
        assert {outcome.task for outcome in outcomes} == {outcome.task for outcome in accepted}


async def test_a_leader_in_another_process_ends_this_one(postgres_url: str) -> None:
    task = a_task("t1")
    async with opened(postgres_url) as one, opened(postgres_url) as two:
        old = await with_gpu(one, task)
        await two.take_term("two")
        with pytest.raises(StaleTerm, match="two leads term 2"):
            await one.commit(old, [admission(task)])


@contextmanager
def file_size_limit(size_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond it: what a full disk looks like from inside."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_process_that_hangs_in_a_commit_does_not_hold_up_the_others(postgres_url: str) -> None:
    hanging = PostgresSession(postgres_url)
    hanging.begin()
    hanging.number(1)  # it has the head of the log, and now does nothing
    async with opened(postgres_url) as store:
        outcome = await asyncio.wait_for(store.submit(a_submission("t1")), DEADLINE_SECONDS)
        assert outcome.verdict is SubmitVerdict.ACCEPTED
        assert await store.head() == 1
    with pytest.raises(CommitUnknown):
        hanging.commit()
    hanging.close()


async def test_a_full_disk_is_said_and_harms_nothing(tmp_path: Path) -> None:
    async with opened(f"sqlite:///{tmp_path / 'full.db'}") as store:
        await store.submit(a_submission("t1"))
        with file_size_limit(1_000_000):
            big = a_submission("t2", arguments=b"x" * 2_000_000)
            with pytest.raises(StoreUnavailable, match=r"full|I/O"):
                await store.submit(big)
        assert (await store.submit(a_submission("t3"))).verdict is SubmitVerdict.ACCEPTED
        assert [event.key for event in await log_of(store)] == ["t1", "t3"]
