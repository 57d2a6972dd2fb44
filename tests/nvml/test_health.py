"""What an agent tells of the health of real GPUs."""

from collections.abc import Callable

import pynvml
import pytest
from gpubroker_server.adapters.nvml import meter, probe
from gpubroker_server.core.domain.device import GpuHealth
from msgspec.structs import replace

from tests.contracts.fake_runners import Leader
from tests.nvml.heard import next_node_sample
from tests.nvml.machine import Gpu, Machine

NewMachine = Callable[..., Machine]
OpenLeader = Callable[..., Leader]

WELL = 300_500, 54, 1980, 2619, 0
HEALTH = GpuHealth(300.5, 54, 1980, 2619, 0, None)


async def test_power_temperature_clocks_and_errors_of_each_gpu_are_told(
    new_machine: NewMachine, open_leader: OpenLeader
) -> None:
    gpu = Gpu("GPU-a", health=WELL)
    machine = new_machine(gpu, Gpu("GPU-old"))
    leader = open_leader()
    await leader.announce()
    assert (await next_node_sample(leader)).gpus == {"GPU-a": HEALTH, "GPU-old": GpuHealth()}
    gpu.health, gpu.xids = (*WELL[:4], 2), [48, 79]
    machine.apply()
    told = replace(HEALTH, ecc_errors=2, xid=79, fatal_xid=79)
    assert (await next_node_sample(leader)).gpus["GPU-a"] == told
    assert (await next_node_sample(leader)).gpus["GPU-a"].xid == 79, "the last one stays"


async def test_instances_have_the_health_of_their_gpu_only(
    new_machine: NewMachine, open_leader: OpenLeader
) -> None:
    new_machine(Gpu("GPU-a", health=WELL, mig=True, instances=(Gpu("MIG-1"), None)))
    leader = open_leader()
    await leader.announce()
    assert (await next_node_sample(leader)).gpus == {"GPU-a": HEALTH}


@pytest.mark.parametrize("call", ["nvmlDeviceGetTemperature", "nvmlEventSetWait_v2"])
async def test_a_gpu_that_hangs_has_no_health_and_its_node_goes_on(
    new_machine: NewMachine, open_leader: OpenLeader, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(meter, "STRAGGLER_SECONDS", 0.2)
    machine = new_machine(*(Gpu(uuid, health=WELL) for uuid in ("GPU-a", "GPU-b")))
    leader = open_leader()
    await leader.announce()
    assert sorted((await next_node_sample(leader)).gpus) == ["GPU-a", "GPU-b"]
    machine.hang(machine.gpus[0], call)
    while (seen := await next_node_sample(leader)).gpus.keys() != {"GPU-b"}:
        pass
    assert seen.memory_total_mb > 0
    machine.mend(machine.gpus[0])
    while sorted((await next_node_sample(leader)).gpus) != ["GPU-a", "GPU-b"]:
        pass


async def test_a_lost_gpu_has_no_health_until_it_comes_back(
    new_machine: NewMachine, open_leader: OpenLeader
) -> None:
    gpu = Gpu("GPU-a", health=WELL, xids=[79])
    machine = new_machine(gpu)
    leader = open_leader()
    await leader.announce()
    assert (await next_node_sample(leader)).gpus == {"GPU-a": replace(HEALTH, xid=79, fatal_xid=79)}
    machine.lose(gpu, pynvml.NVML_ERROR_GPU_IS_LOST)
    while (await next_node_sample(leader)).gpus:
        pass
    gpu.xids = []
    machine.mend(gpu)
    while (seen := await next_node_sample(leader)).gpus != {"GPU-a": HEALTH}:
        assert not seen.gpus


async def test_critical_errors_are_asked_for_again_after_a_refusal(
    new_machine: NewMachine, open_leader: OpenLeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "ASK_AGAIN_SECONDS", 0.1)
    refusal = {"nvmlDeviceRegisterEvents": pynvml.NVML_ERROR_UNKNOWN}
    gpu = Gpu("GPU-a", health=WELL, xids=[13], errors=refusal)
    machine = new_machine(gpu)
    leader = open_leader()
    await leader.announce()
    assert (await next_node_sample(leader)).gpus == {"GPU-a": HEALTH}
    machine.mend(gpu)
    while (await next_node_sample(leader)).gpus != {"GPU-a": replace(HEALTH, xid=13)}:
        pass


@pytest.mark.parametrize(
    ("xids", "last", "fatal"), [([48, 13], 13, 48), ([13, 31, 43, 94], 94, None), ([119], 119, 119)]
)
async def test_a_fatal_xid_is_remembered_behind_those_of_applications(
    new_machine: NewMachine, open_leader: OpenLeader, xids: list[int], last: int, fatal: int | None
) -> None:
    new_machine(Gpu("GPU-a", health=WELL, xids=xids))
    leader = open_leader()
    await leader.announce()
    assert (await next_node_sample(leader)).gpus == {"GPU-a": replace(HEALTH, xid=last, fatal_xid=fatal)}


@pytest.mark.parametrize(
    ("action", "words"), [(0, ""), (1, "reset"), (2, "reboot"), (3, ""), (4, "drain and reset"), (99, None)]
)
async def test_pending_remaps_and_the_drivers_recovery_action_are_told(
    new_machine: NewMachine, open_leader: OpenLeader, action: int, words: str | None
) -> None:
    new_machine(Gpu("GPU-a", health=WELL, remap_pending=True, recovery=action))
    leader = open_leader()
    await leader.announce()
    told = replace(HEALTH, remap_pending=True, recovery=words)
    assert (await next_node_sample(leader)).gpus == {"GPU-a": told}
