"""The conversation with one runner process, whose replies may overtake each other."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from gpubroker.runtime.journal import START_OVER
from gpubroker.runtime.messages import PROTOCOL, Report, RunKey
from gpubroker_server.adapters.ray.agent.runner_process import Lane
from gpubroker_server.adapters.ray.processes import ProcessId, process_id
from gpubroker_server.adapters.ray.wire import pack

from tests.patience import PATIENCE_SECONDS

KEY = RunKey("t", 1, 0)


class Actor:
    """The part of an actor handle that a lane calls. Each call is answered when the test says so."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], asyncio.Future[Any]]] = []
        self.called = asyncio.Event()
        self.exchange = self

    def remote(self, *arguments: Any) -> "asyncio.Future[Any]":
        reply = asyncio.get_running_loop().create_future()
        self.calls.append((arguments, reply))
        self.called.set()
        return reply

    async def call(self, number: int) -> tuple[tuple[Any, ...], "asyncio.Future[Any]"]:
        while len(self.calls) <= number:
            self.called.clear()
            await asyncio.wait_for(self.called.wait(), PATIENCE_SECONDS)
        return self.calls[number]

    async def answer(self, number: int, *reply: tuple[int, Report]) -> None:
        _, future = await self.call(number)
        future.set_result(pack(list(reply)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)


@pytest.fixture
def process() -> Iterator[ProcessId]:
    with subprocess.Popen(["sleep", "60"]) as child:
        yield process_id(child.pid)
        child.kill()


class Listened:
    """A lane, and what was heard of it."""

    def __init__(self, process: ProcessId) -> None:
        self.actor = Actor()
        self.heard: list[str] = []
        self.ended = asyncio.Event()
        self.lane = Lane(
            "runner",
            self.actor,
            process,
            shared=True,
            protocol=PROTOCOL,
            on_report=lambda _, report: self.heard.append(report[0]),
            on_end=lambda _: self.ended.set(),
        )


@pytest.fixture
async def listened(process: ProcessId) -> AsyncIterator[Listened]:
    listened = Listened(process)
    yield listened
    listened.lane.watched.close()


async def test_orders_of_one_turn_travel_in_one_call(listened: Listened) -> None:
    listened.lane.hand_over(("share", 1))
    listened.lane.hand_over(("share", 2), ("stop", 3))
    (_, acknowledged, items), _ = await listened.actor.call(0)
    assert (acknowledged, items) == (0, [("share", 1), ("share", 2), ("stop", 3)])


async def test_replies_that_overtake_each_other_are_heard_in_the_order_of_their_reports(
    listened: Listened,
) -> None:
    for item in ("a", "b"):
        listened.lane.hand_over((item,))
        await asyncio.sleep(0)
    await listened.actor.answer(1, (3, ("third",)), (4, ("fourth",)))
    assert listened.heard == []
    await listened.actor.answer(0, (1, ("first",)), (2, ("second",)))
    assert listened.heard == ["first", "second", "third", "fourth"]


async def test_only_what_was_heard_is_acknowledged(listened: Listened) -> None:
    for item in ("a", "b"):
        listened.lane.hand_over((item,))
        await asyncio.sleep(0)
    await listened.actor.answer(1, (2, ("second",)))
    listened.lane.hand_over(("c",))
    (_, acknowledged, _), _ = await listened.actor.call(2)
    assert acknowledged == 0
    await listened.actor.answer(0, (1, ("first",)))
    listened.lane.hand_over(("d",))
    (_, acknowledged, _), _ = await listened.actor.call(3)
    assert acknowledged == 2


async def test_while_a_run_goes_on_somebody_listens(listened: Listened) -> None:
    listened.lane.runs.add(KEY)
    listened.lane.hand_over(("share", 1))
    await listened.actor.answer(0, (1, ("started",)))
    (_, acknowledged, items), _ = await listened.actor.call(1)
    assert (acknowledged, items) == (1, [])


async def test_an_adopted_process_tells_everything_it_still_keeps(listened: Listened) -> None:
    listened.lane.listen_again()
    (_, acknowledged, _), _ = await listened.actor.call(0)
    assert acknowledged == START_OVER
    await listened.actor.answer(0, (7, ("seventh",)), (8, ("eighth",)))
    assert listened.heard == ["seventh", "eighth"]


async def test_the_end_is_told_after_the_last_words(listened: Listened) -> None:
    listened.lane.hand_over(("share", 1))
    _, reply = await listened.actor.call(0)
    listened.lane.watched.signal(9)
    await listened.lane.watched.wait()
    assert not listened.ended.is_set()
    reply.set_result(pack([(1, ("ended",))]))
    await asyncio.wait_for(listened.ended.wait(), PATIENCE_SECONDS)
    assert listened.heard == ["ended"]


@pytest.mark.parametrize("reply", [b"\xc1 no msgpack", pack([1, 2]), ["an object"]])
async def test_who_cannot_be_understood_is_ended_so_that_its_runs_are_not_waited_for(
    listened: Listened, reply: object
) -> None:
    listened.lane.hand_over(("share", 1))
    _, future = await listened.actor.call(0)
    future.set_result(reply)
    await asyncio.wait_for(listened.ended.wait(), PATIENCE_SECONDS)
    assert listened.lane.watched.ended


async def test_a_fault_of_whoever_hears_a_report_ends_the_process_and_not_the_listening(
    listened: Listened, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stumble(_lane: Lane, _report: Report) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(listened.lane, "_on_report", stumble)
    listened.lane.hand_over(("share", 1))
    await listened.actor.answer(0, (1, ("started",)))
    await asyncio.wait_for(listened.ended.wait(), PATIENCE_SECONDS)


async def test_an_end_that_could_not_be_noted_is_told_again(
    listened: Listened, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def stumble_once(_lane: Lane) -> None:
        told.append("told")
        if len(told) == 1:
            raise OSError("no descriptor left")
        listened.ended.set()

    monkeypatch.setattr(listened.lane, "_on_end", stumble_once)
    listened.lane.watched.signal(9)
    await asyncio.wait_for(listened.ended.wait(), PATIENCE_SECONDS)
    assert told == ["told", "told"]
