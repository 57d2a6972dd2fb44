"""The main job on real Ray: admit by memory, preempt with notice, resume from the checkpoint."""

from pathlib import Path

import pytest
from gpubroker import Broker, TaskFailed, current_task, task

from tests.e2e.service_process import until
from tests.patience import PATIENCE_SECONDS


def counted(witness: Path) -> list[int]:
    return [int(line) for line in witness.read_text(encoding="utf-8").split()] if witness.exists() else []


def test_a_victim_saves_its_work_gives_way_and_resumes(broker: Broker, tmp_path: Path) -> None:
    witnesses, enough = [tmp_path / "one", tmp_path / "two"], tmp_path / "enough"
    victims = [
        broker.submit(
            "tests.e2e.work:count",
            kwargs={"witness": str(witness), "enough": str(enough)},
            gpu_mb=16_000,
            priority="background",
            grace_seconds=20,
        )
        for witness in witnesses
    ]
    until(lambda: all(len(counted(witness)) > 5 for witness in witnesses), "both victims are at work")
    urgent = broker.submit("tests.e2e.work:add", 20, 22, gpu_mb=20_000, priority="critical")
    assert broker.result(urgent.id, timeout_seconds=PATIENCE_SECONDS) == 42
    until(lambda: all(broker.get(victim).state == "running" for victim in victims), "both are at work again")
    enough.touch()
    for victim, witness in zip(victims, witnesses, strict=True):
        steps = broker.result(victim.id, timeout_seconds=PATIENCE_SECONDS)
        assert steps == counted(witness) == list(range(len(steps)))
    assert sorted(broker.get(victim.id).raw["preemptions"] for victim in victims) == [0, 1]


def test_a_waiting_task_for_cpu_keeps_no_gpu_task_from_preempting(broker: Broker, tmp_path: Path) -> None:
    [node] = broker.nodes()
    cpu = node.cpu.total
    work = {"witness": str(tmp_path / "witness"), "until": str(tmp_path / "flag")}
    hog = broker.submit("tests.e2e.work:hold", kwargs=work, cpu=cpu, priority="background", grace_seconds=5)
    until(lambda: broker.get(hog.id).state == "running", "it has all CPUs")
    waits = broker.submit("tests.e2e.work:add", 1, 1, cpu=cpu, priority="interactive")

    def is_foreseen() -> bool:
        pending = broker.get(waits).pending
        return pending is not None and pending.start is not None

    until(is_foreseen, "it has a forecast, which reserves the node")
    urgent = broker.submit("tests.e2e.work:add", 2, 2, gpu_mb=1000, cpu=1, priority="interactive")
    assert broker.result(urgent.id, timeout_seconds=PATIENCE_SECONDS) == 4
    assert broker.get(hog).preemptions == 1
    broker.cancel(hog)
    assert broker.result(waits, timeout_seconds=PATIENCE_SECONDS) == 2


def test_a_task_that_does_not_fit_says_why_and_cancelling_it_is_immediate(
    broker: Broker, tmp_path: Path
) -> None:
    flag = tmp_path / "flag"
    work = {"witness": str(tmp_path / "witness"), "until": str(flag)}
    holders = [broker.submit("tests.e2e.work:hold", kwargs=work, gpus=1) for _ in range(2)]
    until(lambda: all(broker.get(task.id).state == "running" for task in holders), "both devices are taken")
    waiting = broker.submit("tests.e2e.work:add", 1, 1, gpu_mb=1000)
    explained = broker.explain(waiting.id)
    assert explained.reason == "WaitingForMemory"
    assert broker.cancel(waiting.id).state == "cancelled"
    for holder in holders:
        broker.cancel(holder.id)
    until(lambda: all(broker.get(task.id).state == "cancelled" for task in holders), "the holders are gone")
    until(lambda: all(gpu.leased_mb == 0 for gpu in broker.gpus()), "their memory is free")


@task(name="times", cpu=0.25)
def times(a: int, b: int) -> tuple[int, str]:
    return a * b, current_task().name


def test_a_coroutine_a_command_and_a_function_run_too(broker: Broker) -> None:
    coroutine = broker.submit("tests.e2e.work:add_later", 2, 3, cpu=0.1)
    command = broker.submit(["python3", "-c", "print('from a command')"], cpu=0.5)
    function = broker.submit(lambda a, b: {"sum": a + b}, 4, 5, cpu=0.5)
    decorated = broker.submit(times, 4, 5)
    assert broker.result(coroutine.id, timeout_seconds=PATIENCE_SECONDS) == 5
    assert broker.result(command.id, timeout_seconds=PATIENCE_SECONDS) == {"exit_code": 0}
    assert broker.result(function.id, timeout_seconds=PATIENCE_SECONDS) == {"sum": 9}
    assert broker.result(decorated.id, timeout_seconds=PATIENCE_SECONDS) == (20, "times")


def test_a_failure_comes_back_with_its_traceback_after_its_retries(broker: Broker) -> None:
    task = broker.submit("tests.e2e.work:fail", "no luck", cpu=0.1, max_retries=1)
    with pytest.raises(TaskFailed) as failed:
        broker.result(task.id, timeout_seconds=PATIENCE_SECONDS)
    assert "no luck" in str(failed.value)
    assert "ValueError" in broker.get(task.id).raw["error"]["traceback"]
    assert broker.get(task.id).raw["failures"] == 2
