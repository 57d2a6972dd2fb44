"""Commands that handle SIGTERM, save their work and exit with 0, on real Ray: that is no success."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpubroker import Broker, Task

from tests.e2e.service_process import until
from tests.patience import PATIENCE_SECONDS

SCRIPT = """
trap 'echo "saved $GPUBROKER_ATTEMPT" >> "$0"; {on_notice} exit 0' TERM
echo "began $GPUBROKER_ATTEMPT from ${{GPUBROKER_RESUME_URI:-nothing}}" >> "$0"
{at_work}
while [ ! -e "$0.enough" ]; do sleep 0.05; done
echo "done $GPUBROKER_ATTEMPT" >> "$0"
"""


class Scene:
    """Commands that tell what happens to them in one file, and work until there is another."""

    def __init__(self, broker: Broker, folder: Path) -> None:
        self.broker = broker
        self.witness = folder / "witness"
        self.enough = folder / "witness.enough"

    def submit(self, on_notice: str = "", at_work: str = "", **options: Any) -> Task:
        script = SCRIPT.format(on_notice=on_notice, at_work=at_work)
        facts = {"gpu_mb": 16_000, "priority": "background", "grace_seconds": 30, **options}
        return self.broker.submit(["/bin/sh", "-c", script, str(self.witness)], **facts)

    def lines(self) -> list[str]:
        return self.witness.read_text().splitlines() if self.witness.exists() else []

    def until_at_work(self, attempt: int = 1, runs: int = 1) -> None:
        began = f"began {attempt} "
        until(lambda: sum(line.startswith(began) for line in self.lines()) == runs, "the command is at work")

    def ended(self, task: Task) -> Task:
        return self.broker.wait(task, timeout_seconds=PATIENCE_SECONDS)

    def preempt(self) -> None:
        """Another task takes all GPUs for a moment."""
        urgent = self.broker.submit("tests.e2e.work:add", 20, 22, gpus=2, priority="critical")
        assert self.broker.result(urgent, timeout_seconds=PATIENCE_SECONDS) == 42


@pytest.fixture
def scene(broker: Broker, tmp_path: Path) -> Scene:
    return Scene(broker, tmp_path)


def test_preempted_command_comes_back_and_its_dependents_wait_for_its_end(scene: Scene) -> None:
    task = scene.submit()
    dependent = scene.broker.submit("tests.e2e.work:add", 1, 2, after=[task])
    scene.until_at_work()
    scene.preempt()
    scene.until_at_work(attempt=2)
    assert scene.broker.get(dependent).state == "pending"
    scene.enough.touch()
    assert scene.broker.result(task, timeout_seconds=PATIENCE_SECONDS) == {"exit_code": 0}
    assert scene.broker.result(dependent, timeout_seconds=PATIENCE_SECONDS) == 3
    again = scene.broker.get(task)
    assert (again.attempt, again.raw["preemptions"], again.raw["failures"]) == (2, 1, 0)
    assert scene.lines() == ["began 1 from nothing", "saved 1", "began 2 from nothing", "done 2"]
    ended = scene.broker.get(dependent)
    assert ended.started_at is not None
    assert again.finished_at is not None
    assert ended.started_at >= again.finished_at


STOPS: dict[str, tuple[dict[str, Any], Callable[[Broker, Task], object], str, str]] = {
    "cancelled": ({}, lambda broker, task: broker.cancel(task), "cancelled", "cancel"),
    "at its time limit": ({"timeout_seconds": 1.5}, lambda *_: None, "failed", "timeout"),
    "at its deadline": ({"deadline_seconds": 4}, lambda *_: None, "expired", "deadline"),
}


@pytest.mark.parametrize(("options", "stop", "state", "reason"), STOPS.values(), ids=STOPS)
def test_a_command_that_exits_0_when_stopped_has_not_succeeded(
    scene: Scene,
    options: dict[str, Any],
    stop: Callable[[Broker, Task], object],
    state: str,
    reason: str,
) -> None:
    task = scene.submit(max_retries=3, **options)
    dependent = scene.broker.submit("tests.e2e.work:add", 1, 2, after=[task])
    scene.until_at_work()
    stop(scene.broker, task)
    late = scene.ended(task)
    assert (late.state, late.raw["stop_reason"], late.attempt) == (state, reason, 1)
    assert scene.lines() == ["began 1 from nothing", "saved 1"]
    if reason != "cancel":
        assert late.error is not None
        assert late.error.kind == reason
    lost = scene.ended(dependent)
    assert (lost.state, lost.attempt, lost.failed_by) == ("failed", 0, task.id)


def test_a_time_limit_uses_a_retry_where_the_task_says_so(scene: Scene) -> None:
    task = scene.submit(timeout_seconds=3, max_retries=1, retry_on=["timeout"])
    scene.until_at_work(attempt=2)
    scene.enough.touch()
    again = scene.ended(task)
    assert (again.state, again.attempt, again.raw["failures"]) == ("succeeded", 2, 1)
    assert again.retry_on == ("timeout",)
    assert scene.lines() == ["began 1 from nothing", "saved 1", "began 2 from nothing", "done 2"]


def test_a_command_that_a_drain_stops_comes_back(scene: Scene) -> None:
    task = scene.submit()
    scene.until_at_work()
    scene.broker.drain("local")
    until(lambda: scene.broker.get(task).state == "pending", "it is back in the queue")
    scene.broker.uncordon("local")
    scene.until_at_work(attempt=2)
    scene.enough.touch()
    assert scene.ended(task).state == "succeeded"


def test_a_command_that_reports_completion_under_notice_has_succeeded(scene: Scene) -> None:
    complete = f"{sys.executable} -c 'from gpubroker.cli import main; main()' complete;".replace("'", '"')
    task = scene.submit(on_notice=complete)
    scene.until_at_work()
    scene.preempt()
    assert scene.broker.result(task, timeout_seconds=PATIENCE_SECONDS) == {"exit_code": 0, "completed": True}
    assert scene.lines() == ["began 1 from nothing", "saved 1"]


def test_a_command_reports_progress_and_finds_its_checkpoint_again(scene: Scene) -> None:
    reports = 'exec 3> "$GPUBROKER_REPORTS"; echo progress 0.5 half >&3; echo checkpoint /data/step-3 >&3'
    task = scene.submit(at_work=reports)
    scene.until_at_work()
    until(lambda: scene.broker.get(task).raw["checkpoint_at"] is not None, "the checkpoint is stored")
    progress = scene.broker.get(task).raw["progress"]
    assert (progress["fraction"], progress["message"]) == (0.5, "half")
    scene.preempt()
    scene.until_at_work(attempt=2)
    scene.enough.touch()
    assert scene.ended(task).state == "succeeded"
    assert scene.lines()[2] == "began 2 from /data/step-3"


def test_a_preempted_gang_of_commands_comes_back(scene: Scene) -> None:
    gang = scene.submit(bundles=[{"count": 2, "gpu_mb": 16_000}], gpu_mb=None)
    scene.until_at_work(runs=2)
    scene.preempt()
    scene.until_at_work(attempt=2, runs=2)
    scene.enough.touch()
    assert scene.ended(gang).state == "succeeded"
    assert scene.broker.get(gang).raw["preemptions"] == 1
    assert sorted(scene.lines()) == sorted(
        [*["began 1 from nothing", "saved 1", "began 2 from nothing", "done 2"] * 2]
    )


def test_the_item_of_a_preempted_worker_is_done_again(scene: Scene) -> None:
    script = SCRIPT.format(on_notice="", at_work="")
    command = ["/bin/sh", "-c", script, str(scene.witness)]
    array = scene.broker.submit_array(
        command, ["only"], max_parallel=1, gpu_mb=16_000, priority="background", grace_seconds=30
    )
    scene.until_at_work()
    scene.preempt()
    scene.until_at_work(attempt=2)
    scene.enough.touch()
    until(lambda: scene.broker.array(array.id).state == "succeeded", "the array has ended")
    [item] = scene.broker.array_items(array.id)
    assert (item.result, scene.lines()[-1]) == ({"exit_code": 0}, "done 2")
