"""Calls to workers of sets on the service's side of a driver process, which may answer late, or end."""

import asyncio
import math
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from gpubroker_server.adapters.ray.driver import calls
from gpubroker_server.adapters.ray.driver.calls import ANSWER_BYTES, ActorCalls
from gpubroker_server.adapters.ray.driver.process import Driver, Opening
from gpubroker_server.adapters.ray.driver.worker_calls import NO_DRIVER, NO_ROOM, RayWorkerCalls
from gpubroker_server.adapters.ray.options import RayOptions
from gpubroker_server.adapters.ray.wire import pack, read_frame, unpack
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
from ray.exceptions import RayActorError, RayError, RayTaskError

from tests.patience import PATIENCE_SECONDS

RUN = WorkerRun(NodeName("n1"), TaskId("t"), Fence(3))
ADD = WorkerCall("judge", "add", "json", b'{"args":[1]}')


class Way:
    """To a driver that is connected."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []
        self._is_sent = asyncio.Event()
        self.has_room = asyncio.Event()
        self.has_room.set()
        self.calls = RayWorkerCalls(self._send, self._room)
        self.calls.is_connected = True

    def _send(self, *parts: Any) -> None:
        self.sent.append(parts)
        self._is_sent.set()

    async def _room(self) -> None:
        await self.has_room.wait()

    async def begin(self, call: WorkerCall = ADD) -> "asyncio.Task[CallAnswer]":
        """A call that has been sent."""
        begun = asyncio.create_task(self.calls.call(RUN, call, Seconds(PATIENCE_SECONDS)))
        await self.sends()
        return begun

    async def sends(self) -> None:
        """Back when it has sent another call."""
        await asyncio.wait_for(self._is_sent.wait(), PATIENCE_SECONDS)
        self._is_sent.clear()

    def answer(self, packed: bytes) -> None:
        """To the call that was sent last."""
        self.calls.on_answer(self.sent[-1][1], packed)


async def test_answers_go_to_the_calls_that_they_belong_to() -> None:
    way = Way()
    first, second = await way.begin(), await way.begin()
    (kind, one, node, task, fence, seconds, packed), (_, two, *_) = way.sent
    assert (kind, node, task, fence) == ("call", "n1", "t", 3)
    assert 0 < seconds <= PATIENCE_SECONDS
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
    ],
)
async def test_answers_that_are_no_results(written: Any, answer: CallAnswer) -> None:
    way = Way()
    call = await way.begin()
    way.answer(pack(written))
    assert await call == answer


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\xc1",
        pack({}),
        b"\x81\x80\x80",
        pack(("paid",)),
        pack(("done", "no bytes", 0.5)),
        pack(("done", b"2", math.nan)),
        pack(("done", b"2", math.inf)),
        pack(("done", b"2", -1.0)),
        pack(("done", b'1,"worker":"another"', 0.5)),
        pack(("done", b"NaN", 0.5)),
        pack(("done", b'"\xff"', 0.5)),
        pack(("late", True)),
    ],
)
async def test_what_a_process_writes_is_read_and_never_believed(packed: bytes) -> None:
    way = Way()
    call = await way.begin()
    way.answer(packed)
    got = await call
    assert isinstance(got, MethodFailed)
    assert got.kind == "malformed_answer"


async def test_a_pickled_result_is_no_concern_of_the_service() -> None:
    way = Way()
    call = await way.begin(ADD._replace(form="cloudpickle"))
    way.answer(pack(("done", b"\x80no pickle", 0.5)))
    assert await call == Called(b"\x80no pickle", 0.5)


async def test_calls_wait_for_room_on_the_way_to_the_driver_and_orders_do_not() -> None:
    way = Way()
    way.has_room.clear()
    calls = [asyncio.create_task(way.calls.call(RUN, ADD, Seconds(s))) for s in (0.01, PATIENCE_SECONDS)]
    await asyncio.sleep(0.02)
    assert way.sent == []
    way.has_room.set()
    assert await calls[0] == NotBegun(NO_ROOM, is_late=True)
    await way.sends()
    way.answer(pack(("done", b"2", 0.5)))
    assert await calls[1] == Called(b"2", 0.5)
    assert len(way.sent) == 1


async def test_an_answer_to_a_call_that_was_given_up_is_dropped() -> None:
    way = Way()
    call = await way.begin()
    call.cancel()
    await asyncio.wait({call})
    way.answer(pack(("done", b"2", 0.5)))
    next_one = await way.begin()
    assert not next_one.done()
    next_one.cancel()


async def test_calls_are_lost_with_the_driver_and_none_is_sent_before_the_next() -> None:
    way = Way()
    call = await way.begin()
    way.calls.on_driver_end("it was killed")
    assert await call == WorkerLost("it was killed")
    assert await way.calls.call(RUN, ADD, Seconds(1.0)) == NotBegun(NO_DRIVER)
    assert len(way.sent) == 1


class Remote:
    """A method of an actor's handle: what it is called with, and what each call answers or raises."""

    def __init__(self, *answers: Any) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self._answers = answers

    def remote(self, *arguments: Any) -> "asyncio.Future[Any]":
        self.asked.append(arguments)
        answer = self._answers[min(len(self.asked), len(self._answers)) - 1]
        future = asyncio.get_running_loop().create_future()
        if isinstance(answer, Exception):
            future.set_exception(answer)
        elif answer is not None:
            future.set_result(answer)
        return future


class Actors:
    """What Ray finds by name: the agent of the node, and the process of the run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **methods: Remote) -> None:
        self.runner_of = Remote("runner/n1/a")
        self.agent: Any = SimpleNamespace(runner_of=self.runner_of)
        self.runner: Any = SimpleNamespace(**methods)
        monkeypatch.setattr(ray, "get_actor", self._find)
        config = RayOptions(Path("/nowhere")).agent_config("").to_json()
        self.calls = ActorCalls(config, result_limit_bytes=100)

    def _find(self, name: str, _namespace: str) -> Any:
        if not name:
            raise ValueError("no actor has that name")
        return self.agent if name == "agent/n1" else self.runner

    async def call(self, seconds: float = PATIENCE_SECONDS) -> tuple[Any, ...]:
        found: tuple[Any, ...] = unpack(await self.calls.call("n1", "t", 3, seconds, b"packed"))
        return found


async def test_the_process_of_a_run_is_found_once_and_gets_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    called = Remote(pack(("done", b"2", 0.5)))
    actors = Actors(monkeypatch, call=called)
    answers = await asyncio.gather(*(actors.call() for _ in range(3)))
    assert answers == [("done", b"2", 0.5)] * 3
    assert actors.runner_of.asked == [("t", 3, 0)]
    assert {(key, packed) for key, _, packed in called.asked} == {(("t", 3, 0), b"packed")}
    assert all(0 < seconds <= PATIENCE_SECONDS for _, seconds, _ in called.asked)


async def test_a_call_that_cannot_be_sent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes to another worker; the driver goes on, whatever it was."""
    actors = Actors(monkeypatch)
    assert (await actors.call())[0] == "refused", "a process of an earlier release has no such method"
    actors = Actors(monkeypatch, call=Remote(pack(("done", b"2", 0.5))))
    actors.agent.runner_of = Remote("", RayError("away"), None, "runner/n1/a")
    assert (await actors.call())[0] == "refused", "the agent has no such run"
    assert await actors.call() == ("refused", "no process of run t:3 on node n1: away")
    assert (await actors.call(0.01))[0] == "refused", "the agent did not say in time"
    actors.agent = SimpleNamespace()
    actors.calls._actors.clear()
    assert (await actors.call())[0] == "refused", "an agent of an earlier release"
    actors.agent.runner_of = Remote("runner/n1/a")
    assert (await actors.call())[0] == "done"


@pytest.mark.parametrize(
    "fault",
    [RayTaskError("call", "Traceback", ValueError("no")), RayActorError(), RuntimeError("a bug")],  # type: ignore[no-untyped-call]  # Ray has no types
)
async def test_a_call_that_fails_once_it_is_sent_is_lost_and_not_sent_again(
    monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    called = Remote(fault, pack(("done", b"2", 0.5)))
    actors = Actors(monkeypatch, call=called)
    assert (await actors.call())[0] == "lost"
    assert len(called.asked) == 1
    assert (await actors.call())[0] == "done"
    assert len(actors.runner_of.asked) == 2, "its process is found again"


@pytest.mark.parametrize("answer", [{"done": 1}, "done", b"x" * (101 + ANSWER_BYTES), object()])
async def test_an_answer_of_another_type_or_size_is_none(
    monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    actors = Actors(monkeypatch, call=Remote(answer))
    assert await actors.call() == ()


async def test_only_so_many_processes_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_ACTORS", 2)
    actors = Actors(monkeypatch, call=Remote(pack(("done", b"2", 0.5))))
    for fence in (1, 2, 3, 3, 1):
        await actors.calls.call("n1", "t", fence, PATIENCE_SECONDS, b"packed")
    assert [fence for _, fence, _ in actors.runner_of.asked] == [1, 2, 3, 1]


async def test_a_driver_sends_one_answer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else reports to the leader would wait behind all of them."""
    large = pack(("done", b"x" * 2**20, 0.5))
    Actors(monkeypatch, call=Remote(large))
    ours, theirs = socket.socketpair()
    _reader, writer = await asyncio.open_unix_connection(sock=ours)
    config = RayOptions(Path("/nowhere")).agent_config("").to_json()
    async with asyncio.TaskGroup() as tasks:
        driver = Driver(Opening("", "", config, "", 0, 1, 2**21), writer, tasks)
        for number in range(3):
            await driver.on_message(("call", number, "n1", "t", 3, PATIENCE_SECONDS, b"packed"))
        reader, _writer = await asyncio.open_unix_connection(sock=theirs)
        answers = []
        for _ in range(3):
            answers.append(await read_frame(reader))
            assert writer.transport.get_write_buffer_size() <= len(large) + 100
    assert answers == [("answer", number, large) for number in range(3)]
    writer.close()
