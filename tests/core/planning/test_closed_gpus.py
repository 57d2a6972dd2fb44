"""On a closed GPU nothing new starts, nothing is preempted for a start, and what runs there goes on."""

from gpubroker_server.core.domain.device import Closure
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import GIB, NOW, a_device, a_task, a_world, commit, holding

CLOSED = Closure("xid", "48", "XID 48", NOW)


def planned(world: World) -> None:
    commit(world, plan_cycle(world, Policy(), NOW).decisions)


def where(world: World, task: str) -> list[str]:
    return [lease.device for lease in world.leases_of(world.tasks[TaskId(task)])]


def test_a_task_starts_on_an_open_gpu_beside_a_closed_one() -> None:
    tasks = [a_task(f"t{n}", gpu_mb=30 * GIB) for n in range(3)]
    world = a_world(a_device("gpu0", closure=CLOSED), a_device("gpu1"), *tasks)
    planned(world)
    assert {name for n in range(3) for name in where(world, f"t{n}")} == {"test/n1/gpu1"}
    assert len(world.active) == 2


def test_no_gang_and_no_whole_gpu_task_starts_on_a_closed_gpu() -> None:
    world = a_world(
        a_device("gpu0", closure=CLOSED),
        a_device("gpu1"),
        a_task("wide", gpus=2, gpu_mb=GIB),
        a_task("one", gpus=1),
    )
    planned(world)
    assert (where(world, "wide"), where(world, "one")) == ([], ["test/n1/gpu1"])


def test_nothing_is_preempted_on_a_closed_gpu_and_its_runs_go_on() -> None:
    run = holding(a_task("run", gpu_mb=60 * GIB, priority=10), "gpu0")
    world = a_world(a_device("gpu0", closure=CLOSED), run, a_task("new", gpu_mb=60 * GIB, priority=95))
    planned(world)
    assert world.tasks[TaskId("run")].state is TaskState.RUNNING
    assert where(world, "new") == []


def test_a_reopened_gpu_takes_the_task_that_waited() -> None:
    world = a_world(a_device("gpu0", closure=CLOSED), a_task("new", gpu_mb=GIB))
    planned(world)
    assert where(world, "new") == []
    device = world.ledgers[next(iter(world.ledgers))].device
    world.add_device(replace(device, closure=None, version=device.version + 1))
    planned(world)
    assert where(world, "new") == ["test/n1/gpu0"]
