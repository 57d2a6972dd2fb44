"""Calls to workers of sets on the service's side of a driver process, which may answer late, or end."""

import asyncio
from typing import Any

import pytest
from gpubroker_server.adapters.ray.driver.worker_calls import NO_DRIVER, RayWorkerCalls
from gpubroker_server.adapters.ray.wire import pack, unpack
from gpubroker_server.core.domain.units import Fence, NodeName, Seconds, TaskId
from gpubroker_server.ports.worker_calls import (
    CallAnswer,
    Called,
    MethodFailed,
    NotBegun,
    WorkerCall,
    WorkerLost,
    WorkerRun,
)

from tests.patience import PATIENCE_SECONDS

RUN = WorkerRun(NodeName("n1"), TaskId("t"), Fence(3))
ADD = WorkerCall("judge", "add", "json", b'{"args":[1]}')


class Way:
    """To a driver that is connected."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []
        self.calls = RayWorkerCalls(lambda *parts: self.sent.append(parts))
        self.calls.is_connected = True

    async def begin(self, seconds: float = PATIENCE_SECONDS) -> "asyncio.Task[CallAnswer]":
        """A call that has been sent."""
        call = asyncio.create_task(self.calls.call(RUN, ADD, Seconds(seconds)))
        await asyncio.sleep(0)
        return call


async def test_answers_go_to_the_calls_that_they_belong_to() -> None:
    way = Way()
    first, second = await way.begin(), await way.begin()
    (kind, one, *of_run, packed), (_, two, *_) = way.sent
    assert (kind, of_run) == ("call", ["n1", "t", 3, PATIENCE_SECONDS])
    assert tuple(unpack(packed)) == ADD
    way.calls.on_answer(two, pack(("done", b"2", 0.5)))
    way.calls.on_answer(one, pack(("failed", "exception", "no", "Trace")))
    assert await second == Called(b"2", 0.5)
    assert await first == MethodFailed("exception", "no", "Trace")


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        (("refused", "it leaves"), NotBegun("it leaves")),
        (("late", "too late"), NotBegun("too late", is_late=True)),
        (("lost", "it died"), WorkerLost("it died")),
        (("done", "no bytes", 0.5), None),
        (("paid",), None),
    ],
)
async def test_what_a_process_writes_is_read_and_never_believed(written: Any, answer: CallAnswer) -> None:
    way = Way()
    call = await way.begin()
    way.calls.on_answer(way.sent[0][1], pack(written))
    got = await call
    assert got == answer or (answer is None and isinstance(got, MethodFailed))


async def test_an_answer_that_comes_when_nobody_waits_any_more_is_dropped() -> None:
    way = Way()
    with pytest.raises(TimeoutError):
        await way.calls.call(RUN, ADD, Seconds(0.0))
    way.calls.on_answer(way.sent[0][1], pack(("done", b"2", 0.5)))
    next_one = await way.begin()
    assert not next_one.done()
    next_one.cancel()


async def test_calls_are_lost_with_the_driver_and_none_is_sent_before_there_is_another() -> None:
    way = Way()
    call = await way.begin()
    way.calls.on_driver_end("it was killed")
    assert await call == WorkerLost("it was killed")
    assert await way.calls.call(RUN, ADD, Seconds(1.0)) == NotBegun(NO_DRIVER)
    assert len(way.sent) == 1
