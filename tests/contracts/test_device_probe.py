"""What the door to devices promises, for simulated ones and for GPUs as NVML tells them."""

import os
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from gpubroker_server.adapters.nvml.probe import NvmlProbe, new_probe, shares_pids
from gpubroker_server.adapters.nvml.simulated import SimulatedProbe
from gpubroker_server.core.domain.orders import ReportedDevice
from gpubroker_server.core.domain.units import Mib
from gpubroker_server.ports.devices import DeviceProbe, MeasuredDevice, ProcessGroup

from tests.contracts.nvml_machine import Gpu, Machine, process

UUIDS = ("GPU-a", "GPU-b")

NewProbe = Callable[[], DeviceProbe]


def a_simulated_probe() -> DeviceProbe:
    return SimulatedProbe([ReportedDevice(uuid, "sim", i, Mib(24_000), True) for i, uuid in enumerate(UUIDS)])


def an_nvml_probe() -> DeviceProbe:
    """Of a machine on which process 11 uses 700 MiB of the first GPU."""
    return NvmlProbe(Machine(Gpu("GPU-a", used_mb=700, compute=[process(11, 700)]), Gpu("GPU-b")))


def a_group(pids: Iterable[int], **leased_mb: int) -> ProcessGroup:
    by_uuid = {name.replace("_", "-"): Mib(mb) for name, mb in leased_mb.items()}
    return ProcessGroup(frozenset(pids), by_uuid)


@pytest.fixture(params=[a_simulated_probe, an_nvml_probe])
def probe(request: pytest.FixtureRequest) -> DeviceProbe:
    made: DeviceProbe = request.param()
    return made


def test_every_device_is_listed_by_uuid_in_the_order_of_its_number(probe: DeviceProbe) -> None:
    assert [(device.index, device.uuid) for device in probe.inventory()] == list(enumerate(UUIDS))
    assert {device.physical_mb for device in probe.inventory()} == {24_000}


def test_a_sample_has_one_entry_per_device(probe: DeviceProbe) -> None:
    assert [measured.uuid for measured in probe.sample({})] == list(UUIDS)


def test_the_use_of_a_runs_processes_counts_for_the_run(probe: DeviceProbe) -> None:
    first, second = probe.sample({"t:1": a_group([10, 11], GPU_a=700)})
    assert (first.by_holder, first.used_mb, first.foreign_mb) == ({"t:1": 700}, 700, 0)
    assert (second.by_holder, second.used_mb) == ({}, 0)


def test_a_run_without_processes_uses_nothing(probe: DeviceProbe) -> None:
    [first, _] = probe.sample({"t:1": a_group([], GPU_a=700)})
    assert first.by_holder == {}


def measured(*gpus: Gpu, **groups: ProcessGroup) -> list[MeasuredDevice]:
    return list(NvmlProbe(Machine(*gpus)).sample(groups))


def test_the_use_of_other_processes_is_foreign() -> None:
    gpu = Gpu("GPU-a", used_mb=900, compute=[process(11, 700)], graphics=[process(99, 200)])
    [first] = measured(gpu, run=a_group([11], GPU_a=700))
    assert (first.by_holder, first.foreign_mb) == ({"run": 700}, 200)


def test_a_run_on_a_device_that_it_has_no_lease_of_is_foreign_there() -> None:
    gpu = Gpu("GPU-a", used_mb=700, compute=[process(11, 700)])
    [first] = measured(gpu, run=a_group([11], GPU_b=700))
    assert (first.by_holder, first.foreign_mb) == ({}, 700)


def test_a_process_listed_for_compute_and_graphics_counts_once() -> None:
    gpu = Gpu("GPU-a", used_mb=700, compute=[process(11, 700)], graphics=[process(11, 700)])
    [first] = measured(gpu, run=a_group([11], GPU_a=700))
    assert first.by_holder == {"run": 700}


def test_several_processes_of_a_run_add_up() -> None:
    gpu = Gpu("GPU-a", used_mb=700, compute=[process(11, 300), process(12, 400)])
    [first] = measured(gpu, run=a_group([11, 12], GPU_a=700))
    assert first.by_holder == {"run": 700}


@pytest.mark.parametrize(
    "gpu",
    [
        Gpu("GPU-a", used_mb=700, compute=[process(11, None)]),
        Gpu("GPU-a", used_mb=700, compute=[process(11, 700)], mig=True),
    ],
)
def test_use_that_nvml_cannot_attribute_counts_for_no_holder(gpu: Gpu) -> None:
    [first] = measured(gpu, run=a_group([11], GPU_a=700))
    assert (first.used_mb, first.foreign_mb, first.by_holder) == (700, None, {})


def test_in_a_container_with_process_ids_of_its_own_use_counts_for_no_holder() -> None:
    machine = Machine(Gpu("GPU-a", used_mb=700, compute=[process(11, 700)]))
    [first] = NvmlProbe(machine, shares_pids=False).sample({"run": a_group([11], GPU_a=700)})
    assert (first.used_mb, first.foreign_mb, first.by_holder) == (700, None, {})


@pytest.mark.parametrize(
    ("namespace", "shared"), [("pid:[4026531836]", True), ("pid:[4026532201]", False), (None, False)]
)
def test_process_ids_are_the_drivers_only_in_the_first_namespace(
    tmp_path: Path, namespace: str | None, shared: bool
) -> None:
    if namespace is not None:
        (tmp_path / "pid").symlink_to(namespace)
    assert shares_pids(tmp_path / "pid") is shared


@pytest.mark.parametrize(("is_old", "physical_mb", "used_mb"), [(False, 23_400, 700), (True, 24_000, 1300)])
def test_memory_that_the_driver_keeps_is_not_offered(is_old: bool, physical_mb: int, used_mb: int) -> None:
    """Old drivers do not tell it apart from what is in use."""
    probe = NvmlProbe(Machine(Gpu("GPU-a", used_mb=700, reserved_mb=600), is_old=is_old))
    assert [device.physical_mb for device in probe.inventory()] == [physical_mb]
    assert [device.used_mb for device in probe.sample({})] == [used_mb]


def test_use_without_a_process_is_used_and_not_foreign() -> None:
    [first] = measured(Gpu("GPU-a", used_mb=900, compute=[process(11, 700)]), run=a_group([11], GPU_a=700))
    assert (first.used_mb, first.foreign_mb, first.by_holder) == (900, 0, {"run": 700})


def test_a_value_that_a_device_lacks_is_left_out() -> None:
    [first] = measured(Gpu("GPU-a", graphics=None, busy_percent=None, compute=[process(11, 5)]))
    assert first.utilization is None
    assert first.foreign_mb == 5


def test_utilization_is_a_share_of_one() -> None:
    [first] = measured(Gpu("GPU-a", busy_percent=40))
    assert first.utilization == pytest.approx(0.4)


def test_instances_of_a_split_gpu_are_devices_with_a_parent() -> None:
    slices = (Gpu("MIG-1", total_mb=10_000, used_mb=300, name=b"NVIDIA H100 MIG 1g.10gb"), None)
    probe = NvmlProbe(Machine(Gpu("GPU-a", mig=True, instances=slices), Gpu("GPU-b", mig=False)))
    whole, other, instance = probe.inventory()
    assert [(d.uuid, d.index, d.parent) for d in (whole, other)] == [("GPU-a", 0, ""), ("GPU-b", 1, "")]
    assert [device.split for device in (whole, other, instance)] == [True, False, False]
    assert instance == ReportedDevice("MIG-1", "NVIDIA H100 MIG 1g.10gb", 2, Mib(10_000), False, "GPU-a")
    used = {measured.uuid: measured for measured in probe.sample({})}
    assert (used["MIG-1"].used_mb, used["MIG-1"].foreign_mb) == (300, None), "nobody says whose it is"


@pytest.mark.parametrize(("mig", "is_split"), [(True, True), (False, False), (None, False)])
def test_a_gpu_in_mig_mode_is_split_before_it_has_an_instance(mig: bool | None, is_split: bool) -> None:
    [device] = NvmlProbe(Machine(Gpu("GPU-a", mig=mig))).inventory()
    assert device.split is is_split


def test_a_lost_device_gets_no_sample_and_the_others_do() -> None:
    lost, fine = Gpu("GPU-a"), Gpu("GPU-b")
    probe = NvmlProbe(Machine(lost, fine))
    lost.lost = True
    assert [measured.uuid for measured in probe.sample({})] == ["GPU-b"]


def test_a_machine_without_nvml_has_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpubroker_server.adapters.nvml.probe.load_nvml", lambda: None)
    assert list(new_probe(None).inventory()) == []


def test_configured_devices_replace_real_ones() -> None:
    devices = a_simulated_probe().inventory()
    assert list(new_probe(devices).inventory()) == list(devices)


@contextmanager
def a_process_that_says(used: str) -> Iterator[int]:
    """Its pid, once it runs: between its start and that, nobody can read what is in its environment."""
    with subprocess.Popen(
        ["sh", "-c", "echo running; read _"],
        env={**os.environ, "SIMULATED_GPU_MB": used},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"running\n"
        yield process.pid
        process.kill()


def test_a_process_may_declare_its_use_of_a_simulated_device() -> None:
    with a_process_that_says("9000") as pid:
        group = a_group([pid, os.getpid()], GPU_a=8000)
        [first, _second] = a_simulated_probe().sample({"task:1": group})
    assert (first.used_mb, first.by_holder) == (9000, {"task:1": 9000})


@pytest.mark.parametrize("said", ["", "much", "-5"])
def test_an_invalid_declared_use_is_ignored(said: str) -> None:
    with a_process_that_says(said) as pid:
        [first, _second] = a_simulated_probe().sample({"task:1": a_group([pid], GPU_a=8000)})
    assert first.by_holder == {"task:1": 8000}


def test_a_declared_use_counts_until_the_last_process_of_the_run_ends() -> None:
    probe = a_simulated_probe()
    with a_process_that_says("9000") as pid:
        probe.sample({"task:1": a_group([pid, os.getpid()], GPU_a=8000)})
    used = [probe.sample({"task:1": a_group(pids, GPU_a=8000)})[0].used_mb for pids in ([os.getpid()], [])]
    assert used == [9000, 0]
    assert probe.sample({"task:1": a_group([os.getpid()], GPU_a=8000)})[0].used_mb == 8000
