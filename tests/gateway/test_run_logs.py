"""What runs print, read at a gateway: from the rows, while the run goes on and afterwards."""

import asyncio
from typing import Any

import pytest
from gpubroker_server.core.domain.orders import LogName
from gpubroker_server.core.domain.units import Fence, Instant, TaskId
from gpubroker_server.core.lifecycle.run_logs import FOLLOWED_SECONDS
from gpubroker_server.gateway.status.log_readers import LOOK_SECONDS, LOOKS_PER_SECOND, LogReaders
from gpubroker_server.gateway.tasks.logs import PARTS_AT_ONCE
from gpubroker_server.ports.run_logs import LogChanges, LogPart
from gpubroker_server.ports.store import BlobMissing

from tests.gateway.harness import PATIENCE_SECONDS, Client, Gateway, before, fault, problem


async def say(gateway: Gateway, task: str, *pieces: tuple[int, bytes], fence: int = 1, **name: Any) -> None:
    """As the leader keeps it; a large piece is an object."""
    log = LogName(TaskId(task), Fence(fence), name.get("rank", 0), name.get("stream", "stdout"))
    parts = []
    for first_byte, data in pieces:
        digest = await gateway.blobs.put(data, owner=task) if len(data) > 1000 else None
        kept = None if digest else data
        parts.append(
            LogPart(log, first_byte, len(data), gateway.clock.now(), "default", kept, digest),
        )
    await gateway.store.keep_logs(gateway.term, LogChanges(parts=parts))


async def is_followed(gateway: Gateway) -> None:
    """Until some log is followed."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await followed(gateway):  # noqa: ASYNC110  # a row tells nobody of itself
            await asyncio.sleep(0)


async def followed(gateway: Gateway) -> dict[LogName, Instant]:
    return {log: since for one in await gateway.store.followed_logs() for log, since in one.since.items()}


async def test_the_log_of_a_task_that_has_ended(gateway: Gateway, api: Client) -> None:
    task = await api.submit()
    await say(gateway, task, (0, b"one\n"), (4, b"t\xc3\xbco\n"), (9, b"x" * 2000))
    await say(gateway, task, (0, b"wrong\n"), stream="stderr")
    await gateway.end(task)
    answer = await api.get(f"/tasks/{task}/logs")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.text == "one\ntüo\n" + "x" * 2000
    assert (await api.get(f"/tasks/{task}/logs?stream=stderr&follow=true")).text == "wrong\n"
    assert (await api.get(f"/tasks/{task}/logs?offset=2008")).text == "x"
    assert (await api.get(f"/tasks/{task}/logs?offset=9999")).text == ""
    assert await followed(gateway) == {}, "nobody need ask an agent"


async def test_a_log_without_its_middle_says_so_and_goes_on_with_a_whole_line(
    gateway: Gateway, api: Client
) -> None:
    task = await api.submit()
    await say(gateway, task, (0, b"one\n"), (100, b"half a line\nlast\n"))
    await gateway.end(task)
    expected = "one\n\n[... bytes 4 to 112 were not kept ...]\nlast\n"
    assert (await api.get(f"/tasks/{task}/logs")).text == expected
    marked = expected.replace("]\n", "]c0ffee\n")
    assert (await api.get(f"/tasks/{task}/logs?mark=c0ffee")).text == marked
    assert (await api.get(f"/tasks/{task}/logs?offset=112")).text == "last\n"


@pytest.mark.parametrize("damage", ["missing", "damaged"])
async def test_log_parts_with_lost_objects_are_left_out_and_the_log_ends(
    gateway: Gateway, api: Client, damage: str
) -> None:
    task = await api.submit()
    await say(gateway, task, (0, b"one\n"), *((4 + 2000 * n, b"%d" % n * 2000) for n in range(9)))
    await say(gateway, task, (18004, b"half a line\nlast\n"), (18021, b"z" * 2000))
    await gateway.end(task)
    if damage == "missing":
        gateway.blobs.objects.clear()
    else:
        gateway.blobs.objects.update(dict.fromkeys(gateway.blobs.objects, b"other bytes"))
    assert (await before(PATIENCE_SECONDS, api.get(f"/tasks/{task}/logs?follow=true"))).text == (
        "one\n\n[... bytes 4 to 14004 were not kept ...]\n"
        "\n[... bytes 14004 to 18016 were not kept ...]\nlast\n"
        "\n[... bytes 18021 to 20021 were not kept ...]\n"
    )


async def test_a_part_that_is_replaced_while_it_is_read_is_read_again(
    gateway: Gateway, api: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = await api.submit()
    await say(gateway, task, (0, b"x" * 2000))
    await gateway.end(task)
    get = gateway.blobs.get

    async def replaced(digest: str) -> bytes:
        monkeypatch.setattr(gateway.blobs, "get", get)
        await say(gateway, task, (0, b"y" * 3000))
        raise BlobMissing(digest)

    monkeypatch.setattr(gateway.blobs, "get", replaced)
    assert (await before(PATIENCE_SECONDS, api.get(f"/tasks/{task}/logs"))).text == "y" * 3000


async def test_a_followed_log_comes_to_its_end_with_the_attempt(gateway: Gateway, api: Client) -> None:
    task = await api.submit()
    reading = asyncio.create_task(api.get(f"/tasks/{task}/logs?follow=true"))
    await is_followed(gateway)
    await say(gateway, task, (0, b"one\n"))
    await gateway.admit(task)
    await say(gateway, task, (4, b"two\n"))
    assert list(await followed(gateway)) == [LogName(TaskId(task), Fence(1), 0, "stdout")]
    assert not reading.done()
    await say(gateway, task, (8, b"three\n"))  # before the end, as the leader commits it
    await gateway.end(task)
    assert (await before(PATIENCE_SECONDS, reading)).text == "one\ntwo\nthree\n"
    assert len(gateway.parts.waiters) == 0


async def test_each_attempt_has_a_log_of_its_own(gateway: Gateway, api: Client) -> None:
    task = await api.submit()
    await say(gateway, task, (0, b"one\n"))
    await gateway.end(task)
    assert (await api.get(f"/tasks/{task}/logs?attempt=1")).text == "one\n"
    refused = await api.get(f"/tasks/{task}/logs?attempt=2")
    assert "has had 1 attempts" in fault(refused, "query:attempt")
    refused = await api.get(f"/tasks/{task}/logs?rank=1")
    assert "no gang" in fault(refused, "query:rank")


async def test_ranks_that_join_an_elastic_gang_have_numbers_beyond_its_bundles(
    gateway: Gateway, api: Client
) -> None:
    task = await api.submit(resources={"bundles": [{"count": 2, "cpu": 1}], "min_ranks": 1})
    await say(gateway, task, (0, b"late\n"), rank=2)
    await gateway.end(task)
    assert (await api.get(f"/tasks/{task}/logs?rank=2")).text == "late\n"
    refused = await api.get(f"/tasks/{task}/logs?rank=256")
    assert fault(refused, "query:rank") == "the task has at most 256 ranks, from 0"


async def test_without_follow_a_task_that_has_not_begun_has_nothing(gateway: Gateway, api: Client) -> None:
    task = await api.submit()
    assert (await api.get(f"/tasks/{task}/logs")).text == ""


async def test_of_a_running_task_everything_that_it_has_printed_by_now(gateway: Gateway, api: Client) -> None:
    task = await api.submit()
    await gateway.admit(task)
    await say(gateway, task, (0, b"one\n"))
    gateway.clock.advance(10)
    reading = asyncio.create_task(api.get(f"/tasks/{task}/logs"))
    await is_followed(gateway)
    assert not reading.done(), "the agent was asked ten seconds ago"
    await say(gateway, task, (4, b"two\n"))
    assert (await before(PATIENCE_SECONDS, reading)).text == "one\ntwo\n"


async def test_a_gateway_that_ends_answers_its_readers(gateway: Gateway, api: Client) -> None:
    task = await api.submit()
    reading = asyncio.create_task(api.get(f"/tasks/{task}/logs?follow=true"))
    await is_followed(gateway)
    await say(gateway, task, *((n, b"x") for n in range(PARTS_AT_ONCE + 1)))
    gateway.parts.waiters.close()
    everything = "x" * (PARTS_AT_ONCE + 1)
    assert (await before(PATIENCE_SECONDS, reading)).text == everything
    assert (await api.get(f"/tasks/{task}/logs")).text == everything


async def test_parts_that_overlap_are_read_once(gateway: Gateway, api: Client) -> None:
    """Each leader asks for itself, and an answer may come twice."""
    task = await api.submit()
    await say(gateway, task, (0, b"one\ntwo\n"), (4, b"two\n"), (8, b"three\n"), (9, b"hree"))
    await say(gateway, task, (14, b"four\n"))
    await gateway.end(task)
    assert (await api.get(f"/tasks/{task}/logs")).text == "one\ntwo\nthree\nfour\n"


async def test_a_tenant_has_a_bounded_number_of_readers(gateway: Gateway, api: Client) -> None:
    gateway.parts.waiters._most_of_a_tenant = 0
    task = await api.submit()
    problem(await api.get(f"/tasks/{task}/logs?follow=true"), 429, "tenant-waits")


async def test_of_a_run_by_an_earlier_agent_the_end_is_shown(gateway: Gateway, api: Client) -> None:
    task = await api.submit()
    await gateway.end(task, log_tail=b"the end\n")
    assert (await api.get(f"/tasks/{task}/logs")).text == "the end\n"
    assert (await api.get(f"/tasks/{task}/logs?stream=stderr")).text == ""
    await say(gateway, task, (0, b"errors\n"), stream="stderr")
    assert (await api.get(f"/tasks/{task}/logs")).text == ""


async def test_logs_are_the_tenant_s_own_and_need_its_scope(gateway: Gateway, api: Client) -> None:
    task = await api.submit()
    stranger = await gateway.client("stranger", "tasks:read", tenant="zeta")
    problem(await stranger.get(f"/tasks/{task}/logs"), 404, "not-found")
    writer = await gateway.client("writer", "tasks:write")
    problem(await writer.get(f"/tasks/{task}/logs"), 403, "forbidden")


async def test_log_is_not_followed_once_its_readers_are_gone_or_take_nothing(
    gateway: Gateway,
) -> None:
    readers = LogReaders("a", gateway.store, gateway.clock)
    one, other = (LogName(TaskId(name), Fence(1), 0, "stdout") for name in ("t1", "t2"))
    came = gateway.clock.now()
    await readers.look(one, came)
    await readers.look(other, came)
    assert await followed(gateway) == {one: came, other: came}
    gateway.clock.advance(FOLLOWED_SECONDS)
    await readers.look(one, came)
    gateway.clock.advance(1)
    await readers.tell()
    assert await followed(gateway) == {one: came}
    later = gateway.clock.now()
    await readers.look(one, later)
    assert await followed(gateway) == {one: later}, "the newest reader wants to know what there is now"
    gateway.clock.advance(FOLLOWED_SECONDS + 1)
    await readers.tell()
    assert await followed(gateway) == {}


async def test_many_readers_look_less_often_each(gateway: Gateway) -> None:
    readers = LogReaders("a", gateway.store, gateway.clock)
    assert readers.seconds_between_looks() == LOOK_SECONDS
    for number in range(int(2 * LOOK_SECONDS * LOOKS_PER_SECOND)):
        log = LogName(TaskId(f"t{number}"), Fence(1), 0, "stdout")
        await readers.look(log, gateway.clock.now())
    assert readers.seconds_between_looks() == 2 * LOOK_SECONDS
