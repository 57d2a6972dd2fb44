"""The whole service on a machine with real GPUs, as far as it can tell, of which one is lost."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpubroker.wire.devices import Gpu as SeenGpu

from tests.e2e.service_process import GIB, ServiceProcess, until
from tests.nvml.machine import Gpu, Machine, a_library

UUIDS = [f"GPU-{letter}" for letter in "abcd"]
OTHERS = [UUIDS[0], *UUIDS[2:]]


@pytest.fixture
def machine() -> Iterator[Machine]:
    with a_library() as folder:
        yield Machine(folder, *(Gpu(uuid, 24 * GIB) for uuid in UUIDS))


@pytest.fixture
def service(tmp_path: Path, machine: Machine) -> Iterator[ServiceProcess]:
    libraries = f"{machine.folder}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    env = {"LD_LIBRARY_PATH": libraries}
    settings: dict[str, Any] = {
        "ray": {"spares": 1},
        "policy": {"sample_period_seconds": 0.5},
        "simulated_devices": [],
    }
    with ServiceProcess(tmp_path / "data", env=env, **settings) as service:
        yield service


def usable(service: ServiceProcess) -> list[str]:
    """The devices that could take all of what a device has, lowest UUID first."""
    return sorted(gpu.uuid for gpu in service.broker.gpus() if not gpu.stale and gpu.free_mb > 23 * GIB)


def seen(service: ServiceProcess, uuid: str) -> list[SeenGpu]:
    return [gpu for gpu in service.broker.gpus() if gpu.uuid == uuid]


def test_run_that_loses_one_of_four_gpus_frees_the_others(
    service: ServiceProcess, machine: Machine, tmp_path: Path
) -> None:
    """The lost one says why it is not used."""
    broker, lost, gate = service.broker, machine.gpus[1], tmp_path / "gate"
    until(lambda: usable(service) == UUIDS, "all four are offered")
    wide: dict[str, Any] = {"gpus": 4, "gpu_mb": 20 * GIB}
    task = broker.submit("tests.e2e.work:hold", str(tmp_path / "witness"), str(gate), **wide)
    until(lambda: broker.get(task).state == "running", "it runs")

    machine.lose(lost)
    until(lambda: not seen(service, lost.uuid)[0].present, "it is absent")
    [device] = seen(service, lost.uuid)
    assert (device.fault, device.leased_mb) == ("GPU is lost", 20 * GIB)
    assert broker.get(task).state == "running", "its other GPUs work"
    gate.touch()
    assert broker.result(task) == 1
    until(lambda: usable(service) == OTHERS, "the others are free again")
    assert seen(service, lost.uuid) == [], "nothing is held there any more"
    [node] = broker.nodes()
    assert node.agent is not None
    assert node.agent.gpu_faults == {lost.uuid: "GPU is lost"}
    three = broker.submit("tests.e2e.work:hold", str(tmp_path / "again"), str(gate), **{**wide, "gpus": 3})
    assert broker.result(three) == 1

    machine.mend(lost)
    until(lambda: usable(service) == UUIDS, "it is offered again")
