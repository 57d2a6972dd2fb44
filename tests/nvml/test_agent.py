"""What an agent tells of real GPUs: the devices, their use, and by which holders."""

import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pynvml
import pytest
from gpubroker.runtime.messages import RunKey, failed
from gpubroker.runtime.messages import ended as ended_report
from gpubroker_server.core.domain.estimates import SketchKey, What
from gpubroker_server.core.domain.orders import Ended, Ending
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import Fence, TaskId
from gpubroker_server.core.lifecycle.learning import learn
from gpubroker_server.core.lifecycle.runs import apply_reports
from gpubroker_server.core.lifecycle.stopping import overuse_decisions
from gpubroker_server.core.world.world import World

from tests.builders import GIB, NOW, a_device, a_task, a_world, holding, key
from tests.contracts.fake_runners import FakeRunners, Leader
from tests.nvml.heard import core_report, inventory, next_samples, of_uuid
from tests.nvml.machine import Gpu, Machine, Process

NewMachine = Callable[..., Machine]
OpenLeader = Callable[..., Leader]

LEASE = (("GPU-a", 10 * GIB),)


@pytest.fixture
def outsider() -> Iterator[int]:
    """The id of a process that others started."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


async def a_run(leader: Leader, runners: FakeRunners, *leases: tuple[str, int], task: str = "run") -> int:
    """The id of its process."""
    await leader.start(task, leases=leases or LEASE)
    await leader.until(lambda: task in runners.started)
    return runners.runner_of(task).process.pid


def use(machine: Machine, gpu: Gpu, **by_pid: Any) -> None:
    """`compute` and `graphics` processes of the GPU, all of them seen."""
    gpu.compute, gpu.graphics = by_pid.get("compute", []), by_pid.get("graphics", [])
    gpu.used_mb = sum(process.mb or 0 for process in {p.pid: p for p in gpu.compute + gpu.graphics}.values())
    machine.apply()


async def test_the_devices_of_the_machine_are_announced(
    new_machine: NewMachine, open_leader: OpenLeader
) -> None:
    new_machine(Gpu("GPU-a", 80_000, reserved_mb=600), Gpu("GPU-b", 24_000, name="NVIDIA L4"))
    leader = open_leader()
    await leader.announce()
    seen = await inventory(leader)
    assert [(d.uuid, d.kind, d.index, d.physical_mb, d.simulated) for d in seen.devices] == [
        ("GPU-a", "NVIDIA H100", 0, 79_400, False),
        ("GPU-b", "NVIDIA L4", 1, 24_000, False),
    ]


@pytest.mark.parametrize(
    "code", [pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH]
)
async def test_without_a_working_driver_the_node_is_there_without_devices(
    new_machine: NewMachine, open_leader: OpenLeader, code: int
) -> None:
    new_machine(Gpu("GPU-a"), init=code)
    leader = open_leader()
    assert await leader.announce() == "welcome"
    assert (await inventory(leader)).devices == ()


async def test_use_by_a_run_is_its_own_and_all_other_use_is_foreign(
    new_machine: NewMachine, open_leader: OpenLeader, runners: FakeRunners, outsider: int
) -> None:
    gpu = Gpu("GPU-a", 80_000)
    machine = new_machine(gpu, Gpu("GPU-b"))
    leader = open_leader()
    await leader.announce()
    pid = await a_run(leader, runners)
    use(machine, gpu, compute=[Process(pid, 700), Process(outsider, 300)], graphics=[Process(pid, 700)])
    gpu.used_mb += 50  # which no process shows
    gpu.busy_percent = 40
    machine.apply()
    measured = await next_samples(leader)
    one = measured["GPU-a"]
    assert (one.used_mb, one.foreign_mb, one.by_holder, one.utilization) == (1050, 300, {"run:1": 700}, 0.4)
    other = measured["GPU-b"]
    assert (other.used_mb, other.foreign_mb, other.by_holder) == (0, 0, {})


async def test_use_by_the_process_of_an_external_lease_counts_once(
    new_machine: NewMachine, open_leader: OpenLeader, outsider: int
) -> None:
    gpu = Gpu("GPU-a", 80_000)
    machine = new_machine(gpu)
    leader = open_leader()
    await leader.announce()
    await leader.order("watch", "task_lease", 1, 0, outsider, LEASE)
    use(machine, gpu, compute=[Process(outsider, 5000)])
    measured = (await next_samples(leader))["GPU-a"]
    assert (measured.foreign_mb, measured.by_holder) == (0, {"task_lease:1": 5000})
    world = a_world(a_device("GPU-a", mb=80_000), holding(a_task("task_lease", gpu_mb=10 * GIB), "GPU-a"))
    world.measure([measured])
    assert world.ledgers[key("GPU-a")].free_mb() == 80_000 - 10 * GIB


def a_world_with_the_run() -> World:
    device = a_device("GPU-a", mb=80_000, kind="NVIDIA H100")
    return a_world(device, holding(a_task("run", subject="resnet", gpu_mb=10 * GIB), "GPU-a"))


@pytest.mark.parametrize(("used_mb", "is_over"), [(9 * GIB, False), (12 * GIB, True)])
async def test_the_measured_use_of_a_run_is_learned_and_over_use_is_seen(
    new_machine: NewMachine, open_leader: OpenLeader, runners: FakeRunners, used_mb: int, is_over: bool
) -> None:
    gpu = Gpu("GPU-a", 80_000)
    machine = new_machine(gpu)
    leader = open_leader()
    await leader.announce()
    use(machine, gpu, compute=[Process(await a_run(leader, runners), used_mb)])
    world = a_world_with_the_run()
    world.measure([(await next_samples(leader))["GPU-a"]])
    over = overuse_decisions(world, NOW, Policy())
    assert [lease.overused_mb for decision in over for lease in decision.leases] == [used_mb] * is_over
    end = Ended(TaskId("run"), Fence(1), NOW, Ending.SUCCEEDED)
    [decision] = learn(world, apply_reports(world, [end], NOW, Policy()), NOW)
    learned = {lesson.topic: lesson.value for lesson in decision.lessons}
    assert learned[SketchKey("default", "resnet", "NVIDIA H100", What.GPU_MB)] == used_mb


async def test_a_run_is_gone_only_with_a_measurement_after_its_last_process(
    new_machine: NewMachine, open_leader: OpenLeader, runners: FakeRunners, outsider: int
) -> None:
    """Here the driver needs a while to free what a dead process had, and to say whose the rest is."""
    gpu = Gpu("GPU-a", 80_000)
    machine = new_machine(gpu)
    leader = open_leader()
    await leader.announce()
    pid = await a_run(leader, runners)
    use(machine, gpu, compute=[Process(pid, 700)])
    await next_samples(leader)
    gpu.errors = {"nvmlDeviceGetComputeRunningProcesses_v3": pynvml.NVML_ERROR_UNKNOWN}
    machine.apply()
    runners.runner_of("run").report(ended_report(RunKey("run", 1, 0), failed("exception", "no"), b""))
    await leader.receive("ended", "run")
    await leader.until(lambda: runners.runner_of("run").process.poll() is not None)
    await next_samples(leader)
    assert "gone" not in leader.kinds_of("run"), "its device cannot be measured"
    gpu.errors = {}
    use(machine, gpu, compute=[Process(outsider, 300)])
    gone = core_report(await leader.receive("gone", "run"))
    assert gone.proof == "process_absent"
    after = of_uuid(gone)["GPU-a"]
    assert (after.used_mb, after.foreign_mb, after.by_holder) == (300, 300, {})


async def test_an_instance_of_a_gpu_is_a_device_whose_use_has_no_holder(
    new_machine: NewMachine, open_leader: OpenLeader, runners: FakeRunners
) -> None:
    slices = (
        Gpu("MIG-1", 20_000, name="NVIDIA H100 MIG 2g.20gb", busy_percent=None),
        None,
        Gpu("MIG-2", 10_000, name="NVIDIA H100 MIG 1g.10gb", busy_percent=None),
    )
    machine = new_machine(Gpu("GPU-a", 80_000, mig=True, instances=slices), Gpu("GPU-b", mig=False))
    leader = open_leader()
    await leader.announce()
    seen = await inventory(leader)
    assert [(d.uuid, d.index, d.physical_mb, d.parent, d.split) for d in seen.devices] == [
        ("GPU-a", 0, 80_000, "", True),
        ("GPU-b", 1, 24_000, "", False),
        ("MIG-1", 2, 20_000, "GPU-a", False),
        ("MIG-2", 3, 10_000, "GPU-a", False),
    ]
    pid = await a_run(leader, runners, ("MIG-1", 10_000))
    assert slices[0] is not None
    use(machine, slices[0], compute=[Process(pid, 700)])
    measured = await next_samples(leader)
    one, other = measured["MIG-1"], measured["MIG-2"]
    assert (one.used_mb, one.foreign_mb, one.by_holder) == (700, None, {})
    assert (other.used_mb, other.foreign_mb) == (0, None)
    memory = "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMemoryInfo"
    slices[0].errors = dict.fromkeys(memory, pynvml.NVML_ERROR_UNKNOWN)
    machine.apply()
    measured = await next_samples(leader)
    assert "MIG-1" not in measured
    assert measured.keys() >= {"MIG-2", "GPU-b"}


async def test_a_gpu_that_is_sliced_again_is_announced_with_its_new_instances(
    new_machine: NewMachine, open_leader: OpenLeader
) -> None:
    machine = new_machine(Gpu("GPU-a", 80_000, mig=True, instances=(Gpu("MIG-1", 40_000),)))
    leader = open_leader()
    await leader.announce()
    await inventory(leader, lambda seen: [d.uuid for d in seen.devices] == ["GPU-a", "MIG-1"])
    machine.gpus[0].instances = (Gpu("MIG-2", 20_000), Gpu("MIG-3", 20_000))
    machine.apply()
    seen = await inventory(leader, lambda seen: "MIG-2" in [d.uuid for d in seen.devices])
    assert [(d.uuid, d.parent) for d in seen.devices[1:]] == [("MIG-2", "GPU-a"), ("MIG-3", "GPU-a")]
    assert (seen.complete, seen.faults) == (True, ()), "the old instance is removed"


async def test_driver_without_the_newest_process_call_is_asked_by_the_older_one(
    new_machine: NewMachine, open_leader: OpenLeader, runners: FakeRunners
) -> None:
    names = [f"nvmlDeviceGet{purpose}RunningProcesses_v3" for purpose in ("Compute", "Graphics")]
    gpu = Gpu("GPU-a", 80_000, errors=dict.fromkeys(names, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND))
    machine = new_machine(gpu)
    leader = open_leader()
    await leader.announce()
    use(machine, gpu, compute=[Process(await a_run(leader, runners), 700)], graphics=[Process(1, 200)])
    measured = (await next_samples(leader))["GPU-a"]
    assert (measured.used_mb, measured.foreign_mb, measured.by_holder) == (900, 200, {"run:1": 700})
