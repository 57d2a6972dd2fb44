"""A runner answers its agent with bytes of plain values, whatever user code wrote."""

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from gpubroker import current_task
from gpubroker.runtime.calls import WORKER_SET_VARIABLE
from gpubroker.runtime.messages import PROTOCOL, SPOKEN, RunOrder
from gpubroker_server.adapters.ray.agent import runner as runner_module
from gpubroker_server.adapters.ray.agent.runner import Runner
from gpubroker_server.adapters.ray.wire import pack, unpack

from tests.patience import PATIENCE_SECONDS

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return Runner([os.getcwd()], shared=False)


def share(task: str, function: Any) -> tuple[str, dict[str, Any]]:
    arguments = cloudpickle.dumps((function, (), {}))
    return "share", RunOrder(
        task=task, fence=1, kind="function", python=PYTHON, arguments=arguments
    ).to_wire()


async def ends(runner: Runner, *items: Any) -> dict[str, tuple[Any, ...]]:
    """Task -> its first end, of every run that was ordered."""
    found: dict[str, tuple[Any, ...]] = {}
    acknowledged, wanted = 0, {item[1]["task"] for item in items}
    while set(found) != wanted:
        packed = await runner.exchange(PROTOCOL, acknowledged, items)
        assert type(packed) is bytes
        items = ()
        told = unpack(packed)
        acknowledged = told[-1][0]
        for _, report in told:
            if report[0] == "ended":
                found.setdefault(report[1], report)
    return found


async def test_it_describes_itself_in_bytes(runner: Runner) -> None:
    packed = await runner.describe()
    assert type(packed) is bytes
    who = {"pid": os.getpid(), "shared": False, "runs": ()}
    assert unpack(packed) == {"speaks": SPOKEN, **who}


async def test_a_checkpoint_uri_may_be_a_path(runner: Runner) -> None:
    told = await ends(runner, share("t", lambda: current_task().checkpoint(uri=Path("/data"))))
    assert told["t"][5] == "succeeded"


async def test_a_report_that_cannot_be_carried_fails_its_run_and_no_other(runner: Runner) -> None:
    def forge() -> None:
        task = current_task()
        task._journal.add(("checkpointed", task.id, 1, 0, 1.0, 7, "abc", None, object()))

    told = await ends(runner, share("forger", forge), share("other", lambda: 1))
    assert told["other"][5:7] == ("succeeded", b"1")
    assert told["forger"][5] == "failed"
    assert "cannot be carried" in told["forger"][8][1]


@pytest.fixture
async def worker(runner: Runner) -> AsyncIterator[Runner]:
    """The process of a worker of a set."""
    item = share("w", Waiter)
    item[1]["env"] = {WORKER_SET_VARIABLE: '{"max_concurrency": 1}'}
    exchange = asyncio.create_task(runner.exchange(PROTOCOL, 0, [item]))
    await asyncio.sleep(0)
    assert await call(runner, "") == ("done", b"null", 0.0)
    yield runner
    GOES_ON.set()
    await runner.exchange(PROTOCOL, 0, [("stop", ("w", 1, 0))])
    await exchange


GOES_ON = threading.Event()


class Waiter:
    def answer(self) -> int:
        return 42

    def wait(self) -> None:
        assert GOES_ON.wait(PATIENCE_SECONDS)


async def call(runner: Runner, method: str, task: str = "w", seconds: float = PATIENCE_SECONDS) -> Any:
    packed = await runner.call((task, 1, 0), seconds, pack(("", method, "json", b"{}")))
    assert type(packed) is bytes
    return unpack(packed)


async def test_a_call_is_answered_in_bytes(worker: Runner) -> None:
    assert (await call(worker, "answer"))[:2] == ("done", b"42")
    assert (await call(worker, "answer", "another")) == ("refused", "run another:1 is not here")


async def test_calls_beyond_what_its_agent_leaves_are_refused_at_once(
    worker: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "MAX_CALLS", 2)
    GOES_ON.clear()
    calls = [asyncio.create_task(call(worker, "wait")) for _ in range(2)]
    await asyncio.sleep(0)
    assert (await call(worker, "answer"))[0] == "refused"
    GOES_ON.set()
    assert [answer[0] for answer in await asyncio.gather(*calls)] == ["done", "done"]
    assert (await call(worker, "answer"))[0] == "done"
