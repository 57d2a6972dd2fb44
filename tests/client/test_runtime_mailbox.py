"""Reports on their way from threads to one waiting reader."""

import asyncio
import threading

import pytest
from gpubroker.runtime.journal import LAZILY, SOON, START_OVER
from gpubroker.runtime.mailbox import Mailbox

LONG = 10**9


@pytest.fixture
async def mailbox() -> Mailbox:
    return Mailbox()


async def read(mailbox: Mailbox, acknowledged: int = 0) -> list[object]:
    taken = await mailbox.read(acknowledged, may_come=lambda: True)
    return [report[0] for _, report in taken]


async def test_a_reader_wakes_for_a_report_of_another_thread(mailbox: Mailbox) -> None:
    reading = asyncio.create_task(read(mailbox))
    await asyncio.sleep(0)
    threading.Thread(target=mailbox.journal.add, args=(("ended",),)).start()
    assert await reading == ["ended"]


async def test_the_reports_of_a_start_and_its_end_travel_together(mailbox: Mailbox) -> None:
    mailbox.journal.add(("started",), SOON)
    reading = asyncio.create_task(read(mailbox))
    await asyncio.sleep(0)
    mailbox.journal.add(("ended",))
    assert await reading == ["started", "ended"]


async def test_the_report_of_a_start_without_an_end_travels_alone(mailbox: Mailbox) -> None:
    mailbox.journal.add(("started",), SOON)
    assert await read(mailbox) == ["started"]


async def test_only_the_newest_news_is_read(mailbox: Mailbox) -> None:
    for number in range(5):
        mailbox.journal.note("run", ("progressed", number), LAZILY)
    [(_, report)] = await mailbox.read(0, may_come=lambda: True)
    assert report == ("progressed", 4)


async def test_newest_news_per_kind_and_run_are_kept_and_read_in_their_order(
    mailbox: Mailbox,
) -> None:
    for run, kind in ("a", "progressed"), ("a", "checkpointed"), ("b", "checkpointed"), ("a", "progressed"):
        mailbox.journal.note(run, (kind, run))
    assert [report for _, report in await mailbox.read(0, may_come=lambda: True)] == [
        ("checkpointed", "a"),
        ("progressed", "a"),
        ("checkpointed", "b"),
    ]


async def test_a_lasting_report_comes_after_all_news_of_its_run(mailbox: Mailbox) -> None:
    mailbox.journal.note("run", ("checkpointed",))
    mailbox.journal.note("run", ("progressed",))
    mailbox.journal.add(("ended",), after_news_of="run")
    assert await read(mailbox) == ["checkpointed", "progressed", "ended"]


async def test_news_left_behind_by_a_full_batch_are_replaced_by_newer_ones(
    mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpubroker.runtime.mailbox.BATCH_BYTES", 100)
    for run in ("a", "b"):
        mailbox.journal.note(run, ("checkpointed", b"old" * 50))
    first = await mailbox.read(0, may_come=lambda: True)
    mailbox.journal.note("b", ("checkpointed", b"new"))
    rest = await mailbox.read(first[-1][0], may_come=lambda: True)
    assert [len(first), [report for _, report in rest]] == [1, [("checkpointed", b"new")]]


async def test_a_later_reader_replaces_an_earlier_one(mailbox: Mailbox) -> None:
    earlier = asyncio.create_task(read(mailbox))
    await asyncio.sleep(0)
    later = asyncio.create_task(read(mailbox))
    assert await earlier == []
    mailbox.journal.add(("ended",))
    assert await later == ["ended"]


async def test_nothing_is_read_twice_unless_the_reader_starts_over(mailbox: Mailbox) -> None:
    mailbox.journal.add(("a",))
    assert await read(mailbox) == ["a"]
    mailbox.journal.add(("b",))
    assert await read(mailbox) == ["b"]
    assert await read(mailbox, START_OVER) == ["a", "b"]


async def test_acknowledged_reports_are_gone_for_a_reader_that_starts_over_too(mailbox: Mailbox) -> None:
    mailbox.journal.add(("a",))
    [(number, _)] = await mailbox.read(0, may_come=lambda: True)
    mailbox.journal.add(("b",))
    assert await read(mailbox, number) == ["b"]
    assert await read(mailbox, START_OVER) == ["b"]


async def test_a_read_ends_when_no_more_reports_may_come(mailbox: Mailbox) -> None:
    assert await mailbox.read(0, may_come=lambda: False) == []


async def test_a_read_ends_when_its_time_is_up(mailbox: Mailbox) -> None:
    assert await mailbox.read(0, may_come=lambda: True, timeout_seconds=0.01) == []


async def test_an_early_wake_up_does_not_end_a_read(mailbox: Mailbox) -> None:
    """The wake-up of a report that was read meanwhile must not end the next wait."""
    mailbox.journal.add(("a",))
    assert await mailbox.read(0, may_come=lambda: False) == [(1, ("a",))]
    reading = asyncio.create_task(read(mailbox, 1))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not reading.done()
    mailbox.journal.add(("b",))
    assert await reading == ["b"]


async def test_batch_ends_after_the_report_that_exceeds_it_and_the_rest_follows(
    mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpubroker.runtime.mailbox.BATCH_BYTES", 100)
    for name in ("a", "b", "c"):
        mailbox.journal.add((name, b"x" * 60))
    assert await read(mailbox) == ["a", "b"]
    assert await read(mailbox) == ["c"]
