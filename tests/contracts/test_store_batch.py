"""Batches: whole or not at all, known again by their key, and heard in order."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from gpubroker_server.adapters.sql.postgres import copied_text
from gpubroker_server.adapters.sql.session import Alike, Rows
from gpubroker_server.core.domain.submission import Request
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.core.world.events import Event
from gpubroker_server.ports.store import BatchSubmission, SubmitVerdict, TaskStore, Unstorable
from msgspec.structs import replace

from tests.builders import NOW, a_task
from tests.contracts.scenes import a_submission, log_of, opened, replayed

LARGE = 1200
"""So many are copied, on PostgreSQL, and handed out in pieces."""


def a_batch(
    prefix: str, count: int, key: str | None = None, body: str = "body", **spec: Any
) -> BatchSubmission:
    like = a_task(f"{prefix}00000", gpu_mb=1024)
    tasks = [replace(like, id=TaskId(f"{prefix}{number:05}"), queued_bytes=number) for number in range(count)]
    first = a_submission(like, **spec)
    submissions = [replace(a_submission(task, **spec), like=first) for task in tasks]
    return BatchSubmission(submissions, key, body, f"answer to {prefix}")


@pytest.mark.parametrize("count", [1, 3, LARGE])
async def test_all_tasks_of_a_batch_read_back_as_they_were(store: TaskStore, count: int) -> None:
    batch = a_batch("t", count, labels={"team": "vision\t7\\n"}, arguments=b"\x80\x00\xff")
    outcome = await store.submit_batch(batch)
    assert (outcome.verdict, outcome.task) == (SubmitVerdict.ACCEPTED, "t00000")
    for number in {0, 1, count // 2, count - 1} & set(range(count)):
        record = await store.record(TaskId(f"t{number:05}"))
        assert record is not None
        assert (record.task, record.spec) == (
            batch.submissions[number].task,
            batch.submissions[number].spec,
        )


def test_copied_text_escapes_what_copy_would_read_otherwise() -> None:
    rows = Rows([("plain", 1, None)])
    rows.alike.append(Alike([("a\tb", b"\x80"), ("\\N", b"")], ("c\n", None, 1.5)))
    rows.alike.append(Alike([("only",)], ()))
    assert "".join(copied_text(rows)).splitlines() == [
        "plain\t1\t\\N",
        "a\\tb\t\\\\x80\tc\\n\t\\N\t1.5",
        "\\\\N\t\\\\x\tc\\n\t\\N\t1.5",
        "only",
    ]


async def test_the_log_makes_of_a_batch_what_the_rows_say(store: TaskStore) -> None:
    await store.submit_batch(a_batch("t", LARGE))
    world, snapshot = replayed(await log_of(store)), await store.snapshot()
    assert world.position == snapshot.position == LARGE
    assert world.tasks == {task.id: task for task in snapshot.tasks}


async def test_a_large_batch_is_heard_in_order_and_before_its_answer(store: TaskStore) -> None:
    heard: list[Event] = []
    store.listen(heard.extend)
    answers = asyncio.gather(
        store.submit_batch(a_batch("a", LARGE)),
        store.submit_batch(a_batch("b", LARGE)),
        store.submit(a_submission("c")),
    )
    await answers
    assert [event.position for event in heard] == list(range(1, 2 * LARGE + 2))


async def test_a_large_batch_is_handed_out_in_pieces(url: str) -> None:
    async with opened(url) as store:
        sizes: list[int] = []

        def listen(events: Sequence[Event]) -> None:
            sizes.append(len(events))

        store.listen(listen)
        await store.submit_batch(a_batch("t", LARGE))
        assert sum(sizes) == LARGE
        assert max(sizes) < LARGE


async def test_the_same_key_and_body_answer_with_the_first_batch(store: TaskStore) -> None:
    await store.submit_batch(a_batch("a", 3, "k"))
    again = await store.submit_batch(a_batch("b", LARGE, "k"))
    assert (again.verdict, again.task) == (SubmitVerdict.DUPLICATE, "a00000")
    assert await store.batch_answer(again.task) == "answer to a"
    assert len(await log_of(store)) == 3
    known = await store.known_key("default", "k")
    assert known is not None
    assert (known.task, known.body_hash) == ("a00000", "body")


async def test_the_same_key_with_another_batch_stores_nothing(store: TaskStore) -> None:
    await store.submit_batch(a_batch("a", 3, "k"))
    reused = await store.submit_batch(a_batch("b", 3, "k", body="other"))
    assert (reused.verdict, reused.task) == (SubmitVerdict.KEY_REUSED, "a00000")
    assert len(await log_of(store)) == 3


async def test_a_task_and_a_batch_share_the_keys_of_their_tenant(store: TaskStore) -> None:
    await store.submit(a_submission("t", key="k"))
    reused = await store.submit_batch(a_batch("b", 2, "k", body="many"))
    assert (reused.verdict, reused.task) == (SubmitVerdict.KEY_REUSED, "t")
    assert await store.known_key("other", "k") is None


async def test_an_empty_answer_is_not_kept(url: str) -> None:
    async with opened(url) as store:
        await store.submit_batch(replace(a_batch("a", 2), answer=""))
        assert await store.batch_answer(TaskId("a00000")) == ""


async def test_a_repeated_commit_of_one_batch_is_harmless(store: TaskStore) -> None:
    batch = a_batch("a", 300)
    first, second = await store.submit_batch(batch), await store.submit_batch(batch)
    assert first == second
    assert len(await log_of(store)) == 300


@pytest.mark.parametrize("count", [2, LARGE])
async def test_a_batch_with_a_value_that_cannot_be_stored_leaves_nothing(url: str, count: int) -> None:
    async with opened(url) as store:
        batch = a_batch("a", count)
        last = batch.submissions[-1]
        bad = replace(last, spec=replace(last.spec, model_type="half \ud800"), like=None)
        with pytest.raises(Unstorable):
            await store.submit_batch(replace(batch, submissions=[*batch.submissions[:-1], bad]))
        assert await log_of(store) == []
        assert (await store.submit(a_submission("t"))).verdict is SubmitVerdict.ACCEPTED


async def test_two_stores_that_are_sent_the_same_batch_at_once_store_it_once(postgres_url: str) -> None:
    async with opened(postgres_url) as one, opened(postgres_url) as other:
        for round_ in range(5):
            key = f"k{round_}"
            found = await asyncio.gather(
                one.submit_batch(a_batch(f"a{round_}", 400, key)),
                other.submit_batch(a_batch(f"b{round_}", 400, key)),
            )
            assert len({outcome.task for outcome in found}) == 1
            assert sorted(outcome.verdict for outcome in found) == ["accepted", "duplicate"]
        assert await one.head() == 5 * 400


async def test_requests_about_a_batch_are_stored_with_it_once_or_not_at_all(store: TaskStore) -> None:
    def asked(name: str) -> list[Request]:
        return [Request(f"r-{name}", TaskId(f"{name}00000"), "default", "form", {"count": 1}, NOW)]

    batch = replace(a_batch("a", 3, "k"), requests=asked("a"))
    for _ in range(2):
        assert (await store.submit_batch(batch)).verdict is SubmitVerdict.ACCEPTED
    await store.submit_batch(replace(a_batch("b", 3, "k"), requests=asked("b")))
    events, snapshot = await log_of(store), await store.snapshot()
    assert [event.kind for event in events] == [*["task.submitted"] * 3, "request.made"]
    assert [event.position for event in events] == [1, 2, 3, 4]
    assert list(snapshot.requests) == asked("a")
    assert replayed(events).requests == {"r-a": asked("a")[0]}
