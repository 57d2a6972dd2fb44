"""What a submit refuses."""

from typing import Any

import pytest
from gpubroker.wire.policy import TaskMaximum
from gpubroker_server.core.admission.feasibility import (
    check,
    check_priority,
    check_times,
    new_nodes_could_take,
    waits_for_a_node,
)
from gpubroker_server.core.domain.demand import PlacementConstraints, need_mb
from gpubroker_server.core.domain.policy import CustomLimit, Policy
from gpubroker_server.core.domain.reasons import Refusal
from gpubroker_server.core.domain.units import Mib, Seconds
from msgspec.structs import replace

from tests.builders import GIB, a_demand, a_device, a_node

NODES = (a_node("n1", cpu=16.0, memory_mb=64 * GIB), a_node("n2", cpu=64.0, memory_mb=32 * GIB))
DEVICES = (
    a_device("gpu0", "n1", mb=24 * GIB, kind="L4"),
    a_device("gpu0", "n2", mb=80 * GIB, reserve_mb=2 * GIB, kind="H100"),
    a_device("gpu1", "n2", mb=80 * GIB, reserve_mb=2 * GIB, kind="H100"),
)
POLICY = Policy(custom_limits=(CustomLimit("licence", 4.0),))


def refused(**demand: Any) -> Refusal:
    refusal = check(a_demand(**demand), DEVICES, NODES, POLICY)
    assert refusal is not None
    return refusal


def test_demand_larger_than_any_device_is_refused_naming_the_largest() -> None:
    refusal = refused(gpu_mb=79 * GIB)
    assert (refusal.code, refusal.field) == ("exceeds-capacity", "gpu_mb")
    assert refusal.message == (
        "79.0 GiB on one GPU exceed the largest, which offers 78.0 GiB of H100 n2/gpu1; "
        "ask for less per GPU and for more GPUs, or add a larger device"
    )


def test_a_demand_of_exactly_what_may_be_leased_is_accepted() -> None:
    assert check(a_demand(gpu_mb=78 * GIB, gpus=2), DEVICES, NODES, POLICY) is None


def test_declared_foreign_memory_is_not_offered() -> None:
    device = a_device("gpu0", "n1", mb=80 * GIB, declared_foreign_mb=2 * GIB)
    assert check(a_demand(gpu_mb=78 * GIB), [device], NODES, POLICY) is None
    assert check(a_demand(gpus=1), [device], NODES, POLICY) is None
    assert check(a_demand(gpu_mb=79 * GIB), [device], NODES, POLICY) is not None
    taken = a_device("gpu0", "n1", mb=GIB, declared_foreign_mb=2 * GIB)
    assert check(a_demand(gpus=1), [taken], NODES, POLICY) is not None


def test_more_gpus_of_a_size_than_any_node_has_are_refused() -> None:
    refusal = refused(gpu_mb=30 * GIB, gpus=3)
    assert (refusal.code, refusal.field) == ("exceeds-capacity", "gpus")
    assert "3 GPUs of 30.0 GiB on one node: the node with the most has 2 (n2)" in refusal.message


def test_more_whole_gpus_than_any_node_has_are_refused() -> None:
    assert "3 GPUs on one node" in refused(gpus=3).message


def test_a_gpu_is_refused_where_no_node_has_one() -> None:
    refusal = check(a_demand(gpus=1), (), NODES, POLICY)
    assert refusal is not None
    assert refusal.field == "gpus"
    assert "no node has one" in refusal.message


def test_more_than_one_gpu_as_a_fraction_is_refused() -> None:
    assert refused(gpu_fraction=1.5).field == "gpu_fraction"


@pytest.mark.parametrize(
    ("demand", "field"),
    [
        ({"cpu": 65.0}, "cpu"),
        ({"memory_mb": 65 * GIB}, "memory_mb"),
        ({"cpu": 17.0, "memory_mb": 33 * GIB}, "memory_mb"),
    ],
)
def test_what_no_node_can_give_beside_its_gpus_is_refused(demand: dict[str, Any], field: str) -> None:
    refusal = refused(**demand)
    assert (refusal.code, refusal.field) == ("exceeds-capacity", field)


def test_cpu_counts_on_the_nodes_that_have_enough_such_gpus() -> None:
    refusal = refused(gpu_mb=70 * GIB, memory_mb=40 * GIB)
    assert refusal.field == "memory_mb"
    assert "largest node with 1 such GPUs, n2" in refusal.message
    assert check(a_demand(gpu_mb=20 * GIB, memory_mb=40 * GIB), DEVICES, NODES, POLICY) is None


def test_an_unknown_custom_resource_is_refused_by_name() -> None:
    refusal = refused(custom={"dongle": 1.0})
    assert (refusal.code, refusal.field) == ("unknown-resource", "custom/dongle")
    assert "configured are: licence" in refusal.message


def test_more_of_a_custom_resource_than_the_cluster_has_is_refused() -> None:
    refusal = refused(custom={"licence": 5.0})
    assert (refusal.code, refusal.field) == ("exceeds-capacity", "custom/licence")
    assert check(a_demand(custom={"licence": 4.0}), DEVICES, NODES, POLICY) is None


def test_every_size_passes_while_no_node_is_known() -> None:
    assert check(a_demand(gpus=64, gpu_mb=900 * GIB, cpu=1e6), (), (), POLICY) is None


def test_a_node_that_is_away_still_counts_because_it_may_come_back() -> None:
    away = a_node("n1", ready=False, cordoned=True)
    assert check(a_demand(gpu_mb=20 * GIB), DEVICES[:1], [away], POLICY) is None


def test_a_device_whose_node_is_unknown_is_no_place_to_run() -> None:
    orphan = a_device("gpu0", "n9", mb=90 * GIB)
    refusal = check(a_demand(gpu_mb=85 * GIB), (*DEVICES, orphan), NODES, POLICY)
    assert refusal is not None
    assert refusal.field == "gpu_mb"


@pytest.mark.parametrize(
    ("demand", "mb"),
    [
        ({"gpu_mb": 5}, 5),
        ({"gpu_mb": 101}, None),
        ({"gpus": 1}, 100),
        ({"gpu_mb": 5, "exclusive": True}, 100),
        ({"gpu_mb": 101, "exclusive": True}, None),
        ({"gpu_fraction": 0.255}, 25),
        ({"gpu_fraction": 1.0}, 100),
        ({"gpu_fraction": 0.001}, 1),
        ({"gpu_fraction": 1.01}, None),
    ],
)
def test_what_a_demand_comes_to_on_a_device_of_100_mib(demand: dict[str, Any], mb: int | None) -> None:
    assert need_mb(a_demand(**demand), a_device(mb=110, reserve_mb=10)) == mb


@pytest.mark.parametrize(
    ("field", "asked"),
    [
        ("gpus", {"gpus": 3, "gpu_mb": GIB}),
        ("gpu_mb", {"gpu_mb": 5 * GIB}),
        ("cpu", {"cpu": 9.0}),
        ("memory_mb", {"memory_mb": 9 * GIB}),
    ],
)
def test_more_than_one_task_may_have_is_refused_however_much_there_is(
    field: str, asked: dict[str, Any]
) -> None:
    most = TaskMaximum(gpus=2, gpu_mb=Mib(4 * GIB), cpu=8.0, memory_mb=Mib(8 * GIB))
    refusal = check(a_demand(**asked), DEVICES, NODES, Policy(maximum=most))
    assert refusal is not None
    assert (refusal.code, refusal.field) == ("exceeds-maximum", field)
    assert "one task may have at most" in refusal.message
    allowed = a_demand(gpus=2, gpu_mb=4 * GIB, cpu=8.0, memory_mb=8 * GIB)
    assert check(allowed, DEVICES, NODES, Policy(maximum=most)) is None


@pytest.mark.parametrize("asked", [{"gpus": 1}, {"gpu_fraction": 0.1}, {"gpu_mb": GIB, "exclusive": True}])
def test_where_the_size_per_gpu_is_limited_it_must_be_stated(asked: dict[str, Any]) -> None:
    refusal = check(a_demand(**asked), DEVICES, NODES, Policy(maximum=TaskMaximum(gpu_mb=Mib(4 * GIB))))
    assert refusal is not None
    assert (refusal.code, refusal.field) == ("exceeds-maximum", "gpu_mb")
    assert "state the size with gpu_mb" in refusal.message


def test_what_each_node_has_for_itself_is_no_more_than_that_for_one_task() -> None:
    policy = Policy(custom_limits=(CustomLimit("fpga", 2.0, per_node=True),))
    assert check(a_demand(cpu=1.0, custom={"fpga": 2.0}), DEVICES, NODES, policy) is None
    refusal = check(a_demand(cpu=1.0, custom={"fpga": 3.0}), DEVICES, NODES, policy)
    assert refusal is not None
    assert "3 of 'fpga' exceed each node's limit of 2" in refusal.message


def test_what_is_kept_for_higher_priorities_is_refused_with_the_threshold() -> None:
    policy = Policy(custom_limits=(CustomLimit("seat", 2.0, priority_threshold=70),))
    demand = a_demand(cpu=1.0, custom={"seat": 1.0})
    assert check_priority(demand, 70, policy) is None
    assert check_priority(a_demand(cpu=1.0), 10, policy) is None
    refusal = check_priority(demand, 69, policy)
    assert refusal is not None
    assert (refusal.code, refusal.field) == ("priority-too-low", "custom/seat")
    assert "'seat' is for tasks of priority 70 and above, and this one has 69" in refusal.message


KNOWN = (
    a_device("gpu0", "n1", mb=24 * GIB, kind="NVIDIA L40S", power=300),
    a_device("gpu0", "n2", mb=80 * GIB, kind="NVIDIA H100 80GB HBM3", power=2000, context_mb=512),
)
ZONES = (a_node("n1", labels=(("zone", "a"),)), a_node("n2", labels=(("zone", "b"),)))


@pytest.mark.parametrize(
    ("where", "field", "said"),
    [
        (
            PlacementConstraints(kinds=("A100", "L40")),
            "kinds",
            "no GPU matches kinds A100, L40; the GPUs are NVIDIA H100 80GB",
        ),
        (PlacementConstraints(min_power=2001), "min_power", "no GPU matches power 2001 or more"),
        (
            PlacementConstraints(min_device_mb=Mib(81 * GIB)),
            "min_device_mb",
            "no GPU matches memory 81.0 GiB or more",
        ),
        (
            PlacementConstraints(nodes=(("zone", ("c",)),)),
            "nodes",
            "no node matches zone=c; the nodes are n1 (zone=a), n2 (zone=b)",
        ),
        (
            PlacementConstraints(kinds=("H100",), nodes=(("zone", ("a",)),)),
            "kinds",
            "the GPUs are NVIDIA L40S (power 300,",
        ),
    ],
)
def test_what_no_gpu_or_node_is_is_refused_with_what_there_is(
    where: PlacementConstraints, field: str, said: str
) -> None:
    refusal = check(a_demand(gpus=1, where=where), KNOWN, ZONES, POLICY)
    assert refusal is not None
    assert (refusal.code, refusal.field) == ("no-matching-device", field)
    assert said in refusal.message


@pytest.mark.parametrize(
    "where",
    [
        PlacementConstraints(kinds=("h100",)),
        PlacementConstraints(
            kinds=("A100", "H100 80GB"),
            min_power=2000,
            min_device_mb=Mib(80 * GIB),
            nodes=(("zone", ("b",)),),
        ),
        PlacementConstraints(nodes=(("node", ("n1", "n9")),)),
        PlacementConstraints(prefer_kinds=("A100",), prefer_nodes=(("zone", ("c",)),)),
    ],
)
def test_what_some_gpu_is_is_accepted_and_a_wish_refuses_nothing(where: PlacementConstraints) -> None:
    assert check(a_demand(gpus=1, where=where), KNOWN, ZONES, POLICY) is None


def test_what_a_process_costs_comes_on_top_of_a_stated_size() -> None:
    assert need_mb(a_demand(gpu_mb=10 * GIB), KNOWN[1]) == 10 * GIB + 512
    assert need_mb(a_demand(gpus=1), KNOWN[1]) == 80 * GIB
    assert need_mb(a_demand(gpu_fraction=0.5), KNOWN[1]) == 40 * GIB
    refusal = check(a_demand(gpu_mb=80 * GIB), KNOWN, ZONES, POLICY)
    assert refusal is not None
    assert (
        "offers 79.5 GiB of NVIDIA H100 80GB HBM3 n2/gpu0 beside 0.5 GiB for each process" in refusal.message
    )


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"timeout_seconds": 3601.0}, "timeout_seconds 3601: one task may have at most 3600 here"),
        ({"max_retries": 4}, "max_retries 4: one task may have at most 3 here"),
        ({"grace_seconds": 61.0}, "grace_seconds 61: one task may have at most 60 here"),
    ],
)
def test_a_run_may_not_take_repeat_or_linger_longer_than_is_allowed(asked: dict[str, Any], said: str) -> None:
    policy = Policy(
        maximum=TaskMaximum(timeout_seconds=Seconds(3600.0), max_retries=3, grace_seconds=Seconds(60.0))
    )
    usual = {"timeout_seconds": None, "max_retries": 0, "grace_seconds": Seconds(30.0)}
    refusal = check_times(**{**usual, **asked}, policy=policy)
    assert refusal is not None
    assert (refusal.code, refusal.field) == ("exceeds-maximum", next(iter(asked)))
    assert refusal.message.startswith(said)


def test_times_at_the_maximum_and_no_time_limit_are_allowed() -> None:
    policy = Policy(
        maximum=TaskMaximum(timeout_seconds=Seconds(3600.0), max_retries=3, grace_seconds=Seconds(60.0))
    )
    assert check_times(Seconds(3600.0), 3, Seconds(60.0), policy) is None
    assert check_times(None, 0, Seconds(30.0), policy) is None
    assert check_times(Seconds(3600.0), 3, Seconds(60.0), Policy()) is None


def test_with_an_autoscaler_new_nodes_could_take_what_no_limit_forbids() -> None:
    large, gang = a_demand(gpus=9), a_demand(bundles=(a_demand(gpus=4), a_demand(gpus=4)))
    assert not new_nodes_could_take(large, POLICY)
    named = replace(POLICY, autoscaler="keda")
    assert new_nodes_could_take(large, named)
    assert new_nodes_could_take(gang, named)
    assert not new_nodes_could_take(a_demand(cpu=1.0, custom=(("licence", 5.0),)), named)
    small = replace(named, maximum=TaskMaximum(gpus=6))
    assert not new_nodes_could_take(large, small)
    assert not new_nodes_could_take(gang, small), "the sum of its ranks counts"
    assert waits_for_a_node("no GPU", named) == "it waits for a node that autoscaler keda may add: no GPU"
