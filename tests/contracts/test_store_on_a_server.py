"""What a store on a server promises: connections may break, other processes write as well, one serves."""

import asyncio
import time
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from gpubroker_server.adapters.sql import terms
from gpubroker_server.adapters.sql.postgres import PostgresSession
from gpubroker_server.adapters.sql.session import READERS, CommitUnknown
from gpubroker_server.core.domain.decisions import AuditNote, Decision, write_move
from gpubroker_server.core.domain.task import Move, TaskState
from gpubroker_server.core.domain.units import NodeName, TaskId
from gpubroker_server.core.world.events import Event
from gpubroker_server.ports.store import (
    BatchSubmission,
    CommitVerdict,
    StaleTerm,
    StoreUnavailable,
    SubmitVerdict,
    TaskFilter,
    TokenRow,
    Unstorable,
)
from msgspec.structs import replace

from tests.builders import GIB, NOW, a_task
from tests.contracts.scenes import (
    a_submission,
    admission,
    log_of,
    next_term,
    opened,
    with_gpu,
)
from tests.contracts.test_store_objects import PLENTY, an_object
from tests.contracts.test_store_records import an_idle_template
from tests.contracts.wire import Cut, a_wire, little_patience
from tests.patience import PATIENCE_SECONDS


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


async def test_commit_larger_than_the_socket_buffer_does_not_wait_for_itself(
    postgres_url: str,
) -> None:
    """The statements of one commit are 5 MB here. Until all of them are sent, there is no answer."""
    async with opened(postgres_url) as store:
        term = await next_term(store, "test")
        tasks = [a_task(f"t{n:05}") for n in range(9_000)]
        await store.submit_batch(BatchSubmission([a_submission(task) for task in tasks]))
        before = connections_to(postgres_url)
        writes = [write_move(task, Move.CANCELLED, finished_at=NOW) for task in tasks]
        decisions = [Decision(write.task.id, "cancel", tasks=(write,)) for write in writes]
        assert set(await store.commit(term, decisions)) == {CommitVerdict.COMMITTED}
        assert connections_to(postgres_url) == before, "none was given up and made again"


def connections_to(url: str) -> set[int]:
    with psycopg.connect(url, autocommit=True) as connection:
        found = connection.execute(
            "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'gpubroker%'"
            " AND datname = current_database()"
        )
        return {pid for (pid,) in found}


@pytest.mark.parametrize("cut", [Cut.BEFORE_COMMIT, Cut.AFTER_COMMIT])
async def test_a_commit_whose_answer_is_lost_is_done_once(postgres_url: str, cut: Cut) -> None:
    heard: list[Event] = []
    async with a_wire(postgres_url) as (wire, url), opened(url) as store:
        store.listen(heard.extend)
        await store.submit(a_submission("t1"))
        wire.cut = cut
        group = [store.submit(a_submission(f"t{n}", key=f"k{n}")) for n in range(2, 10)]
        outcomes = await asyncio.wait_for(asyncio.gather(*group), PATIENCE_SECONDS)
        assert wire.was_cut.is_set()
        assert {outcome.verdict for outcome in outcomes} == {SubmitVerdict.ACCEPTED}
        log = await log_of(store)
        assert [event.position for event in log] == list(range(1, 10))
        assert heard == log


@pytest.mark.parametrize("cut", [Cut.BEFORE_COMMIT, Cut.AFTER_COMMIT, Cut.GOODBYE])
async def test_a_decision_whose_commit_is_lost_is_committed_not_stale(postgres_url: str, cut: Cut) -> None:
    task = a_task("t1")
    async with a_wire(postgres_url) as (wire, url), opened(url) as store:
        term = await with_gpu(store, task)
        wire.cut = cut
        assert await store.commit(term, [admission(task)]) == [CommitVerdict.COMMITTED]
        assert wire.was_cut.is_set()
        assert [row.version for row in (await store.snapshot()).tasks] == [2]


@pytest.mark.parametrize("cut", [Cut.BEFORE_COMMIT, Cut.AFTER_COMMIT, Cut.GOODBYE])
async def test_a_lost_commit_without_events_is_told_from_its_audit_note(postgres_url: str, cut: Cut) -> None:
    async with a_wire(postgres_url) as (wire, url), opened(url) as store:
        term = await with_gpu(store)
        note = AuditNote(NOW, "lab", "ann", "quarantine.released", "gpu0", "the node was looked at")
        wire.cut = cut
        assert await store.commit(term, [Decision("gpu0", "note", audit=(note,))]) == [
            CommitVerdict.COMMITTED
        ]
        assert wire.was_cut.is_set()
    with psycopg.connect(postgres_url) as connection:
        found = connection.execute("SELECT count(*) FROM audit WHERE actor = 'ann'").fetchall()
        assert found == [(1,)]


@pytest.mark.parametrize("cut", [Cut.BEFORE_COMMIT, Cut.AFTER_COMMIT, Cut.GOODBYE])
async def test_object_removed_by_a_lost_commit_counts_as_removed(postgres_url: str, cut: Cut) -> None:
    async with a_wire(postgres_url) as (wire, url), opened(url) as store:
        mine = an_object()
        await store.keep_object(mine, PLENTY)
        wire.cut = cut
        assert await store.drop_object(mine.tenant, mine.digest)
        assert wire.was_cut.is_set()
        assert not await store.drop_object(mine.tenant, mine.digest)


@pytest.mark.parametrize("cut", [Cut.BEFORE_COMMIT, Cut.AFTER_COMMIT, Cut.GOODBYE])
async def test_a_lost_commit_of_nothing_is_done_again(postgres_url: str, cut: Cut) -> None:
    async with a_wire(postgres_url) as (wire, url), opened(url) as store:
        term = await with_gpu(store)
        head = await store.head()
        wire.cut = cut
        assert await store.commit(term, [Decision("gpu0", "nothing")]) == [CommitVerdict.COMMITTED]
        assert wire.was_cut.is_set()
        assert await store.head() == head


async def test_decision_another_leader_committed_instead_is_not_taken_as_own(
    postgres_url: str,
) -> None:
    """It looks the same in the log: the same task, in the same version, at the same position."""
    task = a_task("t1")
    async with a_wire(postgres_url) as (wire, url), opened(url) as one, opened(postgres_url) as two:
        term = await with_gpu(one, task)
        wire.cut, wire.is_down = Cut.BEFORE_COMMIT, True  # and whoever comes back finds nobody
        waiting = asyncio.create_task(one.commit(term, [admission(task, mb=10 * GIB)]))
        await asyncio.wait_for(wire.was_cut.wait(), PATIENCE_SECONDS)
        other = await next_term(two, "two")
        assert await two.commit(other, [admission(task, mb=20 * GIB)]) == [CommitVerdict.COMMITTED]
        wire.come_back()
        with pytest.raises(StaleTerm):
            await asyncio.wait_for(waiting, PATIENCE_SECONDS)


async def test_a_commit_that_is_cut_in_the_middle_says_what_was_written(postgres_url: str) -> None:
    tasks = [a_task(f"t{n}") for n in range(3)]
    async with a_wire(postgres_url) as (wire, url), opened(url) as store:
        term = await with_gpu(store, *tasks)
        wire.down_at = b"BEGIN"
        stale = admission(a_task("unknown"))  # one that fails, so that each is written by itself
        decisions = [admission(tasks[0]), stale, admission(tasks[1]), admission(tasks[2])]
        verdicts = await store.commit(term, decisions)
        assert wire.was_cut.is_set()
        assert verdicts == [CommitVerdict.COMMITTED, *[CommitVerdict.UNAVAILABLE] * 3]
        wire.come_back()
        assert await store.commit(term, decisions[2:]) == [CommitVerdict.COMMITTED] * 2
        states = {row.id: row.state for row in (await store.snapshot()).tasks}
        assert states == {task.id: TaskState.ADMITTED for task in tasks}


async def test_no_caller_is_answered_before_the_events_of_its_commit(postgres_url: str) -> None:
    """What another process wrote in between must be read first, and the database is away just then."""
    heard: list[Event] = []
    async with a_wire(postgres_url) as (wire, url), opened(url) as one, opened(postgres_url) as two:
        one.listen(heard.extend)
        await two.submit(a_submission("t1"))
        wire.down_at = b"JOIN event"
        waiting = asyncio.create_task(one.submit(a_submission("t2")))
        await asyncio.wait_for(wire.was_cut.wait(), PATIENCE_SECONDS)
        with pytest.raises(StoreUnavailable):
            await one.submit(a_submission("t3"))
        assert (waiting.done(), heard) == (False, [])
        wire.come_back()
        outcome = await asyncio.wait_for(waiting, PATIENCE_SECONDS)
        assert outcome.verdict is SubmitVerdict.ACCEPTED
        assert [event.key for event in heard] == ["t1", "t2"]


SAME_KEY = """
INSERT INTO task (id, tenant, name, priority, demand, submitted_at, max_retries, grace_seconds, shareable,
    stream, subject, after, awaits, held, idem_key)
    VALUES ('other', 'default', '', 50, '{}', 0, 0, 30, false, '', '', '[]', false, false, 'key')
"""
WAITING = "SELECT count(*) FROM pg_locks WHERE NOT granted"


def insert_once_somebody_waits(connection: psycopg.Connection[Any], statement: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while connection.execute(WAITING).fetchone() == (0,):
        assert time.monotonic() < deadline, "nobody waits for a lock"
    with suppress(psycopg.errors.DeadlockDetected):  # ours came back before this one had moved on
        connection.execute(statement)


async def test_commit_in_the_way_of_another_gives_way_and_is_tried_again(
    postgres_url: str,
) -> None:
    """Ours has the key and waits for the head of the log, the other has the head and asks for the key."""
    async with opened(postgres_url) as store:
        with psycopg.connect(postgres_url) as other:
            other.execute("UPDATE log_head SET position = position")
            ours = asyncio.create_task(store.submit(a_submission("t1", key="key")))
            await asyncio.to_thread(insert_once_somebody_waits, other, SAME_KEY)
            other.rollback()
        outcome = await asyncio.wait_for(ours, PATIENCE_SECONDS)
        assert (outcome.verdict, outcome.task) == (SubmitVerdict.ACCEPTED, "t1")
        assert [event.key for event in await log_of(store)] == ["t1"]


UNSTORABLE = ["half a pair: \ud800", "nul: \0"]


@pytest.mark.parametrize("text", UNSTORABLE, ids=["half a pair", "nul"])
async def test_unstorable_decision_gets_its_verdict_and_others_are_written(
    postgres_url: str, text: str
) -> None:
    first, second = a_task("t1"), a_task("t2")
    async with opened(postgres_url) as store:
        term = await with_gpu(store, first, second)
        bad = replace(admission(first), tasks=(write_move(first, Move.ADMITTED, node=NodeName(text)),))
        verdicts = await store.commit(term, [bad, admission(second)])
        assert verdicts == [CommitVerdict.UNSTORABLE, CommitVerdict.COMMITTED]


async def test_what_no_row_can_hold_cannot_be_looked_for(postgres_url: str) -> None:
    async with opened(postgres_url) as store:
        for wanted in (TaskFilter("lab", name="nul: \0"), TaskFilter("lab", labels={"team": "nul: \0"})):
            with pytest.raises(Unstorable, match="no row can hold"):
                await store.records(wanted)
        with pytest.raises(Unstorable):
            await store.record(TaskId("nul: \0"))


async def test_a_token_whose_commit_was_lost_is_put_once_and_is_ours(postgres_url: str) -> None:
    async with a_wire(postgres_url) as (wire, url), opened(url) as store:
        wire.cut = Cut.AFTER_COMMIT
        assert await store.put_token(
            TokenRow("ci", "lab", ("*",), 100, sha256="hash", created_at=NOW), by="alice"
        )
        assert wire.was_cut.is_set()
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT actor FROM audit").fetchall() == [("alice",)]


async def test_an_idle_template_whose_commit_was_lost_is_put_once_and_is_ours(postgres_url: str) -> None:
    async with a_wire(postgres_url) as (wire, url), opened(url) as store:
        wire.cut = Cut.AFTER_COMMIT
        assert await store.put_idle_template(an_idle_template())
        assert wire.was_cut.is_set()
        assert await store.drop_idle_template("sweep", by="bob")
    with psycopg.connect(postgres_url) as connection:
        noted = connection.execute("SELECT actor, action, tenant FROM audit ORDER BY id").fetchall()
        assert noted == [("a", "idle-template.put", "lab"), ("bob", "idle-template.dropped", "lab")]


@pytest.mark.parametrize("cut", [Cut.BEFORE_COMMIT, Cut.AFTER_COMMIT, Cut.GOODBYE])
async def test_an_audit_note_whose_commit_was_lost_is_written_once(postgres_url: str, cut: Cut) -> None:
    async with a_wire(postgres_url) as (wire, url), opened(url) as store:
        wire.cut = cut
        await store.audit(by="ann", tenant="lab", action="service.shutdown", subject="service")
        assert wire.was_cut.is_set()
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT actor FROM audit").fetchall() == [("ann",)]


@pytest.mark.parametrize("cut", [Cut.BEFORE_COMMIT, Cut.AFTER_COMMIT, Cut.GOODBYE])
async def test_a_drop_whose_commit_was_lost_is_noted_once_and_done(postgres_url: str, cut: Cut) -> None:
    async with a_wire(postgres_url) as (wire, url), opened(url) as store:
        await store.put_token(TokenRow("ci", "lab", ("*",), 100, sha256="hash", created_at=NOW), by="alice")
        await store.put_idle_template(an_idle_template())
        for drop in (store.drop_token("ci", by="bob"), store.drop_idle_template("sweep", by="bob")):
            wire.was_cut.clear()
            wire.cut = cut
            assert await drop is True
            assert wire.was_cut.is_set()
    with psycopg.connect(postgres_url) as connection:
        noted = connection.execute("SELECT action FROM audit WHERE actor = 'bob' ORDER BY id").fetchall()
        assert noted == [("token.dropped",), ("idle-template.dropped",)]


async def test_callers_get_an_error_while_the_database_is_away_and_later_succeed(
    postgres_url: str,
) -> None:
    async with a_wire(postgres_url) as (wire, url), opened(url) as store:
        await store.submit(a_submission("t1"))
        wire.go_down()
        with pytest.raises(StoreUnavailable):
            await store.submit(a_submission("t2"))
        with pytest.raises(StoreUnavailable):
            await store.record(TaskId("t1"))
        with pytest.raises(StoreUnavailable):
            await next_term(store, "leader")
        wire.come_back()
        assert (await store.submit(a_submission("t2"))).verdict is SubmitVerdict.ACCEPTED
        assert [event.key for event in await log_of(store)] == ["t1", "t2"]
        assert await next_term(store, "leader") == 1


async def test_a_read_without_an_answer_times_out(postgres_url: str) -> None:
    """The line is there and says nothing: as many ask as can read at once, and others after them."""
    async with a_wire(postgres_url) as (wire, url), opened(url) as store:
        await store.submit(a_submission("t1"))
        await asyncio.gather(*(store.head() for _ in range(2 * READERS)))
        wire.hold()
        answers = [store.record(TaskId("t2")) for _ in range(2 * READERS)]
        with little_patience():
            async with asyncio.timeout(PATIENCE_SECONDS):
                told = await asyncio.gather(*answers, return_exceptions=True)
        assert {type(answer) for answer in told} == {StoreUnavailable}
        wire.go_on()
        assert await store.head() == 1


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
        outcome = await asyncio.wait_for(waiting, PATIENCE_SECONDS)
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
        await next_term(two, "two")
        with pytest.raises(StaleTerm, match="two leads term 2"):
            await one.commit(old, [admission(task)])


async def test_a_process_that_hangs_in_a_commit_does_not_hold_up_the_others(postgres_url: str) -> None:
    hanging = PostgresSession(postgres_url)
    hanging.begin()
    hanging.take_positions(1)  # it has the head of the log, and now does nothing
    async with opened(postgres_url) as store:
        outcome = await asyncio.wait_for(store.submit(a_submission("t1")), PATIENCE_SECONDS)
        assert outcome.verdict is SubmitVerdict.ACCEPTED
        assert await store.head() == 1
    with pytest.raises(CommitUnknown):
        hanging.commit()
    hanging.close()


def test_statements_of_a_transaction_are_sent_together_before_a_wait(
    postgres_url: str,
) -> None:
    """A statement that is sent alone wakes the server, which costs more than the statement."""
    session = PostgresSession(postgres_url)
    pid = session._connection.info.backend_pid
    asked = "SELECT state, xact_start IS NULL FROM pg_stat_activity WHERE pid = %s"
    with psycopg.connect(postgres_url, autocommit=True) as other:
        session.begin()
        leader = session.fetch_later(terms.leader_row, [(1,)])
        assert other.execute(asked, [pid]).fetchone() == ("idle", True)
        session.take_positions(0)
        assert other.execute(asked, [pid]).fetchone() == ("idle in transaction", False)
    session.commit()
    assert len(leader()) == 1
    session.close()
