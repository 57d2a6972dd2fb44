"""Gangs beside forecasts: where they may have others stopped, and what is remembered of it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from service.core import prospects
from service.core.backfill import Basis, Forecast
from service.core.cycle import plan_cycle
from service.core.draft import Draft
from service.core.memory import Memory
from service.core.policy import Policy
from service.core.task import Placement, Task
from service.core.trial import Planner
from service.core.units import Instant, NodeName, Seconds
from service.core.world import World
from tests.builders import GIB, NOW, a_device, a_task, a_world, commit, holding
from tests.core.gangs import a_gang, bundles

POLICY = Policy(ageing_seconds_per_point=Seconds(1e9))
FIRST = replace(a_task("first", priority=60, cpu=64.0), submitted_at=Instant(NOW - 100.0))
GANG = a_gang("gang", *bundles(2, gpus=1, exclusive=True), priority=60)


def full(node: str, seconds: float, priority: int = 10) -> list[Any]:
    """Both GPUs of a node, and CPU of which another task waits for all."""
    hog = holding(a_task(f"hog-{node}", priority=90, cpu=40.0), node=node)
    runs = [
        holding(
            a_task(f"{node}-{index}", priority=priority, gpus=1, exclusive=True),
            f"{node}/gpu{index}",
            mb=80 * GIB,
            started_at=Instant(NOW - seconds),
        )
        for index in range(2)
    ]
    return [hog, *runs]


def two_nodes(*parts: Any) -> World:
    return a_world(*(a_device(f"gpu{n}", node) for node in ("n1", "n2") for n in range(2)), FIRST, *parts)


def on(node: str, seconds: float = 4000.0) -> list[Forecast]:
    at = Instant(NOW + seconds)
    place = Placement(NodeName(node), ())
    return [Forecast(FIRST.id, (place,), at, at, Instant(at + 5000.0), 0, Basis.STATED)]


def stopped(
    world: World, forecasts: Sequence[Forecast], memory: Memory | None = None, policy: Policy = POLICY
) -> list[str]:
    plan = plan_cycle(world, policy, NOW, budget=10_000, memory=memory, forecasts=forecasts)
    return [write.task.id for d in plan.decisions if d.why == "preempt" for write in d.tasks]


def test_a_gang_has_others_stopped_where_no_forecast_stands_if_that_costs_more():
    world = two_nodes(*full("n1", 10.0), *full("n2", 500.0), GANG)
    told = Planner(Draft(world), POLICY, NOW, on("n1")).attempt(GANG).eviction
    assert stopped(world, on("n1")) == ["n2-0", "n2-1"]
    assert stopped(world, ()) == ["n1-0", "n1-1"]
    assert told is not None
    assert [run.id for run in told.victims] == ["n2-0", "n2-1"]


class Asked:
    """How often a way was looked for."""

    def __init__(self, monkeypatch: Any) -> None:
        self.count = 0
        self._choose = prospects.choose_for_gang
        monkeypatch.setattr(prospects, "choose_for_gang", self)

    def __call__(self, *args: Any) -> Any:
        self.count += 1
        return self._choose(*args)


def another(gang: Task = GANG) -> Task:
    return replace(gang, id="gang2", submitted_at=Instant(NOW + 1.0))


def test_that_forecasts_leave_a_gang_nothing_is_remembered_until_they_change(monkeypatch: Any):
    world = two_nodes(*full("n1", 10.0), *full("n2", 500.0, priority=90), GANG, another())
    memory, asked = Memory(), Asked(monkeypatch)
    for _ in range(3):
        assert stopped(world, on("n1"), memory) == []
    assert asked.count == 1, "the second one is kept away like the first"
    assert stopped(world, on("n1", 5000.0), memory) == []
    assert asked.count == 2
    assert stopped(world, (), memory) == ["n1-0", "n1-1"]


def test_room_that_is_kept_from_a_gang_is_remembered_until_something_changes_there():
    low = a_task("low", priority=10, gpus=1, exclusive=True)
    hogs = [one for node in ("n1", "n2") for one in full(node, 10.0, priority=90)[:1]]
    wide = a_gang("wide", *bundles(2, cpu=20.0), priority=60)
    world, memory = two_nodes(*hogs, wide), Memory()
    both = [replace(on("n1")[0], places=(Placement(NodeName("n1"), ()), Placement(NodeName("n2"), ())))]
    for _ in range(2):
        plan = plan_cycle(world, POLICY, NOW, budget=10_000, memory=memory, forecasts=both)
        assert plan.decisions == ()
    [known] = memory.gangs.values()
    assert known.keepers is not None
    world.add_task(low)
    commit(world, plan_cycle(world, POLICY, NOW, budget=10_000, memory=memory, forecasts=both).decisions)
    plan = plan_cycle(world, POLICY, NOW, budget=10_000, memory=memory)
    assert [decision.subject for decision in plan.decisions] == [wide.id]
