"""What the door to devices promises, for simulated ones and for GPUs as NVIDIA's library tells them."""

import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import pynvml
import pytest
from gpubroker_server.adapters.nvml.meter import DeviceMeter
from gpubroker_server.adapters.nvml.probe import GpuChoice, NvmlProbe, find_probes, gpus_to_share, shares_pids
from gpubroker_server.adapters.nvml.simulated import SimulatedProbe
from gpubroker_server.core.domain.orders import ReportedDevice
from gpubroker_server.core.domain.units import Mib
from gpubroker_server.ports.devices import DeviceLost, DeviceProbe, MeasuredDevice, NoDevices, ProcessGroup

from tests.nvml.machine import ANY_CALL, Gpu, Machine, Process

UUIDS = ("GPU-a", "GPU-b")
GIB_BYTES = 2**30
OLD_MEMORY = {"nvmlDeviceGetMemoryInfo_v2": pynvml.NVML_ERROR_FUNCTION_NOT_FOUND}
NO_GRAPHICS = {"nvmlDeviceGetGraphicsRunningProcesses_v3": pynvml.NVML_ERROR_NOT_SUPPORTED}

NewMachine = Callable[..., Machine]
Measure = Callable[..., list[MeasuredDevice]]
Probes = list[DeviceProbe]


def a_simulated_probe() -> DeviceProbe:
    return SimulatedProbe([ReportedDevice(uuid, "sim", i, Mib(24_000), True) for i, uuid in enumerate(UUIDS)])


def nvml_probes(*, shares_pids: bool = True) -> Probes:
    pynvml.nvmlInit()
    count = pynvml.nvmlDeviceGetCount()
    return [NvmlProbe(pynvml, index, shares_pids=shares_pids) for index in range(count)]


def inventory(probes: Probes) -> list[ReportedDevice]:
    return [reading.device for probe in probes for reading in probe.read({})]


def sample(probes: Probes, holders: Mapping[str, ProcessGroup]) -> list[MeasuredDevice]:
    read = [reading for probe in probes for reading in probe.read(holders)]
    return [reading.measured for reading in read if reading.measured is not None]


def a_group(pids: Iterable[int], **leased_mb: int) -> ProcessGroup:
    by_uuid = {name.replace("_", "-"): Mib(mb) for name, mb in leased_mb.items()}
    return ProcessGroup(frozenset(pids), by_uuid)


@pytest.fixture(params=["simulated", "nvml"])
def probes(request: pytest.FixtureRequest, new_machine: NewMachine) -> Probes:
    """Of a machine on which process 11 uses 700 MiB of the first GPU."""
    new_machine(Gpu("GPU-a", used_mb=700, compute=[Process(11, 700)]), Gpu("GPU-b"))
    return [a_simulated_probe()] if request.param == "simulated" else nvml_probes()


@pytest.fixture
def measured(new_machine: NewMachine) -> Measure:
    def measure(*gpus: Gpu, shares_pids: bool = True, **groups: ProcessGroup) -> list[MeasuredDevice]:
        new_machine(*gpus)
        return sample(nvml_probes(shares_pids=shares_pids), groups)

    return measure


def test_every_device_is_listed_by_uuid_in_the_order_of_its_number(probes: Probes) -> None:
    assert [(device.index, device.uuid) for device in inventory(probes)] == list(enumerate(UUIDS))
    assert {device.physical_mb for device in inventory(probes)} == {24_000}


def test_a_sample_has_one_entry_per_device(probes: Probes) -> None:
    assert [measured.uuid for measured in sample(probes, {})] == list(UUIDS)


def test_the_use_of_a_runs_processes_counts_for_the_run(probes: Probes) -> None:
    first, second = sample(probes, {"t:1": a_group([10, 11], GPU_a=700)})
    assert (first.by_holder, first.used_mb, first.foreign_mb) == ({"t:1": 700}, 700, 0)
    assert (second.by_holder, second.used_mb) == ({}, 0)


def test_a_run_without_processes_uses_nothing(probes: Probes) -> None:
    [first, _] = sample(probes, {"t:1": a_group([], GPU_a=700)})
    assert first.by_holder == {}


def test_the_use_of_other_processes_is_foreign(measured: Measure) -> None:
    gpu = Gpu("GPU-a", used_mb=900, compute=[Process(11, 700)], graphics=[Process(99, 200)])
    [first] = measured(gpu, run=a_group([11], GPU_a=700))
    assert (first.by_holder, first.foreign_mb) == ({"run": 700}, 200)


def test_a_run_on_a_device_that_it_has_no_lease_of_is_foreign_there(measured: Measure) -> None:
    gpu = Gpu("GPU-a", used_mb=700, compute=[Process(11, 700)])
    [first] = measured(gpu, run=a_group([11], GPU_b=700))
    assert (first.by_holder, first.foreign_mb) == ({}, 700)


def test_a_process_listed_for_compute_and_graphics_counts_once(measured: Measure) -> None:
    gpu = Gpu("GPU-a", used_mb=700, compute=[Process(11, 700)], graphics=[Process(11, 700)])
    [first] = measured(gpu, run=a_group([11], GPU_a=700))
    assert first.by_holder == {"run": 700}


def test_several_processes_of_a_run_add_up(measured: Measure) -> None:
    gpu = Gpu("GPU-a", used_mb=700, compute=[Process(11, 300), Process(12, 400)])
    [first] = measured(gpu, run=a_group([11, 12], GPU_a=700))
    assert first.by_holder == {"run": 700}


@pytest.mark.parametrize(
    "gpu",
    [
        Gpu("GPU-a", used_mb=700, compute=[Process(11, None)]),
        Gpu("GPU-a", used_mb=700, compute=[Process(11, 700)], mig=True),
    ],
)
def test_use_that_nvml_cannot_attribute_counts_for_no_holder(measured: Measure, gpu: Gpu) -> None:
    [first] = measured(gpu, run=a_group([11], GPU_a=700))
    assert (first.used_mb, first.foreign_mb, first.by_holder) == (700, None, {})


def test_use_in_a_container_with_its_own_process_ids_counts_for_no_holder(measured: Measure) -> None:
    gpu = Gpu("GPU-a", used_mb=700, compute=[Process(11, 700)])
    [first] = measured(gpu, shares_pids=False, run=a_group([11], GPU_a=700))
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


@pytest.mark.parametrize(
    ("errors", "physical_mb", "used_mb"), [({}, 23_400, 700), (OLD_MEMORY, 24_000, 1300)]
)
def test_memory_that_the_driver_keeps_is_not_offered(
    new_machine: NewMachine, errors: dict[str, int], physical_mb: int, used_mb: int
) -> None:
    """Old drivers do not tell it apart from what is in use."""
    new_machine(Gpu("GPU-a", used_mb=700, reserved_mb=600, errors=errors))
    probes = nvml_probes()
    assert [device.physical_mb for device in inventory(probes)] == [physical_mb]
    assert [device.used_mb for device in sample(probes, {})] == [used_mb]


NO_MEMORY = {
    "nvmlDeviceGetMemoryInfo_v2": pynvml.NVML_ERROR_NOT_SUPPORTED,
    "nvmlDeviceGetMemoryInfo": pynvml.NVML_ERROR_NOT_SUPPORTED,
}
UNIFIED = pytest.mark.parametrize("gpu", [Gpu("GPU-a", errors=NO_MEMORY), Gpu("GPU-a", total_mb=0)])


class Host(NamedTuple):
    """The machine's memory as psutil tells it."""

    total: int = 128 * GIB_BYTES
    available: int = 120 * GIB_BYTES


@UNIFIED
@pytest.mark.parametrize(("given", "size_mb"), [(None, int(128 * 1024 * 0.9)), (Mib(64 * 1024), 64 * 1024)])
def test_gpu_without_memory_of_its_own_offers_the_machines_or_a_given_size(
    new_machine: NewMachine, monkeypatch: pytest.MonkeyPatch, gpu: Gpu, given: Mib | None, size_mb: int
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", Host)
    new_machine(gpu)
    [device] = inventory(list(find_probes(None, shared_mb=given)))
    assert device.physical_mb == size_mb


@UNIFIED
def test_memory_of_other_programs_beyond_their_part_is_in_use_on_that_gpu(
    new_machine: NewMachine, monkeypatch: pytest.MonkeyPatch, gpu: Gpu
) -> None:
    gpu.compute = [Process(11, 700), Process(99, 300)]
    new_machine(gpu)
    probes = list(find_probes(None, shared_mb=Mib(100 * 1024)))
    for available, used_mb in ((120, 1000), (28, 72 * 1024), (0, 100 * 1024)):
        monkeypatch.setattr(psutil, "virtual_memory", lambda left=available: Host(available=left * GIB_BYTES))
        [measured] = sample(probes, {"run": a_group([11], GPU_a=700)})
        assert measured.used_mb == used_mb
        assert (measured.foreign_mb, measured.by_holder) == (300, {"run": 700})


def test_a_driver_that_lists_no_processes_attributes_no_use(measured: Measure) -> None:
    unlisted = {
        f"nvmlDeviceGet{purpose}RunningProcesses_v3": pynvml.NVML_ERROR_NOT_SUPPORTED
        for purpose in ("Compute", "Graphics")
    }
    [first] = measured(Gpu("GPU-a", used_mb=700, errors=unlisted), run=a_group([11], GPU_a=700))
    assert (first.used_mb, first.foreign_mb, first.by_holder) == (700, None, {})


def test_a_device_keeps_its_size_though_the_driver_keeps_more_for_itself(new_machine: NewMachine) -> None:
    """Each other size would be another inventory."""
    gpu = Gpu("GPU-a", used_mb=700, reserved_mb=600)
    machine = new_machine(gpu)
    probes = nvml_probes()
    before = inventory(probes)
    gpu.reserved_mb = 610
    machine.apply()
    assert inventory(probes) == before


def test_use_without_a_process_is_used_and_not_foreign(measured: Measure) -> None:
    [first] = measured(Gpu("GPU-a", used_mb=900, compute=[Process(11, 700)]), run=a_group([11], GPU_a=700))
    assert (first.used_mb, first.foreign_mb, first.by_holder) == (900, 0, {"run": 700})


def test_a_value_that_a_device_lacks_is_left_out(measured: Measure) -> None:
    [first] = measured(Gpu("GPU-a", errors=NO_GRAPHICS, busy_percent=None, compute=[Process(11, 5)]))
    assert first.utilization is None
    assert first.foreign_mb == 5


def test_utilization_is_a_share_of_one(measured: Measure) -> None:
    [first] = measured(Gpu("GPU-a", busy_percent=40))
    assert first.utilization == pytest.approx(0.4)


async def test_instances_of_a_split_gpu_are_devices_with_a_parent(new_machine: NewMachine) -> None:
    slices = (Gpu("MIG-1", total_mb=10_000, used_mb=300, name="NVIDIA H100 MIG 1g.10gb"), None)
    new_machine(Gpu("GPU-a", mig=True, instances=slices), Gpu("GPU-b", mig=False))
    meter = DeviceMeter(nvml_probes())
    used = {measured.uuid: measured for measured in await meter.measure(dict)}
    whole, other, instance = meter.inventory().devices
    assert [(d.uuid, d.index, d.parent) for d in (whole, other)] == [("GPU-a", 0, ""), ("GPU-b", 1, "")]
    assert [device.split for device in (whole, other, instance)] == [True, False, False]
    assert instance == ReportedDevice("MIG-1", "NVIDIA H100 MIG 1g.10gb", 2, Mib(10_000), False, "GPU-a")
    assert (used["MIG-1"].used_mb, used["MIG-1"].foreign_mb) == (300, None), "nobody says whose it is"


@pytest.mark.parametrize(("mig", "is_split"), [(True, True), (False, False), (None, False)])
def test_a_gpu_in_mig_mode_is_split_before_it_has_an_instance(
    new_machine: NewMachine, mig: bool | None, is_split: bool
) -> None:
    new_machine(Gpu("GPU-a", mig=mig))
    [device] = inventory(nvml_probes())
    assert device.split is is_split


async def test_a_lost_device_gets_no_sample_and_the_others_do(new_machine: NewMachine) -> None:
    machine = new_machine(Gpu("GPU-a"), Gpu("GPU-b"))
    probes = nvml_probes()
    machine.lose(machine.gpus[0])
    assert [measured.uuid for measured in await DeviceMeter(probes).measure(dict)] == ["GPU-b"]
    with pytest.raises(DeviceLost, match="GPU is lost"):
        probes[0].read({})


def test_a_device_that_fails_once_described_stays_and_says_why(new_machine: NewMachine) -> None:
    machine = new_machine(Gpu("GPU-a"))
    [probe] = nvml_probes()
    [before] = probe.read({})
    machine.gpus[0].errors = {"nvmlDeviceGetComputeRunningProcesses_v3": pynvml.NVML_ERROR_UNKNOWN}
    machine.apply()
    [reading] = probe.read({})
    assert (reading.device, reading.measured, reading.fault) == (before.device, None, "Unknown Error")


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_RESET_REQUIRED])
def test_a_device_that_cannot_be_identified_raises_what_the_driver_says(
    new_machine: NewMachine, code: int
) -> None:
    new_machine(Gpu("GPU-a", errors={ANY_CALL: code}))
    [probe] = nvml_probes()
    with pytest.raises(pynvml.NVMLError) as raised:
        probe.read({})
    assert raised.value.value == code


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_a_machine_without_nvml_has_no_devices_and_says_why(new_machine: NewMachine, code: int) -> None:
    new_machine(Gpu("GPU-a"), init=code)
    [driver] = find_probes(None)
    with pytest.raises(NoDevices, match="driver"):
        driver.read({})


def test_configured_devices_replace_real_ones() -> None:
    devices = inventory([a_simulated_probe()])
    assert inventory(list(find_probes(devices))) == devices


def test_a_node_that_shares_its_machine_has_the_gpus_that_it_was_given(new_machine: NewMachine) -> None:
    new_machine(*(Gpu(f"GPU-{name}", 80_000) for name in "abc"))
    assert [device.uuid for device in inventory(list(find_probes(None, "[2, 0]")))] == ["GPU-a", "GPU-c"]
    assert next(iter(find_probes(None, "[]"))).read({}) == []
    [simulated] = inventory(list(find_probes(None, '[["GPU-sim-1", 1, 24576]]')))
    assert (simulated.uuid, simulated.index, simulated.physical_mb) == ("GPU-sim-1", 1, 24_576)


def test_gpus_are_named_by_index_or_uuid_in_the_order_wanted(new_machine: NewMachine) -> None:
    new_machine(*(Gpu(f"GPU-{name}", 80_000) for name in "abc"))
    assert gpus_to_share() == [(0, "GPU-a"), (1, "GPU-b"), (2, "GPU-c")]
    assert gpus_to_share("2, GPU-a") == [(2, "GPU-c"), (0, "GPU-a")]
    assert gpus_to_share("1,GPU-x,0") == [(1, "GPU-b")], "CUDA reads a list up to the first invalid entry"
    with pytest.raises(ValueError, match="names GPU 1 twice"):
        gpus_to_share("1,GPU-b")


async def test_the_chosen_gpus_alone_are_devices(new_machine: NewMachine) -> None:
    slices = (Gpu("MIG-1", total_mb=10_000), Gpu("MIG-2", total_mb=10_000))
    new_machine(Gpu("GPU-a"), Gpu("GPU-bb"), Gpu("GPU-bc", mig=True, instances=slices))
    for words, uuids in (
        ("", []),
        ("1", ["GPU-bb"]),
        ("GPU-bc, GPU-a", ["GPU-a", "GPU-bc", "MIG-1", "MIG-2"]),
        ("MIG-2,0", ["GPU-a", "GPU-bc", "MIG-2"]),
        ("0,-1,1", ["GPU-a"]),
        ("GPU-b", []),
        ("NoDevFiles", []),
    ):
        meter = DeviceMeter(find_probes(None, None, GpuChoice(words, "CUDA_VISIBLE_DEVICES")))
        await meter.measure(dict)
        seen = meter.inventory()
        assert sorted(device.uuid for device in seen.devices) == uuids, words
        assert ("CUDA_VISIBLE_DEVICES is" in seen.absence) is (not uuids)


async def test_a_choice_that_names_a_gpu_twice_is_a_fault(new_machine: NewMachine) -> None:
    new_machine(Gpu("GPU-a"), Gpu("GPU-b"))
    meter = DeviceMeter(find_probes(None, None, GpuChoice("0,GPU-a", "ray.gpus")))
    await meter.measure(dict)
    [(name, why)] = meter.inventory().faults
    assert (name, "ray.gpus: '0,GPU-a' names GPU 0 twice" in why) == ("the driver", True)


async def test_chosen_gpu_that_was_lost_at_the_start_is_offered_when_it_is_back(
    new_machine: NewMachine,
) -> None:
    machine = new_machine(Gpu("GPU-a"), Gpu("GPU-b"), Gpu("GPU-c"))
    machine.lose(machine.gpus[1])
    meter = DeviceMeter(find_probes(None, None, GpuChoice("GPU-b,GPU-c", "ray.gpus")))
    await meter.measure(dict)
    assert [device.uuid for device in meter.inventory().devices] == ["GPU-c"]
    machine.mend(machine.gpus[1])
    await meter.measure(dict)
    assert [device.uuid for device in meter.inventory().devices] == ["GPU-b", "GPU-c"]


@pytest.mark.parametrize(
    ("code", "found"),
    [(pynvml.NVML_ERROR_DRIVER_NOT_LOADED, []), (pynvml.NVML_ERROR_UNKNOWN, "cannot be read")],
)
def test_a_machine_whose_gpus_cannot_be_listed(
    new_machine: NewMachine, code: int, found: list[object] | str
) -> None:
    new_machine(Gpu("GPU-a"), init=code)
    if isinstance(found, list):
        assert gpus_to_share() == found
        return
    with pytest.raises(RuntimeError, match=found):
        gpus_to_share()


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
        [first, _second] = sample([a_simulated_probe()], {"task:1": group})
    assert (first.used_mb, first.by_holder) == (9000, {"task:1": 9000})


@pytest.mark.parametrize("said", ["", "much", "-5"])
def test_an_invalid_declared_use_is_ignored(said: str) -> None:
    with a_process_that_says(said) as pid:
        [first, _second] = sample([a_simulated_probe()], {"task:1": a_group([pid], GPU_a=8000)})
    assert first.by_holder == {"task:1": 8000}


def test_a_declared_use_counts_until_the_last_process_of_the_run_ends() -> None:
    probes = [a_simulated_probe()]
    with a_process_that_says("9000") as pid:
        sample(probes, {"task:1": a_group([pid, os.getpid()], GPU_a=8000)})
    used = [sample(probes, {"task:1": a_group(pids, GPU_a=8000)})[0].used_mb for pids in ([os.getpid()], [])]
    assert used == [9000, 0]
    assert sample(probes, {"task:1": a_group([os.getpid()], GPU_a=8000)})[0].used_mb == 8000
