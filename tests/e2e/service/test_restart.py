"""kill -9 in the middle of a run loses nothing and repeats nothing."""

import os
import signal
from pathlib import Path

import psutil
from gpubroker_server.adapters.ray.head.head import read_state

from tests.e2e.ray_lab import vital_pid
from tests.e2e.service_process import ServiceProcess, until
from tests.patience import PATIENCE_SECONDS


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def is_dead(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def assert_ledger_is_empty(service: ServiceProcess) -> None:
    until(lambda: all(gpu.leased_mb == 0 for gpu in service.broker.gpus()), "every lease is released")


def test_a_run_survives_kill_9_of_the_main_process(service: ServiceProcess, tmp_path: Path) -> None:
    witness, flag = tmp_path / "witness", tmp_path / "flag"
    broker = service.broker
    work = {"witness": str(witness), "until": str(flag)}
    running = broker.submit("tests.e2e.work:hold", kwargs=work, gpu_mb=20_000)
    other = broker.submit("tests.e2e.work:hold", kwargs=work, gpu_mb=20_000)
    waiting = broker.submit("tests.e2e.work:hold", kwargs=work, gpu_mb=20_000)
    finished = broker.submit("tests.e2e.work:add", 2, 3, cpu=0.1)
    assert broker.result(finished.id) == 5
    until(lambda: len(lines(witness)) == 2, "two runs have begun")

    service.kill_9()
    flag.touch()
    service.start()

    broker = service.broker
    for task in (running, other, waiting):
        assert broker.result(task.id, timeout_seconds=PATIENCE_SECONDS) == 1
    assert len(lines(witness)) == 3
    assert broker.result(finished.id) == 5
    assert_ledger_is_empty(service)


def test_a_run_survives_kill_9_of_the_ray_driver(service: ServiceProcess, tmp_path: Path) -> None:
    witness, flag = tmp_path / "witness", tmp_path / "flag"
    broker = service.broker
    work = {"witness": str(witness), "until": str(flag)}
    running = broker.submit("tests.e2e.work:hold", kwargs=work, gpu_mb=20_000)
    until(lambda: len(lines(witness)) == 1, "the run has begun")

    driver = service.driver()
    driver.kill()
    until(lambda: is_dead(driver), "the driver is dead")
    flag.touch()

    assert broker.result(running.id, timeout_seconds=PATIENCE_SECONDS) == 1
    after = broker.submit("tests.e2e.work:add", 1, 1, cpu=0.1)
    assert broker.result(after.id, timeout_seconds=PATIENCE_SECONDS) == 2
    assert len(lines(witness)) == 1
    assert_ledger_is_empty(service)


def test_run_whose_head_lost_its_raylet_resumes_and_uses_no_retry(
    service: ServiceProcess, tmp_path: Path
) -> None:
    """It goes on where its notice came."""
    witness, enough = tmp_path / "witness", tmp_path / "enough"
    work = {"witness": str(witness), "enough": str(enough)}
    broker = service.broker
    task = broker.submit("tests.e2e.work:count", kwargs=work, gpu_mb=20_000, max_retries=0)
    until(lambda: len(lines(witness)) > 3, "the run is at work")

    raylet = vital_pid(read_state(service.data_dir), "raylet")
    assert raylet is not None
    os.kill(raylet, signal.SIGKILL)
    until(lambda: broker.get(task.id).attempt == 2, "it starts again on the next head")
    enough.touch()

    steps = broker.result(task.id, timeout_seconds=PATIENCE_SECONDS)
    assert lines(witness) == list(map(str, steps)) == list(map(str, range(len(steps))))
    assert broker.get(task.id).failures == 0
    assert "the local Ray head lost raylet" in service.log()
    assert_ledger_is_empty(service)


def test_memory_is_not_promised_twice_while_a_run_outlives_the_service(
    service: ServiceProcess, tmp_path: Path
) -> None:
    witness, flag = tmp_path / "witness", tmp_path / "flag"
    work = {"witness": str(witness), "until": str(flag)}
    for _ in range(2):
        service.broker.submit("tests.e2e.work:hold", kwargs=work, gpu_mb=20_000)
    until(lambda: len(lines(witness)) == 2, "both devices are taken")

    service.kill_9()
    service.start()

    broker = service.broker
    third = broker.submit("tests.e2e.work:hold", kwargs=work, gpu_mb=20_000)
    assert broker.explain(third.id).reason == "WaitingForMemory"
    assert [gpu.leased_mb for gpu in broker.gpus()] == [20_000, 20_000]
    assert len(lines(witness)) == 2
    flag.touch()
    assert broker.result(third.id, timeout_seconds=PATIENCE_SECONDS) == 1
