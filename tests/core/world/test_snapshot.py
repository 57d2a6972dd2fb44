"""A copy of the World for plans: the same answers, and nothing that goes on."""

from typing import Any

from gpubroker_server.core.domain.task import TaskState, members_of
from gpubroker_server.core.domain.units import Instant, TaskId
from gpubroker_server.core.explain.fit import Component, FleetPlan
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.world.world import World
from msgspec import Struct

from tests.builders import GIB, NOW, a_demand, a_device, a_pledge, a_task, a_world, holding, submit
from tests.core.elastic import at_work, comes
from tests.core.gangs import admit_all
from tests.core.plans import planned


def a_busy_world() -> World:
    """Runs, a run that is stopped for a preemptor, and pending tasks."""
    stops: dict[str, Any] = {"state": TaskState.STOPPING, "stop_deadline_at": Instant(NOW + 30)}
    leaver = holding(a_task("leaver", gpu_mb=40 * GIB), "gpu0", **stops)
    waits = a_task("waits", tenant="labs", priority=60, gpu_mb=60 * GIB)
    runs = [holding(a_task(f"run{n}", priority=10, gpu_mb=20 * GIB, cpu=2.0), "gpu1") for n in range(3)]
    others = [a_task(f"other{n}", gpus=1) for n in range(3)]
    pledge = a_pledge(waits, "gpu0", 60 * GIB)
    return a_world(a_device("gpu0"), a_device("gpu1"), leaver, waits, *runs, pledge, *others)


def plan_of(world: World, **demand: Any) -> FleetPlan:
    return planned(world, Component("new", 3, a_demand(**demand), 50))


def shared(one: object, other: object, path: str = "world") -> list[str]:
    """Where both hold the very same thing that can change."""
    if one is other:
        return [path] if isinstance(one, dict | list | set) else []
    found: list[str] = []
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one.keys() & other.keys():
            found += shared(one[key], other[key], f"{path}[{key!r}]")
    elif isinstance(one, Struct) and type(one) is type(other):
        for name in one.__struct_fields__:
            found += shared(getattr(one, name), getattr(other, name), f"{path}.{name}")
    elif hasattr(one, "__dict__"):
        found += shared(vars(one), vars(other), path)
    elif hasattr(type(one), "__slots__") and type(one) is type(other):
        slots: tuple[str, ...] = getattr(type(one), "__slots__")  # noqa: B009  # a type of any object
        for name in slots:
            found += shared(getattr(one, name, None), getattr(other, name, None), f"{path}.{name}")
    return found


def test_a_snapshot_gives_the_same_plan() -> None:
    for demand in (
        {"gpu_mb": 20 * GIB},
        {"gpus": 1},
        {"gpus": 1, "gpu_mb": 50 * GIB, "cpu": 1.0},
        {"cpu": 3.0},
    ):
        world = a_busy_world()
        assert plan_of(world.snapshot(), **demand) == plan_of(world, **demand)


def test_a_snapshot_shares_nothing_that_changes() -> None:
    world = a_busy_world()
    assert [path for path in shared(world, world.snapshot()) if "edition" not in path] == []


def test_a_snapshot_does_not_see_later_events() -> None:
    gang = at_work()
    world = gang.world
    before = world.snapshot()
    ledgers = {key: ledger.taken() for key, ledger in before.ledgers.items()}
    comes(gang)
    submit(world, a_task("late", cpu=1.0))
    admit_all(world, now=gang.now)
    assert before.tasks.keys() == {"gang"}
    assert all(member.takes_part for member in members_of(before.tasks[TaskId("gang")]))
    assert {key: ledger.taken() for key, ledger in before.ledgers.items()} == ledgers
    assert [Draft(before).use(node).cpu for node in sorted(before.nodes)] == [2.0, 2.0]
    assert (before.pledges, world.pledges.keys()) == ({}, {"urgent"})
