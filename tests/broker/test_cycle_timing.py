"""When cycles begin: at once for who arrives after quiet, together for those who arrive close together."""

import asyncio

import pytest
from gpubroker_server.broker import loop
from gpubroker_server.broker.loop import CycleTimer

from tests.patience import PATIENCE_SECONDS


@pytest.fixture(autouse=True)
def _hours(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is paced does not come within a test."""
    monkeypatch.setattr(loop, "TICK_SECONDS", 3600.0)
    monkeypatch.setattr(loop, "PACE_SECONDS", 3600.0)


def wake_urgently(timer: CycleTimer) -> None:
    timer.wake(urgent=True)


async def begins(timer: CycleTimer) -> bool:
    """Whether a cycle begins by itself, as far as anybody can tell at once."""
    beginning = asyncio.create_task(timer.next())
    for _ in range(20):
        await asyncio.sleep(0)
    has_begun = beginning.done()
    beginning.cancel()
    await asyncio.wait([beginning])
    return has_begun


async def test_nothing_begins_until_something_happens() -> None:
    assert not await begins(CycleTimer())


async def test_after_quiet_a_cycle_begins_at_once() -> None:
    for happen in (CycleTimer.wake, wake_urgently):
        fresh = CycleTimer()
        happen(fresh)
        assert await begins(fresh)


async def test_reports_wait_for_others_after_any_cycle() -> None:
    for happen in (CycleTimer.wake, wake_urgently):
        after = CycleTimer()
        happen(after)
        await after.next()
        after.wake()
        assert not await begins(after)


async def test_an_urgent_cycle_does_not_wait_after_a_cycle_of_reports() -> None:
    after = CycleTimer()
    after.wake()
    await after.next()
    after.wake()
    after.wake(urgent=True)
    assert await begins(after)


async def test_an_urgent_wake_ends_the_wait_of_reports() -> None:
    after = CycleTimer()
    after.wake()
    await after.next()
    after.wake()
    beginning = asyncio.create_task(after.next())
    await asyncio.sleep(0)
    after.wake(urgent=True)
    await asyncio.wait_for(beginning, PATIENCE_SECONDS)


async def test_an_urgent_wake_soon_after_another_waits_for_more() -> None:
    after = CycleTimer()
    after.wake(urgent=True)
    await after.next()
    after.wake(urgent=True)
    assert not await begins(after)
