"""The database's time between two readings of it."""

import asyncio
import time
from itertools import pairwise

import pytest
from gpubroker_server.adapters.clock import DatabaseClock, WallClock
from gpubroker_server.adapters.sql.store import open_store
from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.core.lifecycle.clock_evidence import STEADY_SECONDS
from gpubroker_server.ports.store import StoreUnavailable
from structlog.testing import capture_logs

from tests.broker.stage import Hands
from tests.patience import PATIENCE_SECONDS

YEAR = 365 * 86_400.0


class Away:
    """A database whose clock is `ahead` of ours by so many seconds; it answers after the first failures."""

    def __init__(self, ahead: float, failures: int = 0) -> None:
        self.ahead = ahead
        self.failures = failures
        self.asked = 0
        self.answered = asyncio.Event()

    async def database_time(self) -> Instant:
        self.asked += 1
        if self.asked <= self.failures:
            raise StoreUnavailable("away")
        self.answered.set()
        return Instant(time.time() + self.ahead)


async def test_before_the_first_reading_it_is_the_local_time() -> None:
    assert abs(DatabaseClock(Away(500.0)).now() - time.time()) < 1.0


async def test_after_a_reading_it_is_the_databases_time() -> None:
    clock = DatabaseClock(Away(500.0))
    await clock.read()
    assert abs(clock.now() - time.time() - 500.0) < 1.0


class SlowAtFirst(Away):
    async def database_time(self) -> Instant:
        there = await super().database_time()
        if self.asked == 1:
            await asyncio.sleep(0.3)  # on the way back: half of it would be taken for the way there
        return there


async def test_the_quickest_of_several_answers_counts() -> None:
    clock = DatabaseClock(SlowAtFirst(500.0))
    await clock.read()
    assert abs(clock.now() - time.time() - 500.0) < 0.1


async def test_clock_stands_still_until_a_database_set_back_a_little_catches_up() -> None:
    database = Away(500.0)
    clock = DatabaseClock(database)
    await clock.read()
    before = clock.now()
    database.ahead = 460.0
    await clock.read()
    assert clock.now() == before
    database.ahead = 540.0
    await clock.read()
    assert clock.now() > before + 30.0
    assert not clock.is_contradicted


@pytest.mark.parametrize("jump", [-YEAR, YEAR], ids=["back", "ahead"])
async def test_it_goes_on_by_the_time_since_boot_when_a_reading_is_far_away(jump: float) -> None:
    database = Away(500.0)
    clock = DatabaseClock(database)
    await clock.read()
    before = clock.now()
    with capture_logs() as logs:
        database.ahead += jump
        await clock.read()
        assert clock.is_contradicted
        assert not clock.may_prune()
        await clock.read()
        assert before < clock.now() < before + PATIENCE_SECONDS
        database.ahead -= jump
        await clock.read()
        assert not clock.is_contradicted
        await clock.read()
    told = [line["event"] for line in logs]
    assert [event.partition(" clock ")[2][:3] for event in told] == ["was", "cou"], "once each"
    assert f"{YEAR:.0f} s {'ahead of' if jump > 0 else 'behind'} the time" in logs[0]["fault"]


async def test_a_database_that_stays_ahead_counts_in_the_end() -> None:
    """Its machine was right, as when ours was paused whole."""
    machine = Hands()
    database = Away(500.0)
    clock = DatabaseClock(database, ticks=machine.ticks)
    await clock.read()
    database.ahead += YEAR
    await clock.read()
    machine.time = Instant(machine.time + STEADY_SECONDS)
    database.ahead += STEADY_SECONDS
    await clock.read()
    assert abs(clock.now() - time.time() - database.ahead) < 1.0
    assert not clock.may_prune(), "not before it has counted for as long"
    machine.time = Instant(machine.time + STEADY_SECONDS)
    assert clock.may_prune()


def test_wall_clock_counts_unless_the_time_since_boot_contradicts_it() -> None:
    machine, wall = Hands(), 1000.0
    clock = WallClock(lambda: wall, machine.ticks)
    assert clock.now() == 1000.0
    wall = 1000.0 + YEAR
    assert clock.now() == 1000.0
    machine.time = Instant(machine.time + STEADY_SECONDS / 2)
    assert clock.now() == 1000.0 + STEADY_SECONDS / 2
    assert not clock.may_prune()
    wall = 1000.0 + STEADY_SECONDS
    machine.time = Instant(machine.time + STEADY_SECONDS / 2)
    assert clock.now() == wall
    assert clock.may_prune()


async def test_it_goes_on_between_readings() -> None:
    clock = DatabaseClock(Away(0.0))
    await clock.read()
    times = [clock.now() for _ in range(1000)]
    assert all(earlier <= later for earlier, later in pairwise(times))
    assert times[-1] > times[0]


async def test_it_keeps_reading_when_the_database_was_away() -> None:
    database = Away(500.0, failures=2)
    clock = DatabaseClock(database, every_seconds=Seconds(0.001))
    keeping = asyncio.create_task(clock.keep())
    await asyncio.wait_for(database.answered.wait(), PATIENCE_SECONDS)
    await asyncio.sleep(0)
    assert clock.now() > time.time() + 400.0
    keeping.cancel()


async def test_it_reads_a_real_servers_clock(postgres_url: str) -> None:
    store = await open_store(postgres_url)
    clock = DatabaseClock(store)
    await clock.read()
    assert abs(clock.now() - await store.database_time()) < 1.0
    await store.close()
