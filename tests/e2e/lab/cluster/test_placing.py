"""Where tasks go on real Ray with GPUs of several kinds."""

from pathlib import Path
from typing import Any

import pytest
from gpubroker import Broker, Refused, Task

from tests.e2e.service_process import GIB, until
from tests.patience import PATIENCE_SECONDS


def small(broker: Broker, **where: Any) -> Task:
    """A task for 4 GiB of such a GPU."""
    return broker.submit("tests.e2e.work:add", 1, 1, gpu_mb=4096, **where)


def kind_of(broker: Broker, task: Task) -> str:
    """The kind of GPU on which it ran."""
    ended = broker.wait(task, timeout_seconds=PATIENCE_SECONDS)
    assert ended.state == "succeeded", ended.error
    (made,) = [event for event in broker.events(task) if event.kind == "lease.reserved"]
    return next(gpu.kind for gpu in broker.gpus() if gpu.key == made.fields["device"])


def test_tasks_run_on_the_kinds_sizes_and_nodes_that_they_ask_for(cluster: Broker) -> None:
    broker = cluster
    wanted: list[tuple[dict[str, Any], str]] = [
        ({"kinds": ["sim-small"]}, "sim-small"),
        ({"kinds": ["sim-big"], "nodes": {"node": ["n2"]}}, "sim-big"),
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


def test_a_node_with_settings_of_its_own_offers_what_they_say(cluster: Broker) -> None:
    nodes = {node.name: node for node in cluster.nodes()}
    reserves = {
        (gpu.node == "n2", gpu.kind): gpu.reserve_mb
        for gpu in cluster.gpus()
        if gpu.kind in ("sim-small", "sim-big")
    }
    assert nodes["n2"].memory_mb.total == 4096
    assert reserves == {(True, "sim-small"): 0, (True, "sim-big"): 2048} | {
        (False, "sim-small"): 0,
        (False, "sim-big"): 0,
    }
    with pytest.raises(Refused):
        cluster.submit("tests.e2e.work:add", 1, 2, gpu_mb=79 * GIB, nodes={"node": ["n2"]})


def test_a_wish_gives_way_and_a_requirement_waits(cluster: Broker, tmp_path: Path) -> None:
    broker, flag, there = cluster, tmp_path / "flag", {"node": ["n2"]}
    wait = ["sh", "-c", f"until [ -e {flag} ]; do sleep 0.02; done"]
    holder = broker.submit(wait, gpus=1, kinds=["sim-big"], nodes=there)
    until(lambda: broker.get(holder).state == "running", "the large GPU is taken")
    assert kind_of(broker, small(broker, prefer_kinds=["sim-big", "sim-small"], nodes=there)) == "sim-small"
    patient = small(broker, min_device_mb=30 * GIB, nodes=there)
    until(
        lambda: (
            (told := broker.get(patient)).pending is not None and told.pending.reason == "WaitingForMemory"
        ),
        "it says what it waits for",
    )
    flag.touch()
    assert broker.wait(patient, timeout_seconds=PATIENCE_SECONDS).state == "succeeded"
