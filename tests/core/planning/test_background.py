"""Background work takes no more of a part of the fleet than fleet control lets it; a full disk takes none."""

from math import inf
from typing import Any

from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.reasons import Reason
from gpubroker_server.core.domain.task import Dependency, Placement, TaskState
from gpubroker_server.core.domain.units import Instant, NodeName, TaskId
from gpubroker_server.core.explain.explain import explain
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.planning.forecasts.reservations import Basis, Forecast
from gpubroker_server.core.planning.plan_cache import PlanCache
from gpubroker_server.core.world.background import BackgroundRoom
from gpubroker_server.core.world.world import World

from tests.builders import GIB, NOW, a_device, a_node, a_task, a_world, commit, holding, submit

POLICY = Policy()
N1, N2 = NodeName("n1"), NodeName("n2")
EVERYWHERE = {N1: ("all",), N2: ("all", "node:n2")}


def a_fleet() -> World:
    nodes = [
        part for name in (N1, N2) for part in (a_node(name), a_device("gpu0", name), a_device("gpu1", name))
    ]
    return a_world(*nodes)


def tasks(count: int, **fields: Any) -> list[Any]:
    return [a_task(f"t{n}", **{"priority": 20, "gpu_mb": 20 * GIB, **fields}) for n in range(count)]


def started(world: World, cache: PlanCache | None = None) -> dict[str, str]:
    """Task -> node of all that run once a cycle has been planned and committed."""
    plan = plan_cycle(world, POLICY, Instant(NOW), budget=10_000, cache=cache)
    commit(world, plan.decisions)
    return {task.id: task.node or "" for task in world.tasks.values() if task.state is TaskState.ADMITTED}


def reason(world: World, task: str) -> tuple[Reason | None, str]:
    told = explain(world, TaskId(task), POLICY, Instant(NOW))
    return told.reason, told.message


def test_a_cycle_starts_no_more_than_is_left() -> None:
    world = a_fleet()
    world.control(BackgroundRoom({"all": 50 * GIB, "node:n2": 999 * GIB}, EVERYWHERE), {})
    submit(world, *tasks(6))
    assert len(started(world)) == 3  # the third takes more than is left
    assert started(world) == started(world)
    assert reason(world, "t5") == (
        Reason.BACKGROUND_LIMITED,
        "background and idle work may take no more GPU memory now on n1, n2; see `gpubroker targets`",
    )


def test_higher_bands_and_work_without_gpus_are_not_held_back() -> None:
    world = a_fleet()
    world.control(BackgroundRoom({"all": 0, "node:n2": 0}, EVERYWHERE), {})
    submit(world, a_task("batch", priority=40, gpu_mb=GIB), a_task("cpu", priority=5, cpu=1.0, gpus=0))
    submit(world, a_task("background", priority=39, gpu_mb=GIB))
    assert sorted(started(world)) == ["batch", "cpu"]


def test_room_that_background_work_waits_for_leaves_gpus_to_higher_bands() -> None:
    """The background task is ahead because an urgent task runs after it. It may take no GPU, and asks for
    none."""
    world = a_world(a_node("n1", cpu=2.0), a_device("gpu0", "n1"), holding(a_task("run", cpu=2.0), node="n1"))
    world.control(BackgroundRoom({"all": 0}, {N1: ("all",)}), {})
    first = a_task("background", priority=5, cpu=2.0, gpus=0)
    heir = a_task("urgent", priority=80, after=(Dependency(first.id),), awaits=True)
    submit(world, first, heir, a_task("normal", priority=50, gpu_mb=GIB))
    at = Instant(NOW + 60.0)
    kept = Forecast(first.id, (Placement(N1, ()),), at, at, Instant(inf), 0, Basis.GUESS)
    plan = plan_cycle(world, POLICY, NOW, budget=10_000, forecasts=[kept])
    assert [decision.subject for decision in plan.decisions] == ["normal"]


def test_a_part_that_is_closed_leaves_the_rest_open() -> None:
    world = a_fleet()
    world.control(BackgroundRoom({"all": 999 * GIB, "node:n2": 0}, EVERYWHERE), {})
    submit(world, *tasks(9))
    assert set(started(world).values()) == {N1}
    assert reason(world, "t8")[0] is Reason.WAITING_FOR_MEMORY


def test_raised_background_limit_starts_tasks_the_planner_refused_before() -> None:
    """The planner does not repeat a refusal that it remembers from before the limit was raised."""
    world, cache = a_fleet(), PlanCache()
    world.control(BackgroundRoom({"all": 0, "node:n2": 0}, EVERYWHERE), {})
    submit(world, *tasks(2))
    assert started(world, cache) == {}
    world.control(BackgroundRoom(), {})
    assert sorted(started(world, cache)) == ["t0", "t1"]


def test_nothing_starts_on_a_node_with_a_full_disk() -> None:
    world, cache = a_fleet(), PlanCache()
    world.control(BackgroundRoom(), {N1: "/scratch is 71 % full", N2: "/ is 90 % full"})
    submit(world, a_task("t", priority=95, gpu_mb=GIB), a_task("cpu", gpus=0, cpu=1.0))
    assert started(world, cache) == {}
    told = reason(world, "t")
    assert told[0] is Reason.DISK_FULL
    assert "(n1: /scratch is 71 % full, n2: / is 90 % full)" in told[1]
    world.control(BackgroundRoom(), {N1: "/scratch is 71 % full"})
    assert started(world, cache) == {"t": N2, "cpu": N2}
    assert {finding.finding.verdict for finding in explain_devices(world)} >= {"disk_full"}


def explain_devices(world: World) -> list[Any]:
    submit(world, a_task("later", gpu_mb=80 * GIB))
    return list(explain(world, TaskId("later"), POLICY, Instant(NOW)).devices)
