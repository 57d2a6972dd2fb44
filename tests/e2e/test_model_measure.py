"""A model is measured with a real Triton, on a GPU that NVIDIA's library tells of: its stand-in, where the
model's process has as much memory as the largest request had values."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from gpubroker import Refused

from tests.e2e.service_process import GIB, ServiceProcess, until
from tests.nvml.machine import Gpu, Machine, Process, a_library
from tests.triton.server import Triton

LOADED_MB = 4096
VALUE_MB = 16
"""For each value of the largest request."""


@pytest.fixture
def machine() -> Iterator[Machine]:
    with a_library() as folder:
        yield Machine(folder, Gpu("GPU-a", 24 * GIB))


@contextmanager
def its_memory(machine: Machine, triton: Triton, told: Path) -> Iterator[None]:
    """The GPU shows what the model has, as soon as it has it."""
    is_over = threading.Event()
    [gpu] = machine.gpus

    def follow() -> None:
        while not is_over.wait(0.01):
            try:
                mb = LOADED_MB + VALUE_MB * int(told.read_text())
            except FileNotFoundError:
                mb = 0
            if mb != gpu.used_mb:
                gpu.used_mb = mb
                gpu.compute = [Process(triton.pid, mb)] if mb else []
                machine.apply()

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.fixture
def triton(tmp_path: Path) -> Iterator[Triton]:
    with Triton(tmp_path / "triton") as running:
        yield running


@pytest.fixture
def service(tmp_path: Path, machine: Machine, triton: Triton) -> Iterator[ServiceProcess]:
    libraries = f"{machine.folder}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    server = {
        "name": "main", "http_url": triton.url, "grpc_url": f"http://127.0.0.1:{triton.grpc_port}",
        "node": "local", "repository": str(triton.repository),
    }  # fmt: skip
    settings: dict[str, Any] = {
        "ray": {"spares": 0, "node_name": "local"},
        "policy": {"sample_period_seconds": 0.25},
        "simulated_devices": [],
        "triton": {"servers": [server]},
    }
    told = triton.repository.parent / "grows.values"
    with its_memory(machine, triton, told):
        env = {"LD_LIBRARY_PATH": libraries}
        with ServiceProcess(tmp_path / "data", env=env, **settings) as service:
            until(lambda: [gpu.stale for gpu in service.broker.gpus()] == [False], "the GPU is measured")
            yield service


def test_model_is_measured_by_its_load_and_requests_and_then_leases_that(
    service: ServiceProcess,
) -> None:
    broker = service.broker
    found = broker.measure_model("grows", shapes={"INPUT0": [16, 4]})
    expected = LOADED_MB + VALUE_MB * 8 * 16 * 4
    assert (found.server, found.device, found.kind) == ("main", "GPU-a", "NVIDIA H100")
    assert found.batch_sizes == (1, 8)
    assert found.measured_mb == pytest.approx(expected, rel=0.02)
    assert found.next_mb == pytest.approx(1.15 * expected, rel=0.02)
    assert broker.model("grows").state == "cold"
    until(lambda: broker.gpus().items[0].leased_mb == 0, "its memory is free again")
    [learned] = [one for one in broker.estimates() if one.subject == "model grows/1"]
    assert learned.gpu_mb is not None
    assert learned.gpu_mb.n == 1

    assert broker.load_model("grows", wait_seconds=60).gpu_mb == found.next_mb
    with pytest.raises(Refused, match="unload it first") as refused:
        broker.measure_model("grows")
    assert refused.value.code == "model-in-use"
    broker.unload_model("grows")
