"""Gateways on one PostgreSQL let go of a model, each for itself, before the leader has it unloaded."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import psycopg
import pytest
from gpubroker_server.adapters.sql.store import SqlStore
from gpubroker_server.bootstrap.follower import LogFollower
from gpubroker_server.broker.background import gateways_have_let_go, models_in_use
from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.holders import Model
from gpubroker_server.core.domain.model_orders import ModelsInUse
from gpubroker_server.core.domain.policy import HALF_LIFE_SECONDS, Policy
from gpubroker_server.core.domain.task import StopReason, Task
from gpubroker_server.core.domain.units import Fence, Instant, Seconds, Term, mark_of
from gpubroker_server.core.lifecycle.stopping import give_notice
from gpubroker_server.inference.draining import Draining
from gpubroker_server.ports.last_values import (
    PRESENT_SECONDS,
    LastValues,
    LeaderSeen,
    Presence,
    PresenceStore,
)
from gpubroker_server.ports.store import AdmittedTask, RunSpec
from msgspec.structs import replace

from tests.builders import a_task
from tests.contracts.scenes import admission, claimed, opened, start, with_gpu
from tests.patience import PATIENCE_SECONDS


class Requests:
    """What a gateway has under way."""

    def __init__(self) -> None:
        self.unanswered = False
        self.models: frozenset[str] = frozenset()
        self.recent: frozenset[str] = frozenset()

    def now(self) -> float:
        return 0.0

    def has_older(self, _model: str, _at: float) -> bool:
        return self.unanswered

    def in_use(self) -> ModelsInUse:
        return ModelsInUse(self.models, self.recent)


class Gateway:
    """Of one process: its own store, its own picture."""

    def __init__(self, store: SqlStore, picture: LogFollower) -> None:
        self.store = store
        self.picture = picture
        self.requests = Requests()
        self.draining = Draining(picture.world, self.requests, Policy())
        picture.listen(self.draining.on_events)


@asynccontextmanager
async def a_gateway(url: str, name: str) -> AsyncIterator[Gateway]:
    async with opened(url) as store:
        picture = LogFollower(store, HALF_LIFE_SECONDS, lambda _part, _fault: None)
        await picture.begin()
        gateway = Gateway(store, picture)
        await gateway.draining.report(store, name, picture.clock.now())
        keep = gateway.draining.keep_reporting(store, name, picture.clock)
        jobs = [asyncio.create_task(job) for job in (keep, *(job for _, job in picture.jobs()))]
        try:
            yield gateway
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.wait(jobs)
            await store.absent(name)


async def a_resident_model(store: SqlStore) -> tuple[Term, Task]:
    term = await with_gpu(store)
    task = a_task("llm", holder=Model("main", "llm"))
    await store.submit(AdmittedTask(task, RunSpec(kind="model")))
    await store.commit(term, [admission(task)])
    await store.commit(term, [start(claimed(task))])
    record = await store.record(task.id)
    assert record is not None
    return term, record.task


async def stop(leader: Gateway, term: Term, task: Task) -> str:
    """Give it notice."""
    world = leader.picture.world
    notice, _ = give_notice(world, task, StopReason.PREEMPT, Seconds(30.0), leader.picture.clock.now())
    await leader.store.commit(term, [Decision(task.id, "evict", tasks=(notice,))])
    return mark_of(task.id, task.fence, 0)


async def let_go(leader: Gateway, claim: str) -> None:
    have_let_go = partial(gateways_have_let_go, leader.store, leader.picture.clock)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await have_let_go(claim):  # noqa: ASYNC110  # what is no event is looked for
            await asyncio.sleep(0.01)


async def test_a_model_is_drained_when_the_last_gateway_has_its_answers(postgres_url: str) -> None:
    async with a_gateway(postgres_url, "one") as one, a_gateway(postgres_url, "two") as two:
        have_let_go = partial(gateways_have_let_go, one.store, one.picture.clock)
        two.requests.unanswered = True
        term, task = await a_resident_model(one.store)
        claim = await stop(one, term, task)
        said = one.store.presences
        async with asyncio.timeout(PATIENCE_SECONDS):
            while claim not in {name for row in await said() for name in row.let_go}:  # noqa: ASYNC110  # as above
                await asyncio.sleep(0.01)
        assert not await have_let_go(claim), "the other one has a request there still"
        two.requests.unanswered = False
        await let_go(one, claim)
        assert not await have_let_go(mark_of(task.id, Fence(task.fence + 1), 0))


async def test_a_gateway_says_at_once_what_is_in_use_while_an_equal_waits(postgres_url: str) -> None:
    async with a_gateway(postgres_url, "one") as one, a_gateway(postgres_url, "two") as two:
        await a_resident_model(one.store)
        two.requests.models = frozenset({"llm"})
        rival = a_task("rival", gpu_mb=1, holder=Model("main", "rival"))
        await one.store.submit(AdmittedTask(rival, RunSpec(kind="model")))

        async def until_in_use(models: set[str]) -> None:
            names = ModelsInUse(frozenset(models), one.requests.recent)
            async with asyncio.timeout(PATIENCE_SECONDS):
                while await models_in_use(one.store, one.picture.clock) != names:  # noqa: ASYNC110  # as above
                    await asyncio.sleep(0.01)

        await until_in_use({"llm"})
        one.requests.recent = frozenset({"llm"})
        two.requests.models = frozenset()
        await until_in_use(set())


class Interrupted:
    """A store in which something happens while a gateway's first report is on its way."""

    def __init__(self, store: PresenceStore, meanwhile: Callable[[], Awaitable[object]]) -> None:
        self._store = store
        self._meanwhile: Callable[[], Awaitable[object]] | None = meanwhile
        self.reported_again = asyncio.Event()

    async def present(self, presence: Presence) -> None:
        await self._store.present(presence)
        if self._meanwhile is None:
            self.reported_again.set()
        else:
            happen, self._meanwhile = self._meanwhile, None
            await happen()

    async def absent(self, gateway: str) -> None:
        await self._store.absent(gateway)

    async def presences(self) -> Sequence[Presence]:
        return await self._store.presences()


async def test_an_event_during_a_report_is_reported_without_a_pause(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpubroker_server.inference.draining._REPORT_SECONDS", 10 * PATIENCE_SECONDS)
    async with a_gateway(postgres_url, "one") as one:
        term, task = await a_resident_model(one.store)
        draining = Draining(one.picture.world, Requests(), Policy())
        one.picture.listen(draining.on_events)
        store = Interrupted(one.store, partial(stop, one, term, task))
        reporting = asyncio.create_task(draining.keep_reporting(store, "two", one.picture.clock))
        try:
            await asyncio.wait_for(store.reported_again.wait(), PATIENCE_SECONDS)
        finally:
            reporting.cancel()
            await asyncio.wait([reporting])
        let_go = {row.gateway: row.let_go for row in await one.store.presences()}
        assert let_go["two"] == {mark_of(task.id, task.fence, 0)}


async def test_gateways_that_are_gone_or_silent_are_not_waited_for(postgres_url: str) -> None:
    async with a_gateway(postgres_url, "one") as one:
        have_let_go, now = (
            partial(gateways_have_let_go, one.store, one.picture.clock),
            one.picture.clock.now(),
        )
        term, task = await a_resident_model(one.store)
        claim = await stop(one, term, task)
        await one.store.present(Presence("killed", Instant(now - PRESENT_SECONDS - 1)))
        await one.store.present(Presence("ending", now))
        assert not await have_let_go(claim)
        await one.store.absent("ending")
        await let_go(one, claim)


async def test_reports_of_gateways_are_not_those_of_a_leader(postgres_url: str) -> None:
    async with opened(postgres_url) as store:
        said = LastValues(leader=LeaderSeen(Term(1), "one:1", Instant(1.0), {}))
        await store.publish(Term(1), 1, said)
        presence = Presence("one", Instant(1.0), frozenset({"a:1", "b:2"}))
        await store.present(replace(presence, let_go=frozenset()))
        await store.present(presence)
        assert (await store.published(0))[1] == said
        assert await store.presences() == [presence]


async def test_a_word_that_arrives_late_takes_no_newer_ones_place(postgres_url: str) -> None:
    async with opened(postgres_url) as store:
        newer = Presence("one", Instant(2.0), frozenset({"a:1"}))
        await store.present(newer)
        await store.present(Presence("one", Instant(1.0)))
        assert await store.presences() == [newer]


async def test_a_gateway_that_is_stopped_during_a_report_ends_after_it(postgres_url: str) -> None:
    async with opened(postgres_url) as store:
        with psycopg.connect(postgres_url) as other:
            other.execute("LOCK TABLE last_value")
            saying = asyncio.create_task(store.present(Presence("one", Instant(1.0))))
            await asyncio.wait([saying], timeout=0.05)
            saying.cancel()
            assert not (await asyncio.wait([saying], timeout=0.05))[0], "it is on its way"
        await asyncio.wait([saying])
        assert saying.cancelled()
        await store.absent("one")
        assert await store.presences() == []
