"""What `GET /diagnostics` finds on real Ray, on a machine with real GPUs as far as it can tell."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpubroker.cluster.fleet import Finding

from tests.e2e.service_process import GIB, ServiceProcess, until
from tests.nvml.machine import Gpu, Machine, Process, a_library


@pytest.fixture
def machine() -> Iterator[Machine]:
    with a_library() as folder:
        yield Machine(folder, Gpu("GPU-a", 24 * GIB), Gpu("GPU-b", 24 * GIB))


@pytest.fixture
def service(tmp_path: Path, machine: Machine) -> Iterator[ServiceProcess]:
    libraries = f"{machine.folder}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    settings = {
        "ray": {"spares": 1}, "policy": {"sample_period_seconds": 0.5}, "simulated_devices": [],
        "fleet": {"idle_check_seconds": 0.5, "idle_grace_seconds": 1.0},
    }  # fmt: skip
    with ServiceProcess(tmp_path / "data", env={"LD_LIBRARY_PATH": libraries}, **settings) as service:
        yield service


def found(service: ServiceProcess, kind: str) -> list[Finding]:
    return [one for one in service.broker.diagnostics() if one.kind == kind]


def test_idle_holders_repeated_failures_and_versions_are_found(
    service: ServiceProcess, machine: Machine, tmp_path: Path
) -> None:
    broker, pid = service.broker, tmp_path / "pid"
    until(lambda: [gpu for gpu in broker.gpus() if not gpu.stale], "its GPUs are measured")
    [node] = broker.nodes()
    assert node.agent is not None
    assert {"python", "ray"} <= node.agent.keys()
    assert abs(node.agent["clock_ahead_seconds"]) < 10

    holding = ["sh", "-c", f"echo $$ > {pid}; exec sleep 600"]
    task = broker.submit(holding, gpus=1, gpu_mb=20 * GIB, name="held")
    until(lambda: pid.exists() and pid.read_text().strip(), "it runs")
    until(lambda: found(service, "gpu-held-unasked"), "it does nothing")
    [held] = found(service, "gpu-held-unasked")
    assert (held.evidence["task"], held.remedy) == (task.id, f"gpubroker cancel {task.id}")

    [leased] = [gpu.uuid for gpu in broker.gpus() if gpu.leased_mb]
    [other] = [gpu for gpu in machine.gpus if gpu.uuid != leased]
    other.compute, other.used_mb = [Process(int(pid.read_text()), 5000)], 5000
    machine.apply()
    until(lambda: found(service, "gpu-held-wrong-device"), "its process is seen on the other GPU")
    broker.cancel(task)
    other.compute, other.used_mb = [], 0
    machine.apply()
    until(lambda: not found(service, "gpu-held-wrong-device"), "nothing is held any more")

    broker.wait(broker.submit("tests.e2e.work:fail", "CUDA out of memory", name="train", max_retries=2))
    until(lambda: found(service, "out-of-memory-cuda"), "it failed three times")
    assert found(service, "out-of-memory-cuda")[0].subject == "train"
