"""Parts of logs, and which logs are read: the same in every store."""

import pytest
from gpubroker_server.core.domain.orders import LogName
from gpubroker_server.core.domain.units import Fence, Instant, TaskId
from gpubroker_server.core.lifecycle.run_logs import FollowedLogs
from gpubroker_server.ports.run_logs import LogChanges, LogPart
from gpubroker_server.ports.store import StaleTerm, TaskStore
from msgspec.structs import replace

from tests.builders import NOW
from tests.contracts.scenes import next_term, with_gpu
from tests.contracts.test_store_retention import NEVER, cutoffs, ended, pruned

OUT = LogName(TaskId("t1"), Fence(1), 0, "stdout")
ERR = OUT._replace(stream="stderr")
LATER = OUT._replace(fence=Fence(2))


def a_part(first_byte: int, data: bytes, log: LogName = OUT, at: float = 0.0) -> LogPart:
    return LogPart(log, first_byte, len(data), Instant(NOW + at), "default", data)


async def texts(store: TaskStore, log: LogName, after_byte: int = 0, limit: int = 9) -> list[bytes | None]:
    return [part.data for part in await store.log_parts(log, after_byte, limit)]


async def test_parts_come_back_in_order_from_a_byte_on(store: TaskStore) -> None:
    term = await next_term(store)
    parts = [a_part(4, b"two\n\0\xff"), a_part(0, b"one\n"), a_part(0, b"no\n", ERR), a_part(0, b"2", LATER)]
    await store.keep_logs(term, LogChanges(parts=parts))
    assert await store.log_parts(OUT, 0, 9) == [parts[1], parts[0]]
    assert await texts(store, OUT, 0, limit=1) == [b"one\n"]
    assert await texts(store, OUT, 4) == [b"two\n\0\xff"]
    assert await texts(store, OUT, 5) == [b"two\n\0\xff"], "a part of which only the end is wanted"
    assert await texts(store, OUT, 10) == []
    assert await texts(store, ERR) == [b"no\n"]
    assert await store.log_end(OUT) == (10, NOW)
    assert await store.log_end(OUT._replace(rank=1)) == (0, None)


async def test_an_empty_part_says_when_a_log_had_no_more(store: TaskStore) -> None:
    term = await next_term(store)
    await store.keep_logs(term, LogChanges(parts=[a_part(0, b"", at=1.0)]))
    assert await store.log_end(OUT) == (0, NOW + 1.0)
    await store.keep_logs(term, LogChanges(parts=[a_part(0, b"one", at=2.0)]))
    assert await texts(store, OUT) == [b"one"]
    assert await store.log_end(OUT) == (3, NOW + 2.0)


async def test_a_whole_log_replaces_its_parts_and_the_middle_of_a_long_one_goes(store: TaskStore) -> None:
    term = await next_term(store)
    parts = [a_part(at, b"abc") for at in (0, 3, 6, 9, 12)]
    await store.keep_logs(term, LogChanges(parts=[*parts, a_part(0, b"other", ERR)]))
    await store.keep_logs(term, LogChanges(cut={OUT: (3, 11)}, parts=[a_part(15, b"end")]))
    found = await store.log_parts(OUT, 0, 9)
    assert [part.first_byte for part in found] == [0, 9, 12, 15]
    big = replace(a_part(6, b"123456"), data=None, digest="d1g")
    await store.keep_logs(term, LogChanges(replaced=[OUT], parts=[a_part(0, b"abc"), big]))
    assert await store.log_parts(OUT, 0, 9) == [a_part(0, b"abc"), big]
    assert await store.referenced(["d1g", "none"]) == {"d1g"}
    assert await texts(store, ERR) == [b"other"]


async def test_a_leader_whose_term_is_over_keeps_nothing(store: TaskStore) -> None:
    old = await next_term(store)
    await next_term(store)
    with pytest.raises(StaleTerm):
        await store.keep_logs(old, LogChanges(parts=[a_part(0, b"one")]))
    assert await texts(store, OUT) == []


async def test_each_gateway_says_which_logs_are_read(store: TaskStore) -> None:
    first = FollowedLogs("a", NOW, {OUT: NOW, ERR: Instant(NOW + 1)})
    await store.follow_logs(first)
    await store.follow_logs(FollowedLogs("b", NOW, {}))
    newer = FollowedLogs("a", Instant(NOW + 2), {LATER: NOW})
    assert sorted(await store.followed_logs(), key=lambda it: it.gateway)[0] == first
    await store.follow_logs(newer)
    assert sorted(await store.followed_logs(), key=lambda it: it.gateway) == [
        newer,
        FollowedLogs("b", NOW, {}),
    ]


async def test_a_log_goes_with_its_task(store: TaskStore) -> None:
    term = await with_gpu(store)
    await ended(store, term, "t1")
    await store.keep_logs(term, LogChanges(parts=[a_part(0, b"one\n"), a_part(0, b"2", LATER)]))
    await pruned(store, term, cutoffs(finished=NEVER))
    assert await texts(store, OUT) == [b"one\n"], "the task has ended a moment ago"
    await pruned(store, term, cutoffs())
    assert await texts(store, OUT) == await texts(store, LATER) == []
