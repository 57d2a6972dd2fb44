"""Commands that ask for a Ray cluster of their own: of exactly what they lease, gone with the task."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from gpubroker import Broker, Refused, Task
from gpubroker_server.adapters.ray.processes import process_table

from tests.e2e.service_process import ServiceProcess, until
from tests.e2e.work import lines_of
from tests.patience import PATIENCE_SECONDS

RAY_SECONDS = 4 * PATIENCE_SECONDS
"""A busy machine takes a minute to start a node of Ray."""

PROGRAM = """
import json, os, sys, time
import ray
from ray.util.placement_group import placement_group

ray.init("auto" if "auto" in sys.argv else None)

@ray.remote(num_gpus=1, num_cpus=0)
class Holder:
    def told(self):
        return os.environ["CUDA_VISIBLE_DEVICES"], os.environ.get("COLOUR"), os.environ["GPUBROKER_TASK"]

gpus = int(ray.cluster_resources().get("GPU", 0))
holders = [Holder.options(lifetime="detached", name=f"holder-{n}").remote() for n in range(gpus)]
told = ray.get([holder.told.remote() for holder in holders])
group = placement_group([{"CPU": 1}] * len(ray.nodes()), strategy="STRICT_SPREAD")
ray.get(group.ready())
seen = {"resources": ray.cluster_resources(), "told": told, "nodes": len(ray.nodes()), "pid": os.getpid()}
seen["rank"] = os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["RAY_ADDRESS"]
json.dump(seen, open(sys.argv[1], "w"))
"""

STAYS = """
import os, signal, sys, time
import ray

ray.init()

@ray.remote
class Counter:
    count = 0
    def add(self):
        self.count += 1
        return self.count

counter = Counter.options(scheduling_strategy="SPREAD").remote()

def save(*_):
    with open(sys.argv[1], "a") as witness:
        witness.write(f"saved {ray.get(counter.add.remote())}\\n")
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
with open(sys.argv[1], "a") as witness:
    count, attempt = ray.get(counter.add.remote()), os.environ["GPUBROKER_ATTEMPT"]
    witness.write(f"{count} nodes={len(ray.nodes())} {attempt}\\n")
while "stay" in sys.argv or os.environ["GPUBROKER_ATTEMPT"] == "1":
    time.sleep(0.05)
"""

ELASTIC = """
import os, sys, time
import ray

ray.init()
seen = 0
while not os.path.exists(sys.argv[2]):
    nodes = sum(node["Alive"] for node in ray.nodes())
    if nodes != seen:
        seen = nodes
        with open(sys.argv[1], "a") as witness:
            witness.write(f"{nodes}\\n")
    time.sleep(0.1)
"""


def submit(broker: Broker, program: str, *words: Any, **options: Any) -> Task:
    command = [sys.executable, "-c", program, *map(str, words)]
    options = {"timeout_seconds": RAY_SECONDS, "ray": True, **options}
    return broker.submit(command, **options)


def ended_well(broker: Broker, task: Task) -> None:
    ended = broker.wait(task, timeout_seconds=RAY_SECONDS)
    assert ended.state == "succeeded", why(broker, task)


def why(broker: Broker, task: Task) -> str:
    outcome = broker.outcome(task)
    return f"{outcome.error and outcome.error.message}\n{outcome.log_tail}"


def processes_of(task: Task) -> list[int]:
    """Return the processes with the task's mark, whoever their parent is."""
    mark = f"GPUBROKER_TASK={task.id}".encode()
    found = []
    for pid in process_table():
        try:
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
        except OSError:
            pass
    return found


def directories() -> Sequence[Path]:
    return list(Path("/tmp").glob("gpr-*"))


def is_over(broker: Broker, task: Task) -> bool:
    return not processes_of(task) and all(gpu.leased_mb == 0 for gpu in broker.gpus())


def test_command_is_the_driver_of_a_cluster_of_what_it_leases(
    broker: Broker, service: ServiceProcess, tmp_path: Path
) -> None:
    before = set(directories())
    told = tmp_path / "told"
    options: dict[str, Any] = {
        "cpu": 1,
        "gpus": 2,
        "gpu_mb": 4096,
        "memory_mb": 4096,
        "env": {"COLOUR": "red"},
    }
    task = submit(broker, PROGRAM, told, **options)
    ended_well(broker, task)
    seen = json.loads(told.read_text())
    resources = seen["resources"]
    assert (resources["CPU"], resources["GPU"], seen["nodes"]) == (1, 2, 1)
    assert resources["object_store_memory"] == int(0.3 * 4096) * 2**20
    assert resources["memory"] == (4096 - int(0.3 * 4096) - 512) * 2**20
    uuids = {gpu.uuid for gpu in broker.gpus()}
    assert {visible for visible, _, _ in seen["told"]} == uuids
    assert {(colour, id) for _, colour, id in seen["told"]} == {("red", task.id)}
    assert seen["rank"][:2] == ["0", "1"]
    assert seen["rank"][2].startswith("127.0.0.1:")
    until(lambda: is_over(broker, task), "nothing is left, detached actors included")
    until(lambda: set(directories()) <= before, "its directory is removed")


def test_gang_is_one_cluster_with_a_node_per_rank_and_one_driver(broker: Broker, tmp_path: Path) -> None:
    told = tmp_path / "told"
    bundles = [{"cpu": 1, "gpus": 1}, {"cpu": 1, "gpus": 1}]
    task = submit(broker, PROGRAM, told, "auto", bundles=bundles)
    ended_well(broker, task)
    seen = json.loads(told.read_text())
    assert (seen["resources"]["CPU"], seen["resources"]["GPU"], seen["nodes"]) == (2, 2, 2)
    assert len({visible for visible, _, _ in seen["told"]}) == 2, "each node has the GPU of its rank"
    until(lambda: is_over(broker, task), "nothing is left of any rank")


def test_preempted_gang_saves_its_work_with_all_nodes_and_resumes(broker: Broker, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    witness.touch()
    bundles = [{"cpu": 1, "gpu_mb": 4096}, {"cpu": 1, "gpu_mb": 4096}]
    task = submit(broker, STAYS, witness, bundles=bundles, priority="batch", grace_seconds=120)
    until(lambda: lines_of(str(witness)) == ["1 nodes=2 1"], "the driver works with both nodes", RAY_SECONDS)
    urgent = broker.submit("tests.e2e.work:add", 1, 2, gpus=2, priority="critical")
    assert broker.result(urgent, timeout_seconds=RAY_SECONDS) == 3
    ended_well(broker, task)
    assert lines_of(str(witness)) == ["1 nodes=2 1", "saved 2", "1 nodes=2 2"]
    assert broker.get(task).preemptions == 1
    until(lambda: is_over(broker, task), "nothing is left of any rank")


def test_ranks_that_leave_and_join_are_nodes_that_leave_and_join(broker: Broker, tmp_path: Path) -> None:
    witness, done = tmp_path / "witness", tmp_path / "done"
    witness.touch()
    bundles = [{"count": 2, "cpu": 1, "gpus": 1}]
    options: dict[str, Any] = {"bundles": bundles, "min_ranks": 1, "grace_seconds": RAY_SECONDS}
    task = submit(broker, ELASTIC, witness, done, priority="batch", **options)
    until(lambda: lines_of(str(witness)) == ["2"], "the driver sees both nodes", RAY_SECONDS)
    urgent = broker.submit(["sleep", "600"], gpus=1, priority="critical", grace_seconds=0)
    until(lambda: lines_of(str(witness)) == ["2", "1"], "one node has left", RAY_SECONDS)
    until(lambda: broker.get(urgent).state == "running", "its GPU is used", RAY_SECONDS)
    broker.cancel(urgent)
    until(lambda: lines_of(str(witness)) == ["2", "1", "2"], "another one has joined", RAY_SECONDS)
    done.touch()
    ended_well(broker, task)
    assert (broker.get(task).attempt, broker.get(task).preemptions) == (1, 0)
    until(lambda: is_over(broker, task), "nothing is left of any rank")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cpu": 0.5}, "Ray counts whole CPUs"),
        ({"memory_mb": 100}, "a node of Ray needs 1024 MiB"),
        ({"bundles": [{"cpu": 1}, {"cpu": 1.5}]}, "/resources/bundles/1/cpu"),
    ],
)
def test_resources_that_no_cluster_can_have_are_refused(
    broker: Broker, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(Refused, match=said):
        submit(broker, STAYS, **options)


def test_function_cannot_be_the_driver_of_a_private_cluster(broker: Broker) -> None:
    with pytest.raises(Refused, match="submit a command"):
        broker.submit("tests.e2e.work:add", 1, 2, ray=True)


def test_program_without_ray_beside_it_fails_with_a_sentence(broker: Broker) -> None:
    task = broker.submit(["/usr/bin/env", "true"], ray=True, env={"PATH": "/usr/bin"})
    ended = broker.wait(task, timeout_seconds=RAY_SECONDS)
    assert ended.state == "failed"
    assert "install Ray into the Python of the command" in why(broker, task)
