"""Which tasks can become Ray clusters."""

from typing import Any

import pytest
from gpubroker_server.core.admission.ray_clusters import ray_fault
from gpubroker_server.core.admission.submission import Asked
from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.submission import ItemTerms, RunSpec, SeatTerms
from gpubroker_server.core.domain.units import Mib, TaskId
from msgspec.structs import replace

from tests.core.admission.scenes import admitted, refused

PROGRAM = RunSpec("command", command=("python", "train.py"), ray="private")


def fault_of(spec: RunSpec, demand: Demand, *, shared_allowed: bool = False) -> tuple[str, str] | None:
    fault = ray_fault(spec, demand, shared_allowed=shared_allowed)
    return None if fault is None else (fault.code, fault.field)


def test_node_of_ray_gets_a_cpu_even_beside_gpus() -> None:
    assert admitted(spec=PROGRAM, demand=Asked(gpu_mb=1024)).task.demand.cpu == 1.0
    assert admitted(spec=PROGRAM, demand=Asked(gpu_mb=1024, cpu=0)).task.demand.cpu == 0.0
    assert admitted(spec=replace(PROGRAM, ray=""), demand=Asked(gpu_mb=1024)).task.demand.cpu == 0.0
    assert admitted(spec=replace(PROGRAM, profile="scorer")).task.demand.cpu == 1.0


@pytest.mark.parametrize(
    ("demand", "fault"),
    [
        (Demand(cpu=2.0, memory_mb=Mib(1024)), None),
        (Demand(cpu=0.5), ("whole-cpus", "/resources/cpu")),
        (Demand(memory_mb=Mib(1023)), ("too-little-memory", "/resources/memory_mb")),
        (Demand(bundles=(Demand(), Demand(cpu=1.5))), ("whole-cpus", "/resources/bundles/1/cpu")),
        (Demand(cpu=0.5, bundles=(Demand(),)), None),
    ],
)
def test_private_cluster_needs_whole_cpus_and_room_for_ray_itself(demand: Demand, fault: Any) -> None:
    assert fault_of(PROGRAM, demand) == fault


def test_shared_ray_needs_the_operators_permission() -> None:
    shared = replace(PROGRAM, ray="shared")
    assert fault_of(shared, Demand(cpu=0.5)) == ("ray-not-shared", "/ray")
    assert fault_of(shared, Demand(cpu=0.5), shared_allowed=True) is None


def test_functions_and_workers_cannot_have_a_ray_cluster() -> None:
    id = TaskId("a")
    for spec in (
        replace(PROGRAM, kind="function"),
        replace(PROGRAM, items=ItemTerms(id)),
        replace(PROGRAM, seat=SeatTerms(id)),
    ):
        assert fault_of(spec, Demand()) == ("contradiction", "/ray")


def test_refusal_of_a_cluster_names_the_field() -> None:
    found = refused(spec=PROGRAM, demand=Asked(cpu=0.5))
    assert [(fault.code, fault.field) for fault in found.faults] == [("whole-cpus", "/resources/cpu")]
