"""What `GET /diagnostics` finds on real Ray, on a machine with real GPUs as far as it can tell."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from gpubroker.wire.fleet import Finding

from tests.e2e.service_process import GIB, ServiceProcess, until
from tests.nvml.machine import Gpu, Machine, Process, a_library

QUICK = {"sample_period_seconds": 0.5, "retry_first_seconds": 0.1}


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with a_library() as folder:
        yield Machine(folder, Gpu("GPU-a", 24 * GIB), Gpu("GPU-b", 24 * GIB))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, machine: Machine) -> Iterator[ServiceProcess]:
    libraries = f"{machine.folder}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    settings: dict[str, Any] = {
        "ray": {"spares": 1}, "policy": QUICK, "simulated_devices": [],
        "fleet": {"idle_check_seconds": 0.5, "idle_grace_seconds": 1.0},
    }  # fmt: skip
    home = tmp_path_factory.mktemp("findings") / "data"
    with ServiceProcess(home, env={"LD_LIBRARY_PATH": libraries}, **settings) as service:
        yield service


COMPUTES = f"for i in $(seq {os.cpu_count()}); do while :; do :; done & done; wait"
"""On each CPU."""
TAKES_MEMORY = "taken = b'x' * 2**{}; import time; time.sleep(600)"


def kinds(service: ServiceProcess) -> set[str]:
    return {one.kind for one in service.broker.diagnostics()}


def found(service: ServiceProcess, kind: str) -> list[Finding]:
    return [one for one in service.broker.diagnostics() if one.kind == kind]


@pytest.mark.provokes("gpu-held-unasked", "gpu-held-wrong-device", "gpu-held-on-cpu", "cpu-bottleneck")
def test_a_gpu_that_is_held_and_not_used_is_found_with_its_cause(
    service: ServiceProcess, machine: Machine, tmp_path: Path
) -> None:
    broker, pid = service.broker, tmp_path / "pid"
    until(lambda: [gpu for gpu in broker.gpus() if not gpu.stale], "its GPUs are measured")
    [node] = broker.nodes()
    assert node.agent is not None
    assert node.agent.python
    assert node.agent.ray
    assert isinstance(node.agent.clock_ahead_seconds, int)
    assert abs(node.agent.clock_ahead_seconds) < 10

    with broker.lease(gpu_mb=20 * GIB, holder="a notebook") as lease:
        until(lambda: found(service, "gpu-held-unasked"), "it does nothing")
        [held] = found(service, "gpu-held-unasked")
        assert (held.evidence["task"], held.remedy) == (lease.id, f"gpubroker lease release {lease.id}")

    compute = tmp_path / "compute"
    holding = ["sh", "-c", f"echo $$ > {pid}; while [ ! -e {compute} ]; do sleep 0.1; done; {COMPUTES}"]
    task = broker.submit(holding, gpus=1, gpu_mb=20 * GIB, name="held")
    until(lambda: pid.exists() and pid.read_text().strip(), "it runs")
    [leased] = [gpu.uuid for gpu in broker.gpus() if gpu.leased_mb]
    [other] = [gpu for gpu in machine.gpus if gpu.uuid != leased]
    other.compute, other.used_mb = [Process(int(pid.read_text()), 5000)], 5000
    machine.apply()
    until(lambda: found(service, "gpu-held-wrong-device"), "its process is seen on the other GPU")
    other.compute, other.used_mb = [], 0
    machine.apply()

    compute.touch()
    until(lambda: found(service, "gpu-held-on-cpu"), "it computes without its GPU")
    until(lambda: found(service, "cpu-bottleneck"), "and takes all CPUs of the node")
    broker.cancel(task)
    until(lambda: not kinds(service) & {"gpu-held-on-cpu", "cpu-bottleneck"}, "nothing is held any more")


@pytest.mark.provokes("out-of-memory-cuda", "out-of-memory-host")
def test_what_ran_out_of_memory_three_times_is_told_apart(service: ServiceProcess) -> None:
    broker = service.broker
    again: dict[str, Any] = {"max_retries": 2}
    message = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.99 GiB"
    broker.submit("tests.e2e.work:fail_as", "OutOfMemoryError", message, name="train", **again)
    broker.submit([sys.executable, "-c", TAKES_MEMORY.format(28)], memory_mb=64, name="load", **again)
    until(lambda: kinds(service) >= {"out-of-memory-cuda", "out-of-memory-host"}, "both failed three times")
    subjects = [found(service, f"out-of-memory-{memory}")[0].subject for memory in ("cuda", "host")]
    assert subjects == ["train", "load"]


@pytest.mark.evidence
@pytest.mark.provokes("out-of-memory-node")
def test_runs_killed_by_rays_memory_monitor_differ_from_oversized_ones(tmp_path: Path) -> None:
    """Ray takes the node for full 3 GiB from where it stands; other programs must not take that meanwhile."""
    memory = psutil.virtual_memory()
    full = (memory.total - memory.available + 3 * 2**30) / memory.total
    env = {"RAY_memory_usage_threshold": f"{full:.4f}", "RAY_memory_monitor_refresh_ms": "100"}
    ray = {"spares": 0, "warm_runners": 0, "inherit_env": [*env]}
    with ServiceProcess(tmp_path / "data", env=env, ray=ray, policy=QUICK) as service:
        service.broker.submit("tests.e2e.work:take", 4 * 1024, name="load", max_retries=2)
        until(lambda: found(service, "out-of-memory-node"), "Ray has killed it three times")
        assert found(service, "out-of-memory-node")[0].subject == "load"
