"""Who leads when clocks are wrong: the database's is set by an hour, or a machine sleeps."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from gpubroker_server.adapters.sql.store import SqlStore
from gpubroker_server.broker import leadership
from gpubroker_server.broker.leadership import LeaderCandidate
from gpubroker_server.broker.loop import Leader
from gpubroker_server.core.domain.leader_term import LeaderTerm, LeaderTermRules
from gpubroker_server.core.domain.units import Instant, Seconds, Term
from gpubroker_server.ports.store import StaleTerm
from sqlalchemy import create_engine, text

from tests.broker.stage import Hands, Stage
from tests.contracts.scenes import node_seen, opened

RULES = LeaderTermRules(Seconds(3.0), Seconds(0.75), renew_seconds=Seconds(0.05))
HOUR = 3600.0
PATIENCE_SECONDS = 20.0


class Broker:
    """A candidate with its own machine's clock, which stands still until a test turns it."""

    def __init__(self, name: str, folder: Path, store: SqlStore) -> None:
        self.machine = Hands()
        self._stage = Stage(folder / name, store, self.machine)
        self._store = store
        self.candidate = LeaderCandidate(
            name=name,
            store=store,
            executor=self._stage.executor,
            rules=RULES,
            ticks=self.machine.ticks,
            chance=lambda: 0.5,
            new_leader=self._new_leader,
            catch_up=self._catch_up,
            resigned=store.resigned,
        )
        self._running = asyncio.create_task(self.candidate.run())

    def pass_by(self, seconds: float) -> None:
        self.machine.time = Instant(self.machine.time + seconds)

    async def leads(self, term: int) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while self.candidate.term != term:  # noqa: ASYNC110  # who leads sends no events
                await asyncio.sleep(0.01)

    async def stop(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)

    def _new_leader(self, leader_term: LeaderTerm) -> Leader:
        self._stage.leader = self._stage.new_leader(leader_term)
        return self._stage.leader

    async def _catch_up(self) -> None:
        while await self._store.catch_up():
            pass


class Site:
    def __init__(self, url: str, folder: Path, store: SqlStore) -> None:
        self._url, self._folder, self.store = url, folder, store
        self.brokers: list[Broker] = []

    def begin(self, name: str) -> Broker:
        self.brokers.append(Broker(name, self._folder, self.store))
        return self.brokers[-1]

    def set_clock(self, seconds: float) -> None:
        """Of the database; to who looks, the lease ends so much later or earlier."""
        moved = "UPDATE leadership SET lease_until = lease_until - :by"
        with create_engine(self._url.replace("postgresql:", "postgresql+psycopg:")).begin() as connection:
            connection.execute(text(moved), {"by": seconds})


@pytest.fixture
async def site(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr(leadership, "POLL_SECONDS", (0.01, 0.02))
    async with opened(url) as store:
        site = Site(url, tmp_path, store)
        yield site
        for broker in site.brokers:
            await broker.stop()


async def test_leader_whose_machine_slept_stands_back_and_leads_a_later_term(site: Site) -> None:
    one = site.begin("one")
    await one.leads(1)
    one.pass_by(HOUR)
    await one.leads(2)
    with pytest.raises(StaleTerm):
        await site.store.commit(Term(1), [node_seen()])


async def test_a_lease_made_long_by_a_wrong_clock_blocks_no_candidate(site: Site) -> None:
    """Its holder is gone; whoever watches finds that nothing is renewed, by his own machine's clock."""
    assert await site.store.take_term("gone", RULES.ttl_seconds, instead_of=await site.store.leader()) == 1
    site.set_clock(-HOUR)
    two = site.begin("two")
    await asyncio.sleep(0.1)  # no time passes on its machine
    assert two.candidate.term is None
    two.pass_by(RULES.ttl_seconds + 0.1)
    await two.leads(2)


async def test_a_clock_set_forward_ends_a_term_and_not_the_order(site: Site) -> None:
    """Two would lead, were it by the clock alone: the row says who, and the other one stands back."""
    one = site.begin("one")
    await one.leads(1)
    while (row := await site.store.leader()).term == 1:
        await site.store.take_term("early", Seconds(HOUR), instead_of=row)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while one.candidate.term is not None:  # noqa: ASYNC110  # who leads sends no events
            await asyncio.sleep(0.01)
    with pytest.raises(StaleTerm):
        await site.store.commit(Term(1), [node_seen()])
    site.set_clock(HOUR)
    await one.leads(3)
