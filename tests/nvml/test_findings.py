"""What `gpubroker doctor` says of GPUs that a node's agent cannot use, from the driver's answers on."""

import time
from collections.abc import Callable

import pynvml
import pytest
from gpubroker_server.adapters.ray.driver.agents import NodeAgents
from gpubroker_server.core.control.findings.diagnose import FleetKnown, diagnose_fleet
from gpubroker_server.core.control.findings.finding import Finding
from gpubroker_server.core.domain.orders import NodeReport
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import MonotonicSeconds

from tests.builders import NOW, a_world
from tests.contracts.fake_runners import Leader
from tests.nvml.heard import inventory
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
