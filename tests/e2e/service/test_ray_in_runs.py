"""Runs get no access to the service's own Ray: neither its token nor its address, nor by what is on disk."""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpubroker import Broker
from gpubroker_server.adapters.ray.head.head import HeadState, read_state

from tests.e2e.service_process import ServiceProcess, until
from tests.patience import PATIENCE_SECONDS

PROGRAM = """
import json, os, sys
os.environ["RAY_TMPDIR"], told, address = sys.argv[1:4]  # where somebody's cluster has left its address
import ray
ray.init(address=address or None, include_dashboard=False, object_store_memory=80 * 2**20)
@ray.remote
def add(a, b):
    return a + b
seen = {"sum": ray.get(add.remote(1, 2)), "address": ray.get_runtime_context().gcs_address}
seen["nodes"] = [node["NodeID"] for node in ray.nodes()]
resources = ray.cluster_resources()
seen["cpus"], seen["gpus"] = resources.get("CPU"), resources.get("GPU")
seen["token"] = os.environ["RAY_AUTH_TOKEN"]
ray.shutdown()
json.dump(seen, open(told, "w"))
"""


@pytest.fixture
def head(service: ServiceProcess) -> HeadState:
    state = read_state(service.data_dir)
    assert state is not None
    return state


NOBODY = "127.0.0.1:1"
"""The address of a cluster that is over."""


@pytest.fixture
def ray_tmpdir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gpb-", dir="/tmp") as folder:  # the paths of sockets are short
        (Path(folder) / "ray").mkdir()
        yield Path(folder)


def check_variables(seen: dict[str, dict[str, str]], service: ServiceProcess, head: HeadState) -> None:
    secret = (service.data_dir / "ray-token").read_text().strip()
    for place, env in seen.items():
        assert secret not in str(env), place
        assert head.address not in str(env), place
        assert "RAY_AUTH_TOKEN_PATH" not in env, place
    assert seen["used"].keys() >= {"RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"}
    assert seen["used"]["RAY_ADDRESS"] == seen["of a child"]["RAY_ADDRESS"] == "local"
    assert seen["of a child"].keys() <= {"RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"}
    assert seen["shown"] == {}


def check_refusals(seen: dict[str, str]) -> None:
    assert len(seen) == 8
    for way, said in seen.items():
        assert said.startswith("NoRayForRuns: this function runs in a process of the service's own Ray"), way
        assert "submit a command" in said


@pytest.mark.parametrize("cpu", [0.1, 1], ids=["in a shared process", "in its own"])
def test_a_function_is_refused_ray_at_once_with_a_sentence(
    broker: Broker, service: ServiceProcess, head: HeadState, cpu: float
) -> None:
    task = broker.submit("tests.e2e.work:want_ray", cpu=cpu)
    check_refusals(broker.result(task, timeout_seconds=PATIENCE_SECONDS))
    task = broker.submit("tests.e2e.work:variables_of_ray", cpu=cpu)
    check_variables(broker.result(task, timeout_seconds=PATIENCE_SECONDS), service, head)


def test_pickled_functions_ranks_items_and_set_workers_are_refused_too(
    broker: Broker, service: ServiceProcess, head: HeadState
) -> None:
    def both(*_item: Any) -> Any:
        from tests.e2e.work import variables_of_ray, want_ray

        return want_ray(), variables_of_ray()

    pickled = broker.submit(both, cpu=1)
    # Ranks and worker fit on two CPUs together: the set's worker must not keep the gang waiting for ever.
    gang = broker.submit(both, bundles=[{"count": 2, "cpu": 0.5}])
    workers = broker.create_worker_set("tests.e2e.work:WantsRay", cpu=0.1)
    handle = broker.workers(workers, timeout_seconds=PATIENCE_SECONDS, pickled=False)
    told = [broker.result(task, timeout_seconds=PATIENCE_SECONDS) for task in (pickled, gang)]
    told += broker.map(both, [1], cpu=0.1)
    told.append((handle.want_ray(), handle.variables_of_ray()))
    broker.end_worker_set(workers)
    assert len(told) == 4
    for refused, variables in told:
        check_refusals(refused)
        check_variables(variables, service, head)


@pytest.mark.parametrize(("address", "is_stale"), [("", False), ("", True), ("auto", False)])
def test_command_gets_its_own_ray_beside_a_live_or_stale_cluster_file(
    broker: Broker,
    service: ServiceProcess,
    head: HeadState,
    ray_tmpdir: Path,
    tmp_path: Path,
    address: str,
    is_stale: bool,
) -> None:
    """Its Ray has the CPUs and GPUs of the run, and ends with it."""
    (ray_tmpdir / "ray" / "ray_current_cluster").write_text(NOBODY if is_stale else head.address)
    told = tmp_path / "told"
    command = [sys.executable, "-c", PROGRAM, str(ray_tmpdir), str(told), address]
    task = broker.submit(command, cpu=1, gpu_mb=1024, timeout_seconds=PATIENCE_SECONDS)
    ended = broker.wait(task, timeout_seconds=PATIENCE_SECONDS)
    assert ended.state == "succeeded", broker.outcome(task)
    seen = json.loads(told.read_text())
    assert (seen["sum"], seen["cpus"], seen["gpus"]) == (3, 1, 1)
    assert seen["address"] not in (head.address, NOBODY)
    assert len(seen["nodes"]) == 1
    assert seen["token"] != (service.data_dir / "ray-token").read_text().strip()
    until(lambda: not left_of(ray_tmpdir), "nothing of its Ray is left")


def left_of(folder: Path) -> list[str]:
    """Processes that were told this directory."""
    lines = (path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())
    return [line.decode(errors="replace") for line in lines if str(folder).encode() in line]
