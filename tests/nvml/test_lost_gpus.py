"""A GPU that is lost, fails or hangs costs that GPU: the others of its node go on."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pynvml
import pytest
from gpubroker.runtime.messages import RunKey, ended, failed
from gpubroker_server.adapters.nvml import meter, probe
from gpubroker_server.adapters.ray.agent import node_agent

from tests.contracts.fake_runners import FakeRunners, Leader
from tests.nvml.heard import core_report, inventory, of_uuid, sampled
from tests.nvml.machine import Gpu, Machine, Process

NewMachine = Callable[..., Machine]
OpenLeader = Callable[..., Leader]

UUIDS = [f"GPU-{letter}" for letter in "abcd"]
OTHERS = ["GPU-a", "GPU-c", "GPU-d"]


@pytest.fixture
def machine(new_machine: NewMachine) -> Machine:
    return new_machine(*map(Gpu, UUIDS))


@pytest.fixture
def _soon_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that does not answer is waited for, and reported, after moments."""
    monkeypatch.setattr(meter, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(meter, "STRAGGLER_SECONDS", 1.0)


def uuids(seen: Any) -> list[str]:
    return [device.uuid for device in seen.devices]


async def a_run_of_four(leader: Leader, runners: FakeRunners, machine: Machine) -> int:
    """The id of its process, which uses each device."""
    await leader.start("run", leases=tuple((uuid, 1000) for uuid in UUIDS))
    await leader.until(lambda: "run" in runners.started)
    pid = runners.runner_of("run").process.pid
    use(machine, Process(pid, 700))
    return pid


def use(machine: Machine, *processes: Process) -> None:
    for gpu in machine.gpus:
        gpu.compute, gpu.used_mb = list(processes), sum(process.mb or 0 for process in processes)
    machine.apply()


async def end_of(leader: Leader, runners: FakeRunners, machine: Machine) -> Any:
    """The proof that the run is gone."""
    use(machine)
    runners.runner_of("run").report(ended(RunKey("run", 1, 0), failed("exception", "no"), b""))
    return core_report(await leader.receive("gone", "run"))


async def test_with_one_gpu_lost_before_the_agent_starts_the_others_run_tasks(
    machine: Machine, open_leader: OpenLeader, runners: FakeRunners
) -> None:
    machine.lose(machine.gpus[1])
    leader = open_leader()
    assert await leader.announce() == "welcome"
    seen = await inventory(leader)
    assert uuids(seen) == OTHERS
    assert dict(seen.faults) == {"GPU 1": "GPU is lost"}
    assert seen.complete, "a lost GPU is known not to be in use"
    await leader.start("run", leases=(("GPU-a", 1000), ("GPU-c", 1000)))
    await leader.until(lambda: "run" in runners.started)
    await sampled(leader, *OTHERS)


async def test_gpu_lost_during_a_run_is_absent_and_the_run_frees_the_others(
    machine: Machine, open_leader: OpenLeader, runners: FakeRunners
) -> None:
    leader = open_leader()
    await leader.announce()
    assert uuids(await inventory(leader)) == UUIDS
    await a_run_of_four(leader, runners, machine)
    machine.lose(machine.gpus[1])
    seen = await inventory(leader, lambda seen: uuids(seen) == OTHERS)
    assert (dict(seen.faults), seen.complete) == ({"GPU-b": "GPU is lost"}, True)
    assert seen.runs == (("run", 1, 0),)
    gone = await end_of(leader, runners, machine)
    assert gone.proof == "process_absent"
    assert [(uuid, sample.used_mb) for uuid, sample in of_uuid(gone).items()] == [(u, 0) for u in OTHERS]


async def test_a_gpu_that_comes_back_is_offered_again(machine: Machine, open_leader: OpenLeader) -> None:
    leader = open_leader()
    await leader.announce()
    machine.lose(machine.gpus[1])
    await inventory(leader, lambda seen: uuids(seen) == OTHERS)
    machine.mend(machine.gpus[1])
    seen = await inventory(leader, lambda seen: uuids(seen) == UUIDS)
    assert (seen.faults, seen.complete) == ((), True)
    await sampled(leader, *UUIDS)


@pytest.mark.usefixtures("_soon_silent")
async def test_a_call_that_hangs_holds_up_no_other_gpu_and_costs_one_thread(
    machine: Machine, open_leader: OpenLeader
) -> None:
    leader = open_leader()
    await leader.announce()
    await sampled(leader, *UUIDS)
    hung = machine.gpus[1]
    machine.hang(hung, "nvmlDeviceGetComputeRunningProcesses_v3")
    await leader.until(lambda: machine.is_hanging(hung))
    await sampled(leader, *OTHERS)
    threads = set(threading.enumerate())
    for _ in range(20):
        await sampled(leader, *OTHERS)
    assert set(threading.enumerate()) <= threads
    seen = await inventory(leader, lambda seen: "GPU-b" in dict(seen.faults))
    assert uuids(seen) == UUIDS, "it may be in use, so it stays; without samples it takes nothing new"
    assert dict(seen.faults)["GPU-b"] == "the driver does not answer"
    machine.mend(hung)
    seen = await inventory(leader, lambda seen: not seen.faults)
    await sampled(leader, *UUIDS)


@pytest.mark.usefixtures("_soon_silent")
async def test_an_agent_answers_though_a_gpu_hangs_from_the_beginning(
    machine: Machine, open_leader: OpenLeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_agent, "OPENING_MEASURE_SECONDS", 0.2)
    machine.hang(machine.gpus[1])
    leader = open_leader()
    assert await asyncio.wait_for(leader.announce(), 30.0) == "welcome"
    seen = await inventory(leader)
    assert uuids(seen) == OTHERS
    assert not seen.complete, "it is unknown which one it is, so none is known to be removed"
    await sampled(leader, *OTHERS)
    machine.mend(machine.gpus[1])
    assert (await inventory(leader, lambda seen: uuids(seen) == UUIDS)).complete


@pytest.mark.usefixtures("_soon_silent")
@pytest.mark.parametrize("how", ["hangs", "fails"])
async def test_a_run_is_gone_though_a_gpu_of_it_has_long_been_silent(
    machine: Machine, open_leader: OpenLeader, runners: FakeRunners, how: str
) -> None:
    leader = open_leader()
    await leader.announce()
    await a_run_of_four(leader, runners, machine)
    silent = machine.gpus[1]
    if how == "hangs":
        machine.hang(silent)
    else:
        machine.lose(silent, pynvml.NVML_ERROR_UNKNOWN)
    await inventory(leader, lambda seen: "GPU-b" in dict(seen.faults))
    gone = await end_of(leader, runners, machine)
    assert list(of_uuid(gone)) == OTHERS
    machine.mend(silent)


async def test_the_first_announcement_and_the_end_of_a_run_wait_for_a_slow_gpu(
    machine: Machine, open_leader: OpenLeader, runners: FakeRunners, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter, "STRAGGLER_SECONDS", 0.0)  # each answer is too late for the others' samples
    leader = open_leader()
    await leader.announce()
    assert uuids(await inventory(leader)) == UUIDS
    await a_run_of_four(leader, runners, machine)
    gone = await end_of(leader, runners, machine)
    assert list(of_uuid(gone)) == UUIDS


async def test_a_driver_that_does_not_start_says_why_and_proves_no_gpu_removed(
    new_machine: NewMachine, open_leader: OpenLeader
) -> None:
    """As after an upgrade of the driver without a reboot."""
    new_machine(Gpu("GPU-a"), init=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    leader = open_leader()
    await leader.announce()
    seen = await inventory(leader)
    assert (seen.devices, seen.complete) == ((), False)
    assert dict(seen.faults) == {"the driver": "RM has detected an NVML/RM version mismatch."}


async def test_driver_that_hangs_at_its_start_costs_the_gpus_and_not_the_node(
    new_machine: NewMachine, open_leader: OpenLeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPUs are back once it has started."""
    monkeypatch.setattr(probe, "START_SECONDS", 0.2)
    machine = new_machine(*map(Gpu, UUIDS), init_hangs=True)
    leader = open_leader()
    assert await leader.announce() == "welcome"
    seen = await inventory(leader)
    assert (seen.devices, seen.complete) == ((), False), "they may be in use"
    assert dict(seen.faults) == {"the driver": "the driver does not answer"}
    machine.init_hangs = False
    machine.apply()
    assert (await inventory(leader, lambda seen: uuids(seen) == UUIDS)).complete
    await sampled(leader, *UUIDS)


@pytest.mark.parametrize(
    "code",
    [
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    ],
)
async def test_a_driver_that_starts_after_the_agent_brings_its_gpus(
    new_machine: NewMachine, open_leader: OpenLeader, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(probe, "ASK_AGAIN_SECONDS", 0.2)
    machine = new_machine(*map(Gpu, UUIDS), init=code)
    leader = open_leader()
    await leader.announce()
    seen = await inventory(leader)
    assert (seen.devices, seen.complete) == ((), False), "what the leader knows of may be in use"
    machine.init = 0
    machine.apply()
    seen = await inventory(leader, lambda seen: uuids(seen) == UUIDS)
    assert (seen.faults, seen.gpu_absence, seen.complete) == ((), "", True)
    await sampled(leader, *UUIDS)


async def test_gpus_that_a_driver_shows_later_are_offered(
    new_machine: NewMachine, open_leader: OpenLeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "ASK_AGAIN_SECONDS", 0.2)
    machine = new_machine()
    leader = open_leader()
    await leader.announce()
    seen = await inventory(leader)
    assert (seen.complete, seen.gpu_absence) == (True, "the NVIDIA driver shows no GPU")
    machine.gpus = list(map(Gpu, UUIDS))
    machine.apply()
    assert (await inventory(leader, lambda seen: uuids(seen) == UUIDS)).gpu_absence == ""


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "libnvidia-ml.so.1 is not found"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "the NVIDIA driver is not loaded"),
    ],
)
async def test_a_machine_without_a_driver_says_so_and_has_no_fault(
    new_machine: NewMachine, open_leader: OpenLeader, code: int, why: str
) -> None:
    new_machine(Gpu("GPU-a"), init=code)
    leader = open_leader()
    await leader.announce()
    seen = await inventory(leader)
    assert (seen.devices, seen.faults) == ((), ())
    assert why in seen.gpu_absence


async def test_a_refused_driver_is_asked_again_without_announcements_between(
    new_machine: NewMachine, open_leader: OpenLeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "ASK_AGAIN_SECONDS", 0.0)
    new_machine(init=pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    leader = open_leader()
    await leader.announce()
    incarnation = leader.incarnation
    for _ in range(5):
        leader.received = [report for report in leader.received if report[0] != "sampled"]
        await leader.receive("sampled")
    assert leader.incarnation == incarnation


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_UNKNOWN])
async def test_a_driver_without_a_gpu_that_answers_is_started_anew(
    new_machine: NewMachine, open_leader: OpenLeader, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """As when a GPU is back for new processes only."""
    monkeypatch.setattr(meter, "RESTART_SECONDS", 0.2)
    machine = new_machine(Gpu("GPU-a"))
    leader = open_leader()
    await leader.announce()
    assert uuids(await inventory(leader)) == ["GPU-a"]
    machine.lose(machine.gpus[0], code)
    machine.gpus.append(Gpu("GPU-new"))
    machine.apply()
    seen = await inventory(leader, lambda seen: "GPU-new" in uuids(seen))
    assert uuids(seen) == ["GPU-new"]
    machine.mend(machine.gpus[0])
    await inventory(leader, lambda seen: uuids(seen) == ["GPU-a", "GPU-new"])


async def test_a_driver_with_one_gpu_that_answers_is_not_started_anew(
    machine: Machine, open_leader: OpenLeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter, "RESTART_SECONDS", 0.0)
    monkeypatch.setattr(node_agent, "restart_driver", lambda *_: pytest.fail("three GPUs answer"))
    leader = open_leader()
    await leader.announce()
    machine.lose(machine.gpus[1])
    await inventory(leader, lambda seen: uuids(seen) == OTHERS)
    for _ in range(3):
        await sampled(leader, *OTHERS)
