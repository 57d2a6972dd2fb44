from gpubroker_server.core.domain.lease import LeaseState
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import NodeName, TaskId

from tests.builders import GIB, NOW, a_device, a_task, a_world, check_ledger, holding, key, let_go, submit


def test_a_world_knows_its_devices_by_node_and_samples_them_now() -> None:
    world = a_world(a_device("gpu0"), a_device("gpu1", "n2"))
    assert world.by_node == {"n1": [key("gpu0")], "n2": [key("n2/gpu1")]}
    assert all(ledger.sampled_at == NOW for ledger in world.ledgers.values())


def test_a_holding_counts_on_its_device_and_on_its_node() -> None:
    world = a_world(holding(a_task("low", gpu_mb=60 * GIB, cpu=2.0), "gpu0"))
    assert world.ledgers[key("gpu0")].free_mb() == 20 * GIB
    assert world.use[NodeName("n1")].cpu == 2.0
    check_ledger(world)


def test_a_preempted_run_is_pending_again_and_its_memory_is_free() -> None:
    world = a_world(holding(a_task("low", gpu_mb=60 * GIB), "gpu0"))
    let_go(world, "low")
    assert world.tasks[TaskId("low")].state is TaskState.PENDING
    assert world.ledgers[key("gpu0")].free_mb() == 80 * GIB
    assert LeaseState.HELD not in {lease.state for run in world.leases.values() for lease in run.values()}


def test_a_submitted_task_waits_in_the_queue() -> None:
    world = a_world()
    submit(world, a_task("one"))
    assert len(world.queue) == 1
