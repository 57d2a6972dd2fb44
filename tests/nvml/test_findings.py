"""What `gpubroker doctor` says of GPUs that a node's agent cannot use, from the driver's answers on."""

import time
from collections.abc import Callable
from typing import Any

import pynvml
import pytest
from gpubroker_server.adapters.ray.driver.agents import NodeAgents
from gpubroker_server.core.control.findings.diagnose import FleetKnown, diagnose_fleet
from gpubroker_server.core.control.findings.finding import Finding
from gpubroker_server.core.domain.orders import NodeReport
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import MonotonicSeconds
from gpubroker_server.core.lifecycle import gpu_closures
from gpubroker_server.core.world.world import World

from tests.builders import NOW, a_device, a_world, commit
from tests.contracts.fake_runners import Leader
from tests.nvml.heard import inventory, next_node_sample
from tests.nvml.machine import Gpu, Machine

NewMachine = Callable[..., Machine]
OpenLeader = Callable[..., Leader]


def findings(seen: NodeReport) -> list[Finding]:
    agents = NodeAgents(lambda: MonotonicSeconds(time.monotonic()))
    agents.see(seen, 1)
    shown = {name: {**agent, "outdated": False} for name, agent in agents.views().items()}
    known = FleetKnown({"state": "connected", "agents": shown}, has_leader=True)
    return list(diagnose_fleet(a_world(), Policy(), known, NOW))


@pytest.mark.provokes("gpu-unusable")
async def test_a_lost_gpu_is_found_until_it_comes_back(
    new_machine: NewMachine, open_leader: OpenLeader
) -> None:
    machine = new_machine(Gpu("GPU-a"), Gpu("GPU-b"))
    leader = open_leader()
    await leader.announce()
    assert findings(await inventory(leader)) == []
    machine.lose(machine.gpus[1])
    [found] = findings(await inventory(leader, lambda seen: bool(seen.faults)))
    assert (found.kind, found.subject) == ("gpu-unusable", "n1 GPU-b")
    assert "GPU is lost" in found.cause
    machine.mend(machine.gpus[1])
    assert findings(await inventory(leader, lambda seen: not seen.faults)) == []


@pytest.mark.provokes("no-gpus")
async def test_a_node_without_a_driver_is_found_with_the_reason(
    new_machine: NewMachine, open_leader: OpenLeader
) -> None:
    new_machine(Gpu("GPU-a"), init=pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    leader = open_leader()
    await leader.announce()
    [found] = findings(await inventory(leader))
    assert (found.kind, found.subject) == ("no-gpus", "n1")
    assert "the NVIDIA driver is not loaded" in found.cause


WELL = 300_500, 54, 1980, 2619, 0


def closed_by(world: World) -> list[Finding]:
    [sample] = world.node_samples.values()
    commit(world, gpu_closures.by_health(world, sample, NOW))
    known = FleetKnown({"state": "connected", "agents": {}}, has_leader=True)
    return list(diagnose_fleet(world, Policy(), known, NOW))


@pytest.mark.provokes("gpu-closed")
@pytest.mark.parametrize(
    ("broken", "cause"),
    [
        ({"xids": [119, 31]}, "XID 119"),
        ({"remap_pending": True}, "row remap pending"),
        ({"health": (*WELL[:4], 1)}, "1 uncorrectable memory errors"),
        ({"recovery": 1}, "the driver asks for: reset"),
    ],
)
async def test_a_gpu_whose_driver_asks_for_a_reset_is_closed_until_it_is_mended(
    new_machine: NewMachine, open_leader: OpenLeader, broken: dict[str, Any], cause: str
) -> None:
    gpu = Gpu("GPU-a", health=WELL, recovery=0, remap_pending=False)
    machine = new_machine(gpu)
    leader, world = open_leader(), a_world(a_device("GPU-a", simulated=False))
    await leader.announce()
    world.measure((), [await next_node_sample(leader)])
    assert closed_by(world) == []
    for name, value in broken.items():
        setattr(gpu, name, value)
    machine.apply()
    world.measure((), [await next_node_sample(leader)])
    [found] = closed_by(world)
    assert (found.kind, found.subject, cause in found.cause) == ("gpu-closed", "n1/gpu0", True)
    machine.lose(gpu)
    while (await next_node_sample(leader)).gpus:
        pass
    gpu.health, gpu.recovery, gpu.remap_pending, gpu.xids = WELL, 0, False, []
    machine.mend(gpu)
    while not (sample := await next_node_sample(leader)).gpus:
        pass
    world.measure((), [sample])
    assert closed_by(world) == []


@pytest.mark.parametrize("xid", [13, 31, 43, 94])
async def test_an_error_of_an_application_closes_no_gpu(
    new_machine: NewMachine, open_leader: OpenLeader, xid: int
) -> None:
    new_machine(Gpu("GPU-a", health=WELL, xids=[xid]))
    leader, world = open_leader(), a_world(a_device("GPU-a", simulated=False))
    await leader.announce()
    world.measure((), [await next_node_sample(leader)])
    assert closed_by(world) == []
