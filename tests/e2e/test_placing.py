"""Where tasks go on real Ray with simulated GPUs of two kinds, and a run that moves so that another fits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpubroker import Broker, Refused, Task

from tests.e2e.service_process import GIB, ServiceProcess, until

TWO_KINDS = [
    {"kind": "sim-small", "memory_mb": 24 * GIB, "count": 1},
    {"kind": "sim-big", "memory_mb": 80 * GIB, "count": 1},
]


@pytest.fixture
def two_kinds(tmp_path: Path) -> Iterator[Broker]:
    kinds = {"sim-small": {"power": 1}, "sim-big": {"power": 5}}
    with ServiceProcess(tmp_path / "data", simulated_devices=TWO_KINDS, kinds=kinds) as running:
        yield running.broker


def small(broker: Broker, **where: Any) -> Task:
    """A task for 4 GiB of such a GPU."""
    return broker.submit("tests.e2e.work:add", 1, 1, gpu_mb=4096, **where)


def kind_of(broker: Broker, task: Task) -> str:
    """The kind of GPU on which it ran."""
    ended = broker.wait(task, timeout_seconds=60)
    assert ended.state == "succeeded", ended.error
    (made,) = [event for event in broker.events(task) if event.kind == "lease.reserved"]
    return next(gpu.kind for gpu in broker.gpus() if gpu.key == made.fields["device"])


def test_tasks_run_on_the_kinds_sizes_and_nodes_that_they_ask_for(two_kinds: Broker) -> None:
    broker = two_kinds
    (node,) = broker.nodes()
    wanted: list[tuple[dict[str, Any], str]] = [
        ({"kinds": ["sim-small"]}, "sim-small"),
        ({"kinds": ["sim-big"], "nodes": {"node": [node.name]}}, "sim-big"),
        ({"min_power": 2}, "sim-big"),
        ({"min_device_mb": 30 * GIB}, "sim-big"),
        ({"prefer_kinds": ["sim-big"]}, "sim-big"),
        ({"prefer_kinds": ["sim-small", "sim-big"]}, "sim-small"),
        ({"kinds": ["sim-small"], "prefer_nodes": {"node": ["elsewhere"]}}, "sim-small"),
    ]
    tasks = [small(broker, **where) for where, _ in wanted]
    assert [kind_of(broker, task) for task in tasks] == [kind for _, kind in wanted]
    for impossible in (
        {"min_power": 6},
        {"min_device_mb": 81 * GIB},
        {"kinds": ["sim-small"], "min_power": 2},
    ):
        with pytest.raises(Refused):
            small(broker, **impossible)


def test_a_wish_gives_way_and_a_requirement_waits(two_kinds: Broker, tmp_path: Path) -> None:
    broker, flag = two_kinds, tmp_path / "flag"
    wait = ["sh", "-c", f"until [ -e {flag} ]; do sleep 0.02; done"]
    holder = broker.submit(wait, gpus=1, kinds=["sim-big"])
    until(lambda: broker.get(holder).state == "running", "the large GPU is taken")
    assert kind_of(broker, small(broker, prefer_kinds=["sim-big"])) == "sim-small"
    patient = small(broker, min_device_mb=30 * GIB)
    until(
        lambda: (
            (told := broker.get(patient)).pending is not None and told.pending.reason == "WaitingForMemory"
        ),
        "it says what it waits for",
    )
    flag.touch()
    assert broker.wait(patient, timeout_seconds=60).state == "succeeded"


def placed(broker: Broker) -> dict[str, list[str]]:
    """The runs on each GPU."""
    return {gpu.key: sorted(holder.id for holder in gpu.holders) for gpu in broker.gpus()}


def test_a_run_moves_to_another_gpu_with_its_checkpoint_so_that_a_large_task_fits(tmp_path: Path) -> None:
    policy = {"consolidation": 10, "sample_period_seconds": 0.2}
    with ServiceProcess(tmp_path / "data", policy=policy) as service:
        broker = service.broker

        def counting(name: str) -> Task:
            steps = 900
            arguments = str(tmp_path / name), steps
            return broker.submit("tests.e2e.work:count", *arguments, gpu_mb=10 * GIB, name=name)

        runs = [counting(name) for name in "abc"]
        until(lambda: sorted(map(len, placed(broker).values())) == [1, 2], "three runs are on two GPUs")
        two = max(placed(broker).values(), key=len)
        broker.cancel(two[0])
        broker.wait(two[0], timeout_seconds=30)
        left = [run.id for run in runs if run.id != two[0]]

        large = broker.submit("tests.e2e.work:add", 20, 22, gpus=1, name="large")
        assert broker.result(large, timeout_seconds=60) == 42
        (moved,) = [task for task in map(broker.get, left) if task.preemptions]
        notice = next(event for event in broker.events(moved) if event.kind == "task.stopping")
        assert (notice.fields["stop_reason"], notice.fields["freeing_for"]) == ("move", large.id)
        for run in left:
            assert broker.result(run, timeout_seconds=60) == list(range(900))
        steps = (tmp_path / moved.name).read_text().split()
        assert steps == [str(step) for step in range(900)], "no step was lost, and none done twice"
