"""What an agent tells of the health of real GPUs."""

from collections.abc import Callable

import pynvml
import pytest
from gpubroker_server.adapters.nvml import meter
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
    assert (await next_node_sample(leader)).gpus["GPU-a"] == replace(HEALTH, ecc_errors=2, xid=79)
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
    assert (await next_node_sample(leader)).gpus == {"GPU-a": replace(HEALTH, xid=79)}
    machine.lose(gpu, pynvml.NVML_ERROR_GPU_IS_LOST)
    while (await next_node_sample(leader)).gpus:
        pass
    machine.mend(gpu)
    while (seen := await next_node_sample(leader)).gpus != {"GPU-a": replace(HEALTH, xid=79)}:
        assert not seen.gpus
