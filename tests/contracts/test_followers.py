"""What a process hears of others on one PostgreSQL: each event once, in order, and a word that wakes it."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import psycopg
import pytest
from gpubroker_server.adapters.sql import connections
from gpubroker_server.adapters.sql.store import SqlStore
from gpubroker_server.bootstrap.follower import LogFollower, fill, refill
from gpubroker_server.bootstrap.leader_status import LeaderStatus
from gpubroker_server.broker.background import Publisher
from gpubroker_server.core.control.backpressure import Pressure
from gpubroker_server.core.control.disk_guard import DiskLevel, DiskStanding
from gpubroker_server.core.control.fleet import FleetSeen, TargetSeen
from gpubroker_server.core.control.idle import Idle
from gpubroker_server.core.control.node_watch import Overload
from gpubroker_server.core.domain.device import DiskSample, GpuHealth, NodeSample, StoreSample
from gpubroker_server.core.domain.policy import HALF_LIFE_SECONDS, Policy
from gpubroker_server.core.domain.progress import first_progress
from gpubroker_server.core.domain.units import Instant, Mib, NodeName, Seconds, TaskId, Term
from gpubroker_server.core.lifecycle.silent_nodes import PausedDetection
from gpubroker_server.core.world.events import Event
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.last_values import LastValues, LeaderSeen
from gpubroker_server.ports.store import LogShortened, StoreUnavailable
from msgspec.structs import replace

from tests.builders import a_device, a_node, a_task
from tests.contracts.proxy import a_proxy, to_postgres, url_through
from tests.contracts.scenes import a_submission, admission, log_of, next_term, opened, picture, with_gpu
from tests.contracts.wire import a_wire
from tests.patience import PATIENCE_SECONDS

MANY = 1500
"""More than are handed out at once."""


NODE_SAMPLE = NodeSample(
    NodeName("n1"), Instant(1.0), 0.5, Mib(100), Mib(60), 0.25, (DiskSample("/", 1000, 400),), 7, 8,
    StoreSample(64, None), {"GPU-a": GpuHealth(300.5, 54.0, 1980, 2619, 0)},
)  # fmt: skip


async def heard_all(store: SqlStore) -> None:
    while await store.catch_up():
        pass


def fails(part: str, fault: BaseException) -> None:
    raise AssertionError(part) from fault


@asynccontextmanager
async def at_work(picture: LogFollower) -> AsyncIterator[None]:
    jobs = [asyncio.create_task(job) for _, job in picture.jobs()]
    try:
        yield
    finally:
        for job in jobs:
            job.cancel()
        await asyncio.wait(jobs)


def shorten(url: str, upto: int) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("DELETE FROM event WHERE position <= %s", [upto])


async def test_what_another_process_wrote_is_heard_once_in_order_and_in_parts(postgres_url: str) -> None:
    heard: list[Sequence[Event]] = []
    async with opened(postgres_url) as one, opened(postgres_url) as two:
        two.listen(heard.append)
        await asyncio.gather(*(one.submit(a_submission(f"t{n}")) for n in range(MANY)))
        assert await two.catch_up() is True
        assert await two.catch_up() is False
        assert [len(part) for part in heard] == [500, 500, 500]
        await two.submit(a_submission("own"))
        await one.submit(a_submission("other"))
        assert await two.catch_up() is False
        assert [event for part in heard for event in part] == await log_of(one)
        assert await two.catch_up() is False
        assert sum(len(part) for part in heard) == MANY + 2


async def test_a_follower_has_the_world_of_the_writer(postgres_url: str) -> None:
    worlds = World(), World()
    task = a_task("t1")
    async with opened(postgres_url) as leader, opened(postgres_url) as follower:
        leader.listen(worlds[0].apply)
        follower.listen(worlds[1].apply)
        term = await with_gpu(leader, task)
        await leader.commit(term, [admission(task)])
        await heard_all(follower)
        assert worlds[0].position == await leader.head()
        assert picture(worlds[0]) == picture(worlds[1])


async def test_follower_fails_while_the_database_is_away_and_then_has_all_events(
    postgres_url: str,
) -> None:
    heard: list[Event] = []
    async with opened(postgres_url) as one, a_wire(postgres_url) as (wire, url), opened(url) as two:
        two.listen(heard.extend)
        wire.go_down()
        with pytest.raises(StoreUnavailable):
            await two.catch_up()
        await one.submit(a_submission("t1"))
        wire.come_back()
        with suppress(StoreUnavailable):  # of the connection that was lost
            await two.catch_up()
        await heard_all(two)
        assert heard == await log_of(one)


async def test_a_shortened_log_is_reported_and_can_be_skipped(postgres_url: str) -> None:
    heard: list[Event] = []
    async with opened(postgres_url) as one, opened(postgres_url) as two:
        two.listen(heard.extend)
        for name in ("t1", "t2", "t3"):
            await one.submit(a_submission(name))
        shorten(postgres_url, 2)
        with pytest.raises(LogShortened, match="after position 0"):
            await two.catch_up()
        await two.submit(a_submission("own"))  # which cannot be heard of before the events that are gone
        assert heard == []
        snapshot = await two.snapshot()
        await two.go_on_at(snapshot.position, snapshot.lineage)
        await one.submit(a_submission("t5"))
        assert await two.catch_up() is False
        assert [event.key for event in heard] == ["t5"]


async def test_a_world_that_fell_behind_the_log_is_read_again(postgres_url: str) -> None:
    async with opened(postgres_url) as one, opened(postgres_url) as two:
        seen = LogFollower(two, HALF_LIFE_SECONDS, fails)
        anew = asyncio.Event()
        seen.on_reread.append(lambda _fault: anew.set())
        await seen.begin()
        inventory = seen.world.inventory_version
        term = await with_gpu(one, task := a_task("t1"))
        await one.commit(term, [admission(task)])
        shorten(postgres_url, await one.head() - 1)
        async with at_work(seen):
            await asyncio.wait_for(anew.wait(), PATIENCE_SECONDS)
        whole = World()
        fill(whole, await one.snapshot())
        assert picture(seen.world) == picture(whole)
        assert seen.world.inventory_version > inventory


async def test_picture_hears_of_a_commit_elsewhere_and_knows_that_it_is_current(postgres_url: str) -> None:
    async with opened(postgres_url) as one, opened(postgres_url) as two:
        seen, there = LogFollower(two, HALF_LIFE_SECONDS, fails), asyncio.Event()
        await seen.begin()
        seen.listen(lambda _events: there.set())
        async with at_work(seen):
            await one.submit(a_submission("t1"))
            await asyncio.wait_for(there.wait(), PATIENCE_SECONDS)
            assert seen.world.tasks[TaskId("t1")].id == "t1"
            assert seen.age_seconds() < PATIENCE_SECONDS


async def test_every_process_knows_what_the_leader_says_of_nodes_and_fleet(
    postgres_url: str,
) -> None:
    paused = PausedDetection(
        "2 nodes fell silent at once", (NodeName("n1"), NodeName("n2")), 7, 20, Instant(1.0)
    )
    silent = {NodeName("n1"): Instant(2.0)}
    async with opened(postgres_url) as one, opened(postgres_url) as two:
        seen = LogFollower(two, HALF_LIFE_SECONDS, fails)
        await seen.begin()
        gateway = LeaderStatus(two, seen, Policy(), None)
        assert (gateway.leader(), gateway.paused()) == (None, None)
        term = await next_term(one)
        seen.world.add_node(a_node())
        seen.world.add_device(a_device())
        target = TargetSeen("all", "disk", 0.0, 0.7, None, is_in=True, since=Instant(3.0))
        pressure = Pressure("disk_percent", Instant(4.0), 96.0, 95.0, 40, Seconds(30.0))
        fleet = FleetSeen(
            (target,), {"all": 0}, (Idle("n1", 0.0, Instant(5.0)),), (pressure,), {"disk_percent": 96.0},
            stream_weights={"a": 2.0}, overloaded=(Overload(NodeName("n1"), "cpu"),),
            low_disks=(DiskStanding(NodeName("n1"), "/data", 0.7, DiskLevel.BLOCK, 0.7),),
            done={"started": 7}, events={"fleet.NODE_JOINED": 1},
        )  # fmt: skip
        said = LeaderSeen(term, "one:1", seen.clock.now(), {}, paused, silent, fleet=fleet)
        seen.world.measure([], [NODE_SAMPLE])
        publisher = Publisher(seen.world, {}, lambda _: said, one)
        await publisher.publish(term)
        seen.world.node_samples.clear()
        jobs = dict(gateway.jobs())
        jobs["forecasts"].close()
        hearing = asyncio.create_task(jobs["last values"])
        async with asyncio.timeout(PATIENCE_SECONDS):
            while gateway.leader() is None:  # noqa: ASYNC110  # what is no event is looked for
                await asyncio.sleep(0.01)
        assert gateway.leader() == said
        assert gateway.paused() == paused
        assert seen.world.background.is_closed(NodeName("n1"))
        assert seen.world.queue.stream_weights == {"a": 2.0}
        assert seen.world.node_samples == {"n1": NODE_SAMPLE}
        said = replace(said, at=Instant(1.0))
        await publisher.publish(term)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while gateway.leader() is not None:  # noqa: ASYNC110  # what is no event is looked for
                await asyncio.sleep(0.01)
        assert gateway.last_fleet() == fleet
        hearing.cancel()
        await asyncio.wait([hearing])


async def test_unknown_fields_of_a_newer_leader_are_ignored(postgres_url: str) -> None:
    async with opened(postgres_url) as one:
        progress = first_progress(Instant(1.0), 0.25, "").followed_by(Instant(2.0), 0.5, "half")
        leader = LeaderSeen(Term(1), "one:1", Instant(1.0), {})
        word = LastValues(progress={TaskId("one"): progress}, leader=leader, nodes=(NODE_SAMPLE,))
        await one.publish(Term(1), 1, word)
        with psycopg.connect(postgres_url) as connection:
            connection.execute('UPDATE last_value SET value = (value::jsonb || \'{"mood": "fine"}\')::text')
        assert (await one.published(0))[1] == word


async def test_a_leader_publishes_each_sample_once(postgres_url: str) -> None:
    world, later = World(), replace(NODE_SAMPLE, at=Instant(2.0))
    async with opened(postgres_url) as one:
        publisher = Publisher(world, {}, lambda term: LeaderSeen(term, "one:1", Instant(1.0), {}), one)
        term, heard, told = await next_term(one), 0, []
        for samples in ([NODE_SAMPLE], [], [later], []):
            world.measure([], samples)
            await publisher.publish(term)
            heard, values = await one.published(heard)
            told.append(values.nodes)
        assert told == [(NODE_SAMPLE,), (), (later,), ()]
        await publisher.publish(await next_term(one))
        assert (await one.published(heard))[1].nodes == (later,), "the next leader tells all"


async def test_what_is_idle_is_published_when_it_changes_and_by_each_leader(postgres_url: str) -> None:
    """A large fleet has half a megabyte of it."""
    idle = Idle("n1", 0.0, Instant(5.0))
    fleet, heard, told = FleetSeen(), 0, []
    async with opened(postgres_url) as one:
        said = LeaderSeen(await next_term(one), "one:1", Instant(1.0), {})
        publisher = Publisher(World(), {}, lambda _: replace(said, fleet=fleet), one)
        for found in ((idle,), (idle,), ()):
            fleet = FleetSeen(idle=found, done={"started": 7})
            await publisher.publish(said.term)
            heard, values = await one.published(heard)
            assert values.leader == replace(said, fleet=FleetSeen(done={"started": 7}))
            told.append(values.idle)
        assert told == [(idle,), None, ()]
        await publisher.publish(await next_term(one))
        assert (await one.published(heard))[1].idle == ()


async def test_a_refilled_world_forgets_what_is_gone(postgres_url: str) -> None:
    world = World()
    world.add_task(a_task("gone"))
    async with opened(postgres_url) as store:
        await store.submit(a_submission("there"))
        refill(world, await store.snapshot())
    assert list(world.tasks) == ["there"]


async def test_a_hint_wakes_other_processes_and_not_the_sender(postgres_url: str) -> None:
    async with opened(postgres_url) as one, opened(postgres_url) as two:
        words = {one: asyncio.Event(), two: asyncio.Event()}
        keeping = [asyncio.create_task(store.keep_hints(word.set)) for store, word in words.items()]
        for word in words.values():  # once it listens
            await asyncio.wait_for(word.wait(), PATIENCE_SECONDS)
            word.clear()
        await one.submit(a_submission("t1"))
        await asyncio.wait_for(words[two].wait(), PATIENCE_SECONDS)
        assert not words[one].is_set()
        for job in keeping:
            job.cancel()
        await asyncio.wait(keeping)


async def test_a_leader_that_resigns_notifies_listening_processes(postgres_url: str) -> None:
    async with opened(postgres_url) as one, opened(postgres_url) as two:
        words = {one: asyncio.Event(), two: asyncio.Event()}
        keeping = [asyncio.create_task(store.keep_hints(word.set)) for store, word in words.items()]
        for word in words.values():  # once it listens
            await asyncio.wait_for(word.wait(), PATIENCE_SECONDS)
            word.clear()
        term = await next_term(one)
        await one.resign(Term(term - 1))
        await one.submit(a_submission("t1"))
        await asyncio.wait_for(words[two].wait(), PATIENCE_SECONDS)
        assert not two.resigned.is_set(), "neither a term that is long over nor what is written is meant"
        await one.resign(term)
        await asyncio.wait_for(two.resigned.wait(), PATIENCE_SECONDS)
        assert (await two.leader()).is_past
        for job in keeping:
            job.cancel()
        await asyncio.wait(keeping)


async def test_a_listener_reconnects_after_the_server_closed_the_connection(postgres_url: str) -> None:
    async with opened(postgres_url) as one, opened(postgres_url) as two:
        words = [asyncio.Event(), asyncio.Event()]
        keeping = [
            asyncio.create_task(store.keep_hints(word.set))
            for store, word in zip((one, two), words, strict=True)
        ]
        for word in words:  # each begins with a look
            await asyncio.wait_for(word.wait(), PATIENCE_SECONDS)
            word.clear()
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        async with asyncio.timeout(PATIENCE_SECONDS):
            for word in words:
                await word.wait()
        for job in keeping:
            job.cancel()
        await asyncio.wait(keeping)


async def test_a_listener_reconnects_when_the_connection_is_silent(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes every byte and passes none on; new ones are good."""
    monkeypatch.setattr(connections, "PROBE_SECONDS", 0.2)
    word = asyncio.Event()
    async with (
        a_proxy(to_postgres(postgres_url)) as proxy,
        opened(url_through(proxy, postgres_url)) as store,
    ):
        keeping = asyncio.create_task(store.keep_hints(word.set))
        await asyncio.wait_for(word.wait(), PATIENCE_SECONDS)
        proxy.fall_silent()
        word.clear()
        await asyncio.wait_for(word.wait(), PATIENCE_SECONDS)  # each connection begins with a look
        keeping.cancel()
        await asyncio.wait([keeping])


def test_a_connection_of_a_cancelled_caller_is_closed(postgres_url: str) -> None:
    opened: list[psycopg.Connection[Any]] = []
    asked, may_open = threading.Event(), threading.Event()

    def connect() -> psycopg.Connection[Any]:
        asked.set()
        may_open.wait(PATIENCE_SECONDS)
        opened.append(psycopg.connect(postgres_url))
        return opened[0]

    async def leave() -> None:
        keeping = asyncio.create_task(connections.Hints(connect).keep(lambda: None, lambda: None))
        await asyncio.to_thread(asked.wait, PATIENCE_SECONDS)
        keeping.cancel()
        await asyncio.wait([keeping])
        may_open.set()

    asyncio.run(leave())
    assert [connection.closed for connection in opened] == [True]


async def test_words_that_follow_each_other_closely_are_one(postgres_url: str) -> None:
    async with opened(postgres_url) as store:
        listens = asyncio.Event()
        keeping = asyncio.create_task(store.keep_hints(listens.set))
        await asyncio.wait_for(listens.wait(), PATIENCE_SECONDS)
        with psycopg.connect(postgres_url, autocommit=True) as other:
            other.execute("LISTEN gpubroker")
            loop = asyncio.get_running_loop()
            began = loop.time()
            for n in range(100):
                await store.submit(a_submission(f"t{n}"))
            took_seconds = loop.time() - began
            words = await asyncio.to_thread(lambda: list(other.notifies(timeout=0.5)))
        assert 1 <= len(words) <= took_seconds / 0.01 + 2
        keeping.cancel()
        await asyncio.wait([keeping])
