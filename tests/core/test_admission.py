"""What is refused at the door, and how it is put."""

from typing import Any

import pytest

from service.core.admission import Refusal, check
from service.core.need import need_mb
from service.core.policy import Policy
from tests.builders import GIB, a_demand, a_device, a_node

NODES = (a_node("n1", cpu=16.0, memory_mb=64 * GIB), a_node("n2", cpu=64.0, memory_mb=32 * GIB))
DEVICES = (
    a_device("gpu0", "n1", mb=24 * GIB, kind="L4"),
    a_device("gpu0", "n2", mb=80 * GIB, reserve_mb=2 * GIB, kind="H100"),
    a_device("gpu1", "n2", mb=80 * GIB, reserve_mb=2 * GIB, kind="H100"),
)
POLICY = Policy(custom_limits=(("licence", 4.0),))


def refused(**demand: Any) -> Refusal:
    refusal = check(a_demand(**demand), DEVICES, NODES, POLICY)
    assert refusal is not None
    return refusal


def test_a_demand_larger_than_any_device_is_refused_and_the_largest_device_is_named():
    refusal = refused(gpu_mb=79 * GIB)
    assert (refusal.code, refusal.field) == ("exceeds-capacity", "gpu_mb")
    assert refusal.message == (
        "79.0 GiB on one GPU exceed the largest, which offers 78.0 GiB of H100 n2/gpu1; "
        "ask for less per GPU and for more GPUs, or add a larger device"
    )


def test_a_demand_of_exactly_what_may_be_leased_is_accepted():
    assert check(a_demand(gpu_mb=78 * GIB, gpus=2), DEVICES, NODES, POLICY) is None


def test_what_was_declared_to_be_used_by_others_is_offered_to_nobody():
    device = a_device("gpu0", "n1", mb=80 * GIB, declared_foreign_mb=2 * GIB)
    assert check(a_demand(gpu_mb=78 * GIB), [device], NODES, POLICY) is None
    assert check(a_demand(gpus=1), [device], NODES, POLICY) is None
    assert check(a_demand(gpu_mb=79 * GIB), [device], NODES, POLICY) is not None
    taken = a_device("gpu0", "n1", mb=GIB, declared_foreign_mb=2 * GIB)
    assert check(a_demand(gpus=1), [taken], NODES, POLICY) is not None


def test_more_gpus_of_a_size_than_any_node_has_are_refused():
    refusal = refused(gpu_mb=30 * GIB, gpus=3)
    assert (refusal.code, refusal.field) == ("exceeds-capacity", "gpus")
    assert "3 GPUs of 30.0 GiB on one node: the node with the most has 2 (n2)" in refusal.message


def test_more_whole_gpus_than_any_node_has_are_refused():
    assert "3 GPUs on one node" in refused(gpus=3).message


def test_a_gpu_is_refused_where_no_node_has_one():
    refusal = check(a_demand(gpus=1), (), NODES, POLICY)
    assert refusal is not None
    assert refusal.field == "gpus"
    assert "no node has one" in refusal.message


def test_more_than_one_gpu_as_a_fraction_is_refused():
    assert refused(gpu_fraction=1.5).field == "gpu_fraction"


@pytest.mark.parametrize(
    ("demand", "field"),
    [
        ({"cpu": 65.0}, "cpu"),
        ({"memory_mb": 65 * GIB}, "memory_mb"),
        ({"cpu": 17.0, "memory_mb": 33 * GIB}, "memory_mb"),
    ],
)
def test_what_no_node_can_give_beside_its_gpus_is_refused(demand: dict[str, Any], field: str):
    refusal = refused(**demand)
    assert (refusal.code, refusal.field) == ("exceeds-capacity", field)


def test_cpu_counts_on_the_nodes_that_have_enough_such_gpus():
    refusal = refused(gpu_mb=70 * GIB, memory_mb=40 * GIB)
    assert refusal.field == "memory_mb"
    assert "largest node with 1 such GPUs, n2" in refusal.message
    assert check(a_demand(gpu_mb=20 * GIB, memory_mb=40 * GIB), DEVICES, NODES, POLICY) is None


def test_an_unknown_custom_resource_is_refused_by_name():
    refusal = refused(custom={"dongle": 1.0})
    assert (refusal.code, refusal.field) == ("unknown-resource", "custom/dongle")
    assert "configured are: licence" in refusal.message


def test_more_of_a_custom_resource_than_the_cluster_has_is_refused():
    refusal = refused(custom={"licence": 5.0})
    assert (refusal.code, refusal.field) == ("exceeds-capacity", "custom/licence")
    assert check(a_demand(custom={"licence": 4.0}), DEVICES, NODES, POLICY) is None


def test_every_size_passes_while_no_node_is_known():
    assert check(a_demand(gpus=64, gpu_mb=900 * GIB, cpu=1e6), (), (), POLICY) is None


def test_a_node_that_is_away_still_counts_because_it_may_come_back():
    away = a_node("n1", ready=False, cordoned=True)
    assert check(a_demand(gpu_mb=20 * GIB), DEVICES[:1], [away], POLICY) is None


def test_a_device_whose_node_is_unknown_is_no_place_to_run():
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
def test_what_a_demand_comes_to_on_a_device_of_100_mib(demand: dict[str, Any], mb: int | None):
    assert need_mb(a_demand(**demand), a_device(mb=110, reserve_mb=10)) == mb
