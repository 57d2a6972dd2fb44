"""Worker sets on real Ray: state, calls, restarts, scaling, and what becomes of calls meanwhile."""

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gpubroker import Broker, CallFailed, WorkerSet

from tests.e2e.service_process import GIB, ServiceProcess, until
from tests.patience import PATIENCE_SECONDS

COUNTER = "tests.e2e.work:Counter"
PLAIN: dict[str, Any] = {"timeout_seconds": PATIENCE_SECONDS, "pickled": False}


def at_work(broker: Broker, workers: WorkerSet, count: int) -> WorkerSet:
    def runs() -> bool:
        return broker.worker_set(workers).states.get("running", 0) == count

    until(runs, f"{count} workers run")
    return broker.worker_set(workers)


def ended(broker: Broker, workers: WorkerSet) -> None:
    broker.end_worker_set(workers)
    until(lambda: broker.worker_set(workers).state == "over", "the set is over")
    until(lambda: list(broker.worker_sets()) == [], "it is listed no more")


def _have_begun(witness: Path, calls: int) -> bool:
    return witness.exists() and len(witness.read_text().split()) == calls


def test_set_keeps_state_follows_a_posted_number_and_ends_when_told(broker: Broker) -> None:
    class Adder:
        def __init__(self, start: int) -> None:
            self.values = {start}

        def add(self, value: int, twice: bool = False) -> Any:
            self.values |= {value, 2 * value} if twice else {value}
            return self.values, os.getpid()

        def fail(self) -> None:
            raise ValueError("no")

        def sneak(self) -> Any:
            self.values |= {max(self.values) + 1}
            return Sneak()

    class Sneak:
        def __reduce__(self) -> Any:
            sys.exit(1)

    scale = {"by": "signal", "target": 10, "down_after_seconds": 0}
    sizes: dict[str, Any] = {"profile": "rollout_worker", "cpu": 0.1}
    made = broker.create_worker_set(Adder, 1, max_count=2, scale=scale, **sizes)
    assert (made.max_concurrency, broker.get(made.id).resources.cpu) == (100, 0.1)
    handle = broker.workers(made, timeout_seconds=PATIENCE_SECONDS)
    values, pid = handle.add(5)
    assert values == {1, 5}
    assert handle.add(7, twice=True) == ({1, 5, 7, 14}, pid)
    with pytest.raises(CallFailed, match="ValueError: no") as failed:
        handle.fail()
    assert failed.value.kind == "exception"
    assert "in fail" in (failed.value.traceback or "")
    with pytest.raises(CallFailed, match="SystemExit: 1") as failed:
        handle.sneak()
    assert failed.value.kind == "exception"
    assert handle.add(1) == ({1, 5, 7, 14, 15}, pid), "it was called once"

    broker.signal_worker_set(made, 11)
    at_work(broker, made, 2)
    broker.signal_worker_set(made, 0)
    at_work(broker, made, 1)
    assert handle.add(9)[1] == pid, "the older worker stays"
    ended(broker, made)


@pytest.mark.parametrize(
    ("by", "target", "method"),
    [("calls", 1, "hold"), pytest.param("cpu", 20, "spin", marks=pytest.mark.evidence)],
)
def test_a_set_follows_the_load_that_its_workers_report(
    broker: Broker, tmp_path: Path, by: str, target: float, method: str
) -> None:
    scale = {"by": by, "target": target, "down_after_seconds": 0}
    made = broker.create_worker_set(COUNTER, max_count=2, cpu=0.1, max_concurrency=2, scale=scale)
    handle, go = broker.workers(made, **PLAIN), tmp_path / "go"
    with ThreadPoolExecutor(2) as threads:
        calls = [
            threads.submit(getattr(handle, method), str(tmp_path / "witness"), str(go)) for _ in range(2)
        ]
        try:
            at_work(broker, made, 2)
        finally:
            go.touch()
        assert [call.exception() for call in calls] == [None, None]
    ended(broker, made)


def test_a_killed_worker_is_restarted_and_the_call_it_had_is_told_as_lost(broker: Broker) -> None:
    made = broker.create_worker_set(COUNTER, 10, cpu=0.1)
    handle = broker.workers(made, **PLAIN)
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


@pytest.mark.evidence
def test_a_worker_whose_object_is_never_made_is_restarted(broker: Broker, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    made = broker.create_worker_set(
        "tests.e2e.work:HangsOnce", str(witness), gpu_mb=GIB, start_timeout_seconds=1
    )
    assert broker.workers(made, **PLAIN).pid() != int(witness.read_text())
    [worker] = broker.worker_set(made).workers
    assert (worker.attempt, worker.failures) == (2, 1)
    ended(broker, made)


def test_a_set_and_its_state_outlive_the_service(service: ServiceProcess) -> None:
    made = service.broker.create_worker_set(COUNTER, 0, cpu=0.1)
    assert service.broker.workers(made, **PLAIN).add(1) == 1
    service.kill_9()
    service.start()
    assert service.broker.workers(made, **PLAIN).add(1) == 2
    ended(service.broker, made)


def test_calls_by_round_robin_go_to_each_worker_in_turn(broker: Broker) -> None:
    made = broker.create_worker_set(COUNTER, count=3, cpu=0.1)
    handle, pids = broker.workers(made, routing="round_robin", **PLAIN), list[int]()

    def answered_by_three() -> bool:
        pids.append(handle.pid())
        return len(set(pids[-3:])) == 3

    until(answered_by_three, "three workers are ready")
    turn = pids[-3:]
    assert [handle.pid() for _ in range(6)] == [*turn, *turn]
    broker.scale_worker_set(made, 2)
    until(lambda: broker.worker_set(made).states == {"running": 2, "held": 1}, "one has left")
    one, other = (handle.pid() for _ in range(2))
    assert {one, other} < set(turn)
    assert [handle.pid() for _ in range(4)] == [one, other, one, other]
    ended(broker, made)


@pytest.mark.provokes("calls-wait")
def test_calls_that_wait_for_a_worker_that_takes_one_at_a_time_are_found(
    broker: Broker, tmp_path: Path
) -> None:
    made = broker.create_worker_set(COUNTER, cpu=0.1, name="counters")
    handle, witness, go = broker.workers(made, **PLAIN), tmp_path / "witness", tmp_path / "go"
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(handle.hold, str(witness), str(go)) for _ in range(2)]

        def said() -> list[str]:
            return [one.remedy for one in broker.diagnostics() if one.kind == "calls-wait"]

        try:
            until(lambda: bool(said()), "one call waits for the other")
            assert f"gpubroker workers scale {made.id} 2" in said()[0]
        finally:
            go.touch()
    assert len({call.result() for call in calls}) == 1
    until(lambda: not said(), "no call waits")
    ended(broker, made)


@contextmanager
def busy(broker: Broker, workers: WorkerSet, folder: Path) -> Iterator[dict[int, "Future[int]"]]:
    """Two workers that have a call each, by process; the calls end when the block does."""
    handle, witness, go = broker.workers(workers, **PLAIN), folder / "witness", folder / "go"
    pids: set[int] = set()

    def answered_by_two() -> bool:
        pids.add(handle.pid())
        return len(pids) == 2

    until(answered_by_two, "two workers are ready")
    with ThreadPoolExecutor(2) as threads:
        calls: dict[int, Future[int]] = {}
        for begun in (1, 2):
            call = threads.submit(handle.hold, str(witness), str(go))
            until(partial(_have_begun, witness, begun), "it has begun")
            calls[int(witness.read_text().split()[-1])] = call
        assert set(calls) == pids, "each went to the worker with fewer calls"
        try:
            yield calls
        finally:
            go.touch()


def goes_on_with_one(broker: Broker, workers: WorkerSet, calls: dict[int, "Future[int]"]) -> int:
    """The process of the worker that takes all new calls, while the other one has not ended its own."""
    until(lambda: broker.worker_set(workers).states.get("stopping") == 1, "one is asked to leave")
    handle = broker.workers(workers, **PLAIN)
    [stays] = {handle.pid() for _ in range(4)}
    assert not any(call.done() for call in calls.values())
    return int(stays)


def test_a_worker_that_leaves_ends_its_calls_and_new_ones_go_elsewhere(
    broker: Broker, tmp_path: Path
) -> None:
    made = broker.create_worker_set(COUNTER, count=2, cpu=0.1, max_concurrency=2)
    with busy(broker, made, tmp_path) as calls:
        broker.scale_worker_set(made, 1)
        stays = goes_on_with_one(broker, made, calls)
    assert {pid: call.result() for pid, call in calls.items()} == {pid: pid for pid in calls}
    until(lambda: broker.worker_set(made).states == {"running": 1, "held": 1}, "it has left")
    assert broker.workers(made, **PLAIN).pid() == stays
    ended(broker, made)


def test_a_preempted_worker_ends_its_calls_first_and_comes_back(broker: Broker, tmp_path: Path) -> None:
    made = broker.create_worker_set(
        COUNTER, count=2, gpu_mb=20 * GIB, max_concurrency=2, priority=10, grace_seconds=PATIENCE_SECONDS
    )
    with busy(broker, made, tmp_path) as calls:
        urgent = broker.submit("tests.e2e.work:add", 1, 2, gpu_mb=20 * GIB, priority=95)
        goes_on_with_one(broker, made, calls)
        assert broker.get(urgent).state == "pending", "the memory is still in use"
    assert {pid: call.result() for pid, call in calls.items()} == {pid: pid for pid in calls}
    assert broker.result(urgent, timeout_seconds=PATIENCE_SECONDS) == 3
    workers = at_work(broker, made, 2).workers
    assert sorted((one.attempt, one.failures) for one in workers) == [(1, 0), (2, 0)]
    [again] = [one for one in workers if one.attempt == 2]
    kinds = [
        event.kind
        for event in broker.events(again.id)
        if event.key == again.id and event.kind.startswith("worker.")
    ]
    assert kinds == ["worker.joined", "worker.left", "worker.joined"]
    ended(broker, made)


def test_roles_share_the_largest_demand_and_unhealthy_workers_restart(
    broker: Broker,
) -> None:
    """They restart after a pause."""
    judge = {"run": {"entrypoint": COUNTER, "args": [100]}, "gpu_mb": 8 * GIB}
    scorer = {"run": {"entrypoint": COUNTER}, "profile": "weight_sync"}
    made = broker.create_worker_set(
        COUNTER, gpu_mb=4 * GIB, profile="colocated", colocate_with={"judge": judge, "scorer": scorer},
        health={"method": "is_healthy", "period_seconds": 0.1, "failures": 2},
    )  # fmt: skip
    handle, other = broker.workers(made, **PLAIN), broker.workers(made, role="judge", **PLAIN)
    assert (handle.add(1), other.add(1), handle.pid() == other.pid()) == (1, 101, True)
    [held] = [holder for gpu in broker.gpus() for holder in gpu.holders]
    assert (held.id, held.gpu_mb) == (made.id, 8 * GIB)
    assert (made.max_concurrency, broker.get(made.id).resources.cpu) == (10, 1)

    handle.add(-10)
    until(lambda: broker.worker_set(made).workers[0].attempt == 2, "it is restarted")
    assert handle.add(1) == 1
    assert broker.worker_set(made).workers[0].failures == 1
    [back] = [event for event in broker.events(made.id) if event.kind == "task.requeued"]
    assert back.fields["failures"] == 1
    assert back.fields["not_before"] > back.at.isoformat()
    ended(broker, made)
