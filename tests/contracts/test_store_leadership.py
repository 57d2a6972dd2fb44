"""The leader's row: who leads, until when, and that nobody leads twice."""

import asyncio

import psycopg
import pytest
from gpubroker_server.adapters.sql import statements as sql
from gpubroker_server.adapters.sql.postgres import PostgresSession
from gpubroker_server.adapters.sql.session import CommitUnknown, ConnectionLost
from gpubroker_server.bootstrap.start_checks import process_name
from gpubroker_server.core.domain.units import Seconds, Term
from gpubroker_server.ports.store import CommitVerdict, StaleTerm, StoreUnavailable, SubmitVerdict, TaskStore

from tests.builders import a_task
from tests.contracts.scenes import a_submission, admission, next_term, opened, with_gpu
from tests.contracts.wire import Cut, a_wire, little_patience
from tests.patience import PATIENCE_SECONDS

TTL = Seconds(3.0)
ENDED_BY_FAILOVER = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
)


async def test_a_new_database_has_no_leader(store: TaskStore) -> None:
    row = await store.leader()
    assert (row.term, row.holder, row.is_past) == (0, "", True)


async def test_a_term_lasts_as_long_as_its_ttl(store: TaskStore) -> None:
    assert await store.take_term("one", TTL, instead_of=await store.leader()) == 1
    row = await store.leader()
    assert (row.term, row.holder, row.is_past) == (1, "one", False)
    assert 0 < row.lease_until - row.at <= TTL


async def test_one_of_two_candidates_that_saw_the_same_row_takes_the_term(store: TaskStore) -> None:
    seen = await store.leader()
    both = (store.take_term(name, TTL, instead_of=seen) for name in ("one", "two"))
    assert sorted(await asyncio.gather(*both), key=str) == [1, None]


async def test_one_of_two_processes_with_the_same_host_and_pid_takes_the_term(url: str) -> None:
    """As those of containers in their host's network: each is process 1 there."""
    async with opened(url) as store:
        seen = await store.leader()
        both = (store.take_term(process_name(), TTL, instead_of=seen) for _ in range(2))
        assert sorted(await asyncio.gather(*both), key=str) == [1, None]


async def test_a_leader_that_renewed_meanwhile_is_not_replaced(store: TaskStore) -> None:
    term = await next_term(store)
    seen = await store.leader()
    await store.renew(term, TTL)
    assert await store.take_term("two", TTL, instead_of=seen) is None
    row = await store.leader()
    assert (row.holder, row.lease_until) != (seen.holder, seen.lease_until)
    assert row.holder == "leader"


async def test_a_term_that_was_let_go_is_free_at_once_and_still_the_newest(store: TaskStore) -> None:
    term = await next_term(store)
    await store.resign(term)
    row = await store.leader()
    assert (row.term, row.is_past) == (term, True)
    assert await store.take_term("two", TTL, instead_of=row) == term + 1


async def test_an_older_term_cannot_be_renewed_and_lets_nothing_go(store: TaskStore) -> None:
    old = await next_term(store, "one")
    await next_term(store, "two")
    with pytest.raises(StaleTerm, match="two leads term 2"):
        await store.renew(old, TTL)
    await store.resign(old)
    assert not (await store.leader()).is_past


async def test_a_resigned_term_may_commit_until_the_next_one_is_taken(store: TaskStore) -> None:
    """The row's term decides, not the lease: clocks are not what keeps rows right."""
    task = a_task("t1")
    term = await with_gpu(store, task)
    await store.resign(term)
    assert await store.commit(term, [admission(task)]) == [CommitVerdict.COMMITTED]
    await next_term(store, "two")
    with pytest.raises(StaleTerm):
        await store.commit(term, [admission(a_task("t2"))])


async def test_opening_a_file_ends_the_last_lease_and_a_servers_lease_counts(url: str) -> None:
    async with opened(url) as store:
        await next_term(store, ttl_seconds=3600.0)
    async with opened(url) as store:
        assert (await store.leader()).is_past is url.startswith("sqlite")


async def test_a_term_is_held_although_the_answer_was_lost(postgres_url: str) -> None:
    async with a_wire(postgres_url) as (wire, url), opened(url) as store:
        seen = await store.leader()
        wire.cut = Cut.AFTER_COMMIT
        assert await store.take_term("one", TTL, instead_of=seen) == 1
        assert wire.was_cut.is_set()
        assert (await store.leader()).term == 1


async def test_a_renewal_waits_for_no_writer(postgres_url: str) -> None:
    """What others write may have to wait for a lock; the leader's sign of life does not."""
    async with opened(postgres_url) as store:
        term = await next_term(store)
        with psycopg.connect(postgres_url) as other:
            other.execute("SELECT position FROM log_head WHERE id = 1 FOR UPDATE")
            waiting = asyncio.create_task(store.submit(a_submission("t1")))
            await asyncio.wait_for(store.renew(term, TTL), 2.0)
            assert not waiting.done()
        await asyncio.wait_for(waiting, PATIENCE_SECONDS)


async def test_renewal_waits_for_no_commit_of_its_term_and_the_next_term_waits(
    postgres_url: str,
) -> None:
    """Where the way to the server is long, commits take long, and one follows the other."""
    async with opened(postgres_url) as store:
        term = await next_term(store)
        session = PostgresSession(postgres_url)
        session.begin()
        session.require_term(term)
        session.take_positions(0)
        await asyncio.wait_for(store.renew(term, TTL), 1.5)
        taking = asyncio.create_task(store.take_term("two", TTL, instead_of=await store.leader()))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(taking), 0.2)
        session.commit()
        assert await asyncio.wait_for(taking, PATIENCE_SECONDS) == term + 1
        session.close()


async def test_a_leader_of_a_database_that_became_read_only_cannot_renew(postgres_url: str) -> None:
    async with opened(postgres_url) as store:
        term = await next_term(store)
        name = psycopg.conninfo.conninfo_to_dict(postgres_url)["dbname"]
        with psycopg.connect(postgres_url, autocommit=True) as other:
            other.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
            try:
                other.execute(ENDED_BY_FAILOVER)
                with pytest.raises(StoreUnavailable, match="read-only"):
                    await store.renew(term, TTL)
                with pytest.raises(StoreUnavailable):
                    await store.submit(a_submission("t1"))
            finally:
                other.execute(f'ALTER DATABASE "{name}" RESET default_transaction_read_only')
        await store.renew(term, TTL)
        await store.submit(a_submission("t1"))


@pytest.mark.parametrize("where", ["between two statements", "with the head of the log in its hand"])
async def test_next_leader_ends_the_session_of_one_that_hangs_in_a_transaction(
    postgres_url: str, where: str
) -> None:
    stopped = PostgresSession(postgres_url)
    stopped.begin()
    stopped.require_term(Term(0))
    stopped.fetch(sql.oldest, [(1,)])  # so that what was said before has been sent
    if where == "with the head of the log in its hand":
        stopped.take_positions(1)
        stopped.fetch(sql.oldest, [(1,)])  # and it has begun the next statement
    async with opened(postgres_url) as store:
        took = asyncio.create_task(taken(store))
        assert await asyncio.wait_for(took, 4.0) == 1
        await asyncio.wait_for(store.submit(a_submission("t1")), 4.0)
    with pytest.raises((ConnectionLost, CommitUnknown)):
        stopped.commit()
    stopped.close()


async def taken(store: TaskStore) -> Term | None:
    """As a candidate asks, again and again."""
    while True:
        try:
            return await store.take_term("two", TTL, instead_of=await store.leader())
        except StoreUnavailable:
            await asyncio.sleep(0.1)


async def test_a_renewal_without_any_answer_is_sent_on_a_new_connection(postgres_url: str) -> None:
    """Something between the two takes every byte and passes none on: no time limit of either ends that."""
    async with a_wire(postgres_url) as (wire, url), opened(url) as store:
        term = await next_term(store)
        await store.submit(a_submission("t1"))
        wire.hold()
        with little_patience():
            waiting = asyncio.create_task(store.submit(a_submission("t2")))
            with pytest.raises(StoreUnavailable):
                await asyncio.wait_for(store.renew(term, TTL), PATIENCE_SECONDS)
            with pytest.raises(StoreUnavailable):
                await asyncio.wait_for(waiting, PATIENCE_SECONDS)
        wire.go_on()
        await store.renew(term, TTL)
        assert (await store.submit(a_submission("t2"))).verdict is SubmitVerdict.ACCEPTED
