"""GPUs on which nothing new starts: by what their driver says, by failing runs, and by an operator's word."""

from typing import Any

import pytest
from gpubroker_server.core.domain.decisions import Request
from gpubroker_server.core.domain.device import Closure, Device, GpuHealth, NodeSample
from gpubroker_server.core.domain.orders import NodeReport, ReportedDevice
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import Instant, Mib, NodeName, TaskId
from gpubroker_server.core.lifecycle import gpu_closures
from gpubroker_server.core.lifecycle.change_requests import carry_out
from gpubroker_server.core.lifecycle.reconcile import InventoryRules, reconcile
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import NOW, a_device, a_node, a_world, commit, key

WELL = GpuHealth(300.5, 54, 1980, 2619, 0, None, None, remap_pending=False, recovery="")
CANNOT_TELL = GpuHealth(300.5, 54, 1980, 2619)


def shows(world: World, health: GpuHealth, uuid: str = "gpu0", at: float = NOW) -> None:
    sample = NodeSample(NodeName("n1"), Instant(at), 0.1, Mib(100), Mib(50), gpus={uuid: health})
    world.measure((), [sample])
    commit(world, gpu_closures.by_health(world, sample, Instant(at)))


def the(world: World, uuid: str = "gpu0") -> Device:
    return world.ledgers[key(uuid)].device


def asks(world: World, what: str, **fields: Any) -> None:
    about = {"by": "olga", "reason": "", **fields}
    request = Request("r1", TaskId(key("gpu0")), "ops", what, about, NOW)
    world.add_request(request)
    commit(world, carry_out(world, request, NOW, Policy()))


@pytest.mark.parametrize("xid", [48, 79, 95, 119])
def test_a_fatal_xid_closes_the_gpu_and_only_it(xid: int) -> None:
    world = a_world(a_device("gpu0"), a_device("gpu1"))
    shows(world, GpuHealth(xid=xid, fatal_xid=xid))
    closure = the(world).closure
    assert closure is not None
    assert (closure.cause, closure.detail, closure.since) == ("xid", str(xid), NOW)
    assert closure.reason.startswith(f"XID {xid}: ")
    assert (the(world).is_closed, the(world, "gpu1").is_closed) == (True, False)


@pytest.mark.parametrize("xid", [13, 31, 43, 45, 94])
def test_an_xid_of_an_application_changes_nothing(xid: int) -> None:
    world = a_world(a_device("gpu0"))
    shows(world, GpuHealth(xid=xid))
    assert the(world) == a_device("gpu0")


@pytest.mark.parametrize(
    ("health", "cause"),
    [
        (GpuHealth(ecc_errors=2), "ecc"),
        (GpuHealth(remap_pending=True), "remap"),
        (GpuHealth(recovery="reset"), "recovery"),
    ],
)
def test_a_sign_of_the_driver_closes_the_gpu_until_it_is_gone(health: GpuHealth, cause: str) -> None:
    world = a_world(a_device("gpu0"))
    shows(world, health)
    closure = the(world).closure
    assert closure is not None
    assert closure.cause == cause
    shows(world, CANNOT_TELL, at=NOW + 1)
    assert the(world).is_closed, "a driver that cannot tell proves nothing"
    shows(world, WELL, at=NOW + 2)
    assert the(world).closure is None


def test_a_closed_gpu_keeps_its_first_reason_and_writes_nothing_more() -> None:
    world = a_world(a_device("gpu0"))
    shows(world, GpuHealth(ecc_errors=2))
    before = the(world)
    shows(world, GpuHealth(ecc_errors=3), at=NOW + 1)
    shows(world, GpuHealth(ecc_errors=3, fatal_xid=95), at=NOW + 2)
    assert the(world) == before


def test_instances_are_closed_with_their_gpu() -> None:
    world = a_world(a_device("gpu0", split=True), a_device("MIG-1", parent="gpu0"))
    shows(world, GpuHealth(fatal_xid=48))
    assert (the(world).is_closed, the(world, "MIG-1").is_closed) == (True, True)


def test_a_gpu_that_a_sample_leaves_out_is_left_as_it_is() -> None:
    world = a_world(a_device("gpu0"))
    shows(world, GpuHealth(fatal_xid=48))
    shows(world, WELL, uuid="another", at=NOW + 1)
    assert the(world).is_closed


def test_operator_reopens_a_gpu_with_its_fault_and_another_one_closes_it() -> None:
    world = a_world(a_device("gpu0"))
    shows(world, GpuHealth(ecc_errors=2))
    asks(world, "reopen_gpu")
    shows(world, GpuHealth(ecc_errors=2), at=NOW + 1)
    assert not the(world).is_closed
    shows(world, GpuHealth(ecc_errors=2, fatal_xid=119), at=NOW + 2)
    assert the(world).is_closed
    asks(world, "reopen_gpu")
    shows(world, WELL, at=NOW + 3)
    assert the(world).closure is None
    shows(world, GpuHealth(fatal_xid=119), at=NOW + 4)
    assert the(world).is_closed, "after a repair the same fault counts again"


def test_an_operators_closure_is_ended_by_an_operator_only() -> None:
    world = a_world(a_device("gpu0"))
    asks(world, "close_gpu", reason="a fan is broken")
    closure = the(world).closure
    assert closure == Closure("operator", "", "a fan is broken", NOW, "olga")
    shows(world, WELL, at=NOW + 1)
    hear(world, boot_id="another boot")
    assert the(world).is_closed
    asks(world, "reopen_gpu")
    assert the(world).closure is None


def hear(world: World, *uuids: str, **node: Any) -> None:
    devices = tuple(
        ReportedDevice(uuid, "H100", at, Mib(80 * 1024), True) for at, uuid in enumerate(uuids or ("gpu0",))
    )
    seen = NodeReport(a_node(**node), () if uuids == ("",) else devices, (), NOW)
    commit(world, reconcile(world, seen, NOW, Policy(), InventoryRules("test")))


@pytest.mark.parametrize("how", ["reboot", "lost and back"])
def test_a_reset_reopens_what_the_service_has_closed(how: str) -> None:
    world = a_world(a_device("gpu0"), a_node())
    shows(world, GpuHealth(fatal_xid=79))
    hear(world)
    assert the(world).is_closed, "an answer of the same boot is no reset"
    if how == "reboot":
        hear(world, boot_id="another boot", incarnation="b.1")
    else:
        hear(world, "")
        assert (the(world).present, the(world).is_closed) == (False, True)
        hear(world)
    assert (the(world).present, the(world).closure) == (True, None)


def test_a_new_agent_of_the_same_boot_reopens_nothing() -> None:
    world = a_world(a_device("gpu0"), a_node())
    shows(world, GpuHealth(fatal_xid=119))
    hear(world, incarnation="b.1")
    assert the(world).is_closed
    shows(world, WELL, at=NOW + 1)
    assert the(world).closure is None, "its driver says that no recovery is needed"


def test_requests_about_unknown_or_open_gpus_change_no_gpu() -> None:
    world = a_world(a_device("gpu0"))
    asks(world, "reopen_gpu")
    request = Request("r2", TaskId("gone"), "ops", "close_gpu", {"by": "olga"}, NOW)
    world.add_request(request)
    commit(world, carry_out(world, request, NOW, Policy()))
    assert the(world) == a_device("gpu0")


def test_a_closure_of_a_gpu_that_a_world_does_not_have_is_passed_over() -> None:
    world, other = a_world(a_device("gpu0")), a_world(a_device("gpu1"))
    sample = NodeSample(
        NodeName("n1"), NOW, 0.1, Mib(100), Mib(50), gpus={"gpu0": GpuHealth(xid=79, fatal_xid=79)}
    )
    [decision] = gpu_closures.by_health(world, sample, NOW)
    commit(other, replace(decision, devices=()))
    assert other.ledgers.keys() == {key("gpu1")}
