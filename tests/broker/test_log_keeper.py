"""The leader asks agents for the logs that are read, and keeps what they tell."""

from collections.abc import Mapping

import pytest
from gpubroker_server.broker.run_logs import AGAIN_SECONDS, LogKeeper
from gpubroker_server.core.domain.orders import Logged, LogName
from gpubroker_server.core.domain.units import Fence, Instant, MonotonicSeconds, NodeName, TaskId
from gpubroker_server.core.lifecycle.run_logs import FollowedLogs
from gpubroker_server.ports.run_logs import LogChanges, LogPart
from gpubroker_server.ports.store import BlobTooLarge, StoreUnavailable

from tests.builders import NOW, a_task, a_world, holding
from tests.contracts.scenes import next_term
from tests.gateway.harness import ManualClock
from tests.memory_blobs import Blobs
from tests.stores import SqliteStore

LOG = LogName(TaskId("t1"), Fence(1), 0, "stdout")


class Stage:
    """Implements the part of `Executor` that is used."""

    def __init__(self) -> None:
        self.asked: list[tuple[NodeName, Mapping[LogName, int]]] = []
        self.clock = ManualClock()
        self.store = SqliteStore(self.clock)
        self.blobs = Blobs()
        self.seconds = 1000.0

    def read_logs(self, node: NodeName, logs: Mapping[LogName, int]) -> None:
        self.asked.append((node, logs))

    async def leader(self) -> LogKeeper:
        term = await next_term(self.store)
        world = a_world(holding(a_task("t1"), "gpu0"))
        about = world, self.store, self.blobs, self, self.clock, lambda: MonotonicSeconds(self.seconds)
        return LogKeeper(term, *about, limit_bytes=100, inline_bytes=30)  # type: ignore[arg-type]

    async def read(self, *logs: LogName) -> None:
        await self.store.follow_logs(
            FollowedLogs("a", self.clock.now(), {log: self.clock.now() for log in logs})
        )

    async def places(self, keeper: LogKeeper) -> list[int]:
        """From which bytes on the log is asked for by now."""
        await keeper.ask_nodes()
        asked, self.asked = self.asked, []
        return [logs[LOG] for _, logs in asked]

    async def kept(self) -> list[tuple[int, int]]:
        return [(part.first_byte, part.end_byte) for part in await self.store.log_parts(LOG, -1, 99)]


def told(first_byte: int, data: bytes, *, is_final: bool = False) -> Logged:
    return Logged(LOG.task, LOG.fence, NOW, LOG.stream, first_byte, data, is_final)


@pytest.fixture
def stage() -> Stage:
    return Stage()


async def test_a_log_is_asked_for_while_it_is_read_from_where_it_ends(stage: Stage) -> None:
    keeper = await stage.leader()
    assert await stage.places(keeper) == []
    await stage.read(LOG)
    assert await stage.places(keeper) == [0]
    assert await stage.places(keeper) == [], "the agent has not answered"
    await keeper.keep([told(0, b"one\n")])
    assert await stage.places(keeper) == [4]
    stage.seconds += AGAIN_SECONDS
    assert await stage.places(keeper) == [4], "the answer was lost"
    await keeper.keep([told(4, b"two\n"), told(4, b"two\n")])
    assert await stage.kept() == [(0, 4), (4, 8)]
    await stage.read()
    assert await stage.places(keeper) == []


async def test_the_next_leader_goes_on_where_the_last_one_stopped(stage: Stage) -> None:
    first = await stage.leader()
    await stage.read(LOG)
    await first.ask_nodes()
    await first.keep([told(0, b"one\n")])
    stage.asked.clear()
    assert await stage.places(await stage.leader()) == [4]


async def test_of_a_log_that_grows_too_long_the_middle_is_removed(stage: Stage) -> None:
    keeper = await stage.leader()
    await stage.read(LOG)
    await keeper.ask_nodes()
    for first_byte in range(0, 300, 20):
        await keeper.keep([told(first_byte, b"x" * 20)])
    assert await stage.kept() == [(0, 20), (20, 40), (40, 60), (240, 260), (260, 280), (280, 300)]


async def test_the_whole_log_replaces_what_was_told_while_it_was_read(stage: Stage) -> None:
    keeper = await stage.leader()
    await stage.store.keep_logs(keeper.term, LogChanges(parts=[a_part(5), a_part(60)]))
    await keeper.keep([told(0, b"a" * 50, is_final=True), told(80, b"b" * 9, is_final=True)])
    first, last = await stage.store.log_parts(LOG, -1, 9)
    assert (first.data, last.data) == (None, b"b" * 9), "a large part is an object"
    assert first.digest is not None
    assert await stage.blobs.get(first.digest) == b"a" * 50
    await keeper.keep([told(0, b"a" * 50, is_final=True), told(0, b"c", is_final=True)])
    assert await stage.kept() == [(0, 1)], "an agent that was asked again has told it twice"


async def test_log_of_a_followed_run_takes_no_more_disk_than_the_limit(stage: Stage) -> None:
    """Objects of the removed middle would stay until a sweep, an hour later."""
    keeper = await stage.leader()
    await stage.read(LOG)
    await keeper.ask_nodes()
    for first_byte in range(0, 300, 40):
        await keeper.keep([told(first_byte, b"x" * 40)])
    assert stage.blobs.objects == {}
    assert sum(end - begin for begin, end in await stage.kept()) <= 100 + 2 * 40


@pytest.mark.parametrize("fault", [StoreUnavailable("disk full"), BlobTooLarge("too large")])
async def test_disk_that_takes_no_object_keeps_the_log_in_its_row(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    """The leader stays at work."""

    async def refuse(data: bytes, *, owner: str) -> str:
        raise fault

    monkeypatch.setattr(stage.blobs, "put", refuse)
    keeper = await stage.leader()
    await keeper.keep([told(0, b"a" * 50, is_final=True)])
    [part] = await stage.store.log_parts(LOG, -1, 9)
    assert (part.data, part.digest) == (b"a" * 50, None)


async def test_an_answer_that_comes_after_the_whole_log_does_not_take_its_place(stage: Stage) -> None:
    keeper = await stage.leader()
    await keeper.keep([told(0, b"a" * 20, is_final=True), told(20, b"b" * 9, is_final=True)])
    await keeper.keep([told(0, b"a" * 10), told(10, b"a" * 10)])
    assert await stage.kept() == [(0, 20), (20, 29)]


async def test_a_log_of_an_unknown_task_is_not_kept(stage: Stage) -> None:
    keeper = await stage.leader()
    stranger = Logged(TaskId("none"), Fence(1), Instant(NOW), "stdout", 0, b"one", is_final=True)
    await keeper.keep([stranger])
    assert await stage.store.log_parts(stranger.log, 0, 9) == []


def a_part(first_byte: int) -> LogPart:
    return LogPart(LOG, first_byte, 3, NOW, "default", b"old")
