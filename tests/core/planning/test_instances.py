"""Instances of a GPU are leased by themselves; a GPU that has some is not."""

from gpubroker_server.core.domain.orders import NodeReport, ReportedDevice
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import Mib, TaskId
from gpubroker_server.core.lifecycle.reconcile import InventoryRules, reconcile
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import GIB, NOW, a_node, a_sample, a_task, a_world, commit, submit

SEEN = (
    ReportedDevice("gpu0", "H100", 0, Mib(80 * GIB), True),
    ReportedDevice("mig0", "H100 MIG", 1, Mib(40 * GIB), True, parent="gpu0"),
    ReportedDevice("mig1", "H100 MIG", 2, Mib(40 * GIB), True, parent="gpu0"),
)


def a_split_gpu() -> World:
    world = a_world()
    rules = InventoryRules("test")
    commit(world, reconcile(world, NodeReport(a_node(), SEEN, (), NOW), NOW, Policy(), rules))
    for uuid in ("gpu0", "mig0", "mig1"):
        world.measure([a_sample(uuid, foreign_mb=None)])
    return world


def places(world: World, **task: object) -> list[str]:
    submit(world, a_task("new", **task))
    commit(world, plan_cycle(world, Policy(), NOW).decisions)
    return [lease.device.rpartition("/")[2] for lease in world.leases_of(world.tasks[TaskId("new")])]


def test_a_task_is_placed_on_an_instance_and_never_on_what_is_split() -> None:
    assert places(a_split_gpu(), gpu_mb=GIB) == ["mig0"]
    assert places(a_split_gpu(), gpus=1) == ["mig0"], "a whole instance is a whole device"
    assert places(a_split_gpu(), gpu_mb=60 * GIB) == []


def test_a_process_sees_one_instance_so_nobody_gets_several() -> None:
    assert places(a_split_gpu(), gpus=2, gpu_mb=GIB) == []


def test_what_is_split_and_has_no_instance_yet_is_not_leased() -> None:
    world = a_world()
    seen = NodeReport(a_node(), (replace(SEEN[0], split=True),), (), NOW)
    commit(world, reconcile(world, seen, NOW, Policy(), InventoryRules("test")))
    world.measure([a_sample("gpu0", foreign_mb=None)])
    assert places(world, gpu_mb=GIB) == []


def test_a_gpu_that_is_whole_again_can_be_leased_again() -> None:
    world = a_split_gpu()
    whole = (SEEN[0],)
    commit(
        world, reconcile(world, NodeReport(a_node(), whole, (), NOW), NOW, Policy(), InventoryRules("test"))
    )
    assert places(world, gpu_mb=60 * GIB) == ["gpu0"]
