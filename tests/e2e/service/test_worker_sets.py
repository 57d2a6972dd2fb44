"""Worker sets on real Ray: state, calls, restarts, scaling, and what becomes of calls meanwhile."""

import os
import signal
from typing import Any

import pytest
from gpubroker import Broker, CallFailed, WorkerSet

from tests.e2e.service_process import ServiceProcess, until
from tests.patience import PATIENCE_SECONDS

COUNTER = "tests.e2e.work:Counter"


def at_work(broker: Broker, workers: WorkerSet, count: int) -> WorkerSet:
    def runs() -> bool:
        return broker.worker_set(workers).states.get("running", 0) == count

    until(runs, f"{count} workers run")
    return broker.worker_set(workers)


def ended(broker: Broker, workers: WorkerSet) -> None:
    broker.end_worker_set(workers)
    until(lambda: broker.worker_set(workers).state == "over", "the set is over")
    assert broker.worker_sets() == []


def test_a_set_keeps_state_scales_and_is_over_when_it_is_ended(broker: Broker) -> None:
    class Adder:
        def __init__(self, start: int) -> None:
            self.values = {start}

        def add(self, value: int, twice: bool = False) -> Any:
            self.values |= {value, 2 * value} if twice else {value}
            return self.values, os.getpid()

        def fail(self) -> None:
            raise ValueError("no")

    made = broker.create_worker_set(Adder, 1, count=1, max_count=2, cpu=0.1, max_concurrency=4)
    handle = broker.workers(made, timeout_seconds=PATIENCE_SECONDS)
    values, pid = handle.add(5)
    assert values == {1, 5}
    assert handle.add(7, twice=True) == ({1, 5, 7, 14}, pid)
    with pytest.raises(CallFailed, match="ValueError: no") as failed:
        handle.fail()
    assert failed.value.kind == "exception"
    assert "in fail" in (failed.value.traceback or "")

    broker.scale_worker_set(made, 2)
    at_work(broker, made, 2)
    broker.scale_worker_set(made, 1)
    at_work(broker, made, 1)
    assert handle.add(9)[1] == pid, "the older worker stays"
    ended(broker, made)


def test_a_killed_worker_is_restarted_and_the_call_it_had_is_told_as_lost(broker: Broker) -> None:
    made = broker.create_worker_set(COUNTER, 10, cpu=0.1)
    handle = broker.workers(made, timeout_seconds=PATIENCE_SECONDS, pickled=False)
    assert handle.add(1) == 11
    pid = handle.pid()
    with pytest.raises(CallFailed) as lost:
        handle.crash()
    assert lost.value.code == "worker-lost"
    assert handle.add(2) == 12, "a new object, after a pause"
    assert handle.pid() != pid
    os.kill(handle.pid(), signal.SIGKILL)
    until(lambda: broker.worker_set(made).workers[0].attempt == 3, "it is restarted")
    assert handle.add(3) == 13
    ended(broker, made)


def test_a_set_and_its_state_outlive_the_service(service: ServiceProcess) -> None:
    made = service.broker.create_worker_set(COUNTER, 0, cpu=0.1)
    options: dict[str, Any] = {"timeout_seconds": PATIENCE_SECONDS, "pickled": False}
    assert service.broker.workers(made, **options).add(1) == 1
    service.kill_9()
    service.start()
    assert service.broker.workers(made, **options).add(1) == 2
    ended(service.broker, made)
