"""The conversation with one runner process, whose replies may overtake each other; when it is replaced."""

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from gpubroker.runtime.journal import START_OVER
from gpubroker.runtime.messages import PROTOCOL, RESIZES, Report, RunKey
from gpubroker_server.adapters.ray.agent import runner_pool
from gpubroker_server.adapters.ray.agent.runner_process import RunnerProcess
from gpubroker_server.adapters.ray.processes import ProcessId, process_id
from gpubroker_server.adapters.ray.wire import pack

from tests.contracts.fake_runners import FakeRunners, Runner, a_leader
from tests.patience import PATIENCE_SECONDS

KEY = RunKey("t", 1, 0)


class Actor:
    """The part of an actor handle that a runner process calls. The test answers each call."""

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


class Scene:
    """A runner process, and what it reported."""

    def __init__(self, process: ProcessId) -> None:
        self.actor = Actor()
        self.received: list[str] = []
        self.ended = asyncio.Event()
        self.process = RunnerProcess(
            "runner",
            self.actor,
            process,
            shared=True,
            protocol=PROTOCOL,
            on_report=lambda _, report: self.received.append(report[0]),
            on_end=lambda _: self.ended.set(),
        )


@pytest.fixture
async def scene(process: ProcessId) -> AsyncIterator[Scene]:
    scene = Scene(process)
    yield scene
    scene.process.watched.close()


async def test_orders_of_one_turn_travel_in_one_call(scene: Scene) -> None:
    scene.process.send(("share", 1))
    scene.process.send(("share", 2), ("stop", 3))
    (_, acknowledged, items), _ = await scene.actor.call(0)
    assert (acknowledged, items) == (0, [("share", 1), ("share", 2), ("stop", 3)])


async def test_a_process_of_an_earlier_form_does_not_hear_of_ranks_that_join(scene: Scene) -> None:
    scene.process.protocol = RESIZES - 1
    scene.process.send(("resized", 1, (0, 1, 2), 1), ("stop", 1))
    (_, _, items), _ = await scene.actor.call(0)
    assert items == [("stop", 1)]


async def test_reports_are_passed_on_in_order_when_replies_overtake_each_other(
    scene: Scene,
) -> None:
    for item in ("a", "b"):
        scene.process.send((item,))
        await asyncio.sleep(0)
    await scene.actor.answer(1, (3, ("third",)), (4, ("fourth",)))
    assert scene.received == []
    await scene.actor.answer(0, (1, ("first",)), (2, ("second",)))
    assert scene.received == ["first", "second", "third", "fourth"]


async def test_only_received_reports_are_acknowledged(scene: Scene) -> None:
    for item in ("a", "b"):
        scene.process.send((item,))
        await asyncio.sleep(0)
    await scene.actor.answer(1, (2, ("second",)))
    scene.process.send(("c",))
    (_, acknowledged, _), _ = await scene.actor.call(2)
    assert acknowledged == 0
    await scene.actor.answer(0, (1, ("first",)))
    scene.process.send(("d",))
    (_, acknowledged, _), _ = await scene.actor.call(3)
    assert acknowledged == 2


async def test_a_call_is_always_open_while_a_run_goes_on(scene: Scene) -> None:
    scene.process.runs.add(KEY)
    scene.process.send(("share", 1))
    await scene.actor.answer(0, (1, ("started",)))
    (_, acknowledged, items), _ = await scene.actor.call(1)
    assert (acknowledged, items) == (1, [])


async def test_an_adopted_process_repeats_every_report_that_it_keeps(scene: Scene) -> None:
    scene.process.listen_again()
    (_, acknowledged, _), _ = await scene.actor.call(0)
    assert acknowledged == START_OVER
    await scene.actor.answer(0, (7, ("seventh",)), (8, ("eighth",)))
    assert scene.received == ["seventh", "eighth"]


async def test_the_end_is_noted_after_the_last_reports(scene: Scene) -> None:
    scene.process.send(("share", 1))
    _, reply = await scene.actor.call(0)
    scene.process.watched.signal(signal.SIGKILL)
    await scene.process.watched.wait()
    assert not scene.ended.is_set()
    reply.set_result(pack([(1, ("ended",))]))
    await asyncio.wait_for(scene.ended.wait(), PATIENCE_SECONDS)
    assert scene.received == ["ended"]


@pytest.mark.parametrize("reply", [b"\xc1 no msgpack", pack([1, 2]), ["an object"]])
async def test_a_process_whose_reply_cannot_be_read_is_killed(scene: Scene, reply: object) -> None:
    scene.process.send(("share", 1))
    _, future = await scene.actor.call(0)
    future.set_result(reply)
    await asyncio.wait_for(scene.ended.wait(), PATIENCE_SECONDS)
    assert scene.process.watched.ended


async def test_an_error_while_a_report_is_handled_kills_the_process(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stumble(_process: RunnerProcess, _report: Report) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(scene.process, "_on_report", stumble)
    scene.process.send(("share", 1))
    await scene.actor.answer(0, (1, ("started",)))
    await asyncio.wait_for(scene.ended.wait(), PATIENCE_SECONDS)


async def test_an_end_that_could_not_be_noted_is_noted_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def stumble_once(_process: RunnerProcess) -> None:
        told.append("told")
        if len(told) == 1:
            raise OSError("no descriptor left")
        scene.ended.set()

    monkeypatch.setattr(scene.process, "_on_end", stumble_once)
    scene.process.watched.signal(signal.SIGKILL)
    await asyncio.wait_for(scene.ended.wait(), PATIENCE_SECONDS)
    assert told == ["told", "told"]


async def test_warm_process_that_touched_a_gpu_gets_no_other_run_and_is_replaced(
    runners: FakeRunners, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = tmp_path / "nvidia0"
    gpu.touch()
    monkeypatch.setattr(runner_pool, "GPU_FILES", (str(gpu),))

    def begin(runner: Runner) -> None:
        if not runners.made:
            runner.become(subprocess.Popen(["tail", "-f", str(gpu)]))

    runners.on_start = begin
    leader = a_leader(runners, tmp_path, warm_runners=1, sample_period_seconds=0.01)
    await leader.announce()
    await leader.until(lambda: len(runners.made) == 2)
    guilty, fresh = runners.made
    await leader.until_noted(guilty)
    await leader.start("next", shareable=True)
    await leader.until(lambda: runners.started == ["next"])
    assert (guilty.tasks(), fresh.tasks()) == ([], ["next"])
