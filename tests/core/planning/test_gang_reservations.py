"""Gangs beside forecasts: where they may have others stopped, and what is remembered of it."""

from collections.abc import Sequence
from typing import Any

from gpubroker_server.core.domain.demand import PlacementConstraints
from gpubroker_server.core.domain.policy import Policy, TenantPolicy
from gpubroker_server.core.domain.task import Placement, Task, TaskState
from gpubroker_server.core.domain.units import Instant, Mib, NodeName, Seconds
from gpubroker_server.core.explain.what_if import WhatIf
from gpubroker_server.core.planning import find_way
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.planning.forecasts.reservations import Basis, Forecast
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.plan_cache import PlanCache
from gpubroker_server.core.planning.preemption.gang_eviction import choose_for_gang
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import GIB, NOW, a_device, a_task, a_world, commit, holding
from tests.core.gangs import a_gang, bundles

POLICY = Policy(ageing_seconds_per_point=Seconds(1e9))
FIRST = replace(a_task("first", priority=60, cpu=64.0, gpu_mb=GIB), submitted_at=Instant(NOW - 100.0))
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
    world: World, forecasts: Sequence[Forecast], cache: PlanCache | None = None, policy: Policy = POLICY
) -> list[str]:
    plan = plan_cycle(world, policy, NOW, budget=10_000, cache=cache, forecasts=forecasts)
    return [write.task.id for d in plan.decisions if d.why == "preempt" for write in d.tasks]


def test_gang_preempts_where_no_forecast_stands_even_at_a_higher_cost() -> None:
    world = two_nodes(*full("n1", 10.0), *full("n2", 500.0), GANG)
    told = WhatIf(Draft(world), POLICY, NOW, on("n1")).way(GANG).eviction
    assert stopped(world, on("n1")) == ["n2-0", "n2-1"]
    assert stopped(world, ()) == ["n1-0", "n1-1"]
    assert told is not None
    assert [run.id for run in told.victims] == ["n2-0", "n2-1"]


class Asked:
    """How often a way was looked for."""

    def __init__(self, monkeypatch: Any) -> None:
        self.count = 0
        self._choose = choose_for_gang
        monkeypatch.setattr(find_way, "choose_for_gang", self)

    def __call__(self, *args: Any) -> Any:
        self.count += 1
        return self._choose(*args)


def another(gang: Task = GANG) -> Task:
    return replace(gang, id="gang2", submitted_at=Instant(NOW + 1.0))


def test_refusal_of_a_gang_behind_forecasts_is_cached_until_they_change(monkeypatch: Any) -> None:
    world = two_nodes(*full("n1", 10.0), *full("n2", 500.0, priority=90), GANG, another())
    cache, asked = PlanCache(), Asked(monkeypatch)
    for _ in range(3):
        assert stopped(world, on("n1"), cache) == []
    assert asked.count == 1, "the second one is kept away like the first"
    assert stopped(world, on("n1", 5000.0), cache) == []
    assert asked.count == 2
    assert stopped(world, (), cache) == ["n1-0", "n1-1"]


def test_room_coming_for_one_gang_is_no_reason_for_another_to_wait() -> None:
    """The second gang has been stopped so often that it would not give way to a task that starts there."""
    leaves = {"state": TaskState.STOPPING, "stop_deadline_at": Instant(NOW + 9.0)}
    leaving = [
        replace(run, task=replace(run.task, **leaves)) if run.leases else run for run in full("n1", 500.0)
    ]
    wide = replace(a_task(FIRST.id, priority=65, cpu=64.0, gpus=1), submitted_at=FIRST.submitted_at)
    stays = replace(another(), preemptions=POLICY.preemption_budget)
    forecasts = on("n1", 400.0)

    def stopped_for(*gangs: Task) -> list[str]:
        devices = [a_device(f"gpu{n}", node) for node in ("n1", "n2") for n in range(2)]
        return stopped(a_world(*devices, wide, *leaving, *full("n2", 500.0), *gangs), forecasts)

    assert stopped_for(GANG) == []
    assert stopped_for(stays) == ["n2-0", "n2-1"]
    assert stopped_for(GANG, stays) == ["n2-0", "n2-1"]


def test_a_gang_refused_by_a_reservation_reclaims_what_is_lent_later() -> None:
    """Its own node is held within a guarantee, until that tenant is given more elsewhere."""
    lab = TenantPolicy("acme", "lab", Mib(160 * GIB)), TenantPolicy("beta", "lab", Mib(80 * GIB))
    policy, cache = replace(POLICY, tenants=lab), PlanCache()
    whole: dict[str, Any] = {"gpus": 1, "exclusive": True}
    held = holding(a_task("held", tenant="beta", priority=60, **whole), "n2/gpu0", mb=80 * GIB)
    more = a_task("more", tenant="beta", priority=50, where=PlacementConstraints(kinds=("B100",)), **whole)
    gang = a_gang(
        "gang", *bundles(1, where=PlacementConstraints(kinds=("H100",)), **whole), tenant="acme", priority=60
    )
    fleet = a_device("gpu0", "n1"), a_device("gpu1", "n1"), a_device("gpu0", "n2")
    other = a_device("gpu0", "n3", kind="B100")
    wide = replace(FIRST, tenant="acme", demand=replace(FIRST.demand, cpu=1000.0))
    world = a_world(*fleet, other, wide, *full("n1", 10.0), held, gang, more)
    first = plan_cycle(world, policy, NOW, budget=10_000, cache=cache, forecasts=on("n1"))
    assert [(d.why, d.subject) for d in first.decisions] == [("admit", more.id)]
    commit(world, first.decisions)
    assert stopped(world, on("n1"), cache, policy) == ["held"]


def test_room_kept_from_a_gang_is_cached_until_its_nodes_change() -> None:
    low = a_task("low", priority=10, gpus=1, exclusive=True)
    hogs = [one for node in ("n1", "n2") for one in full(node, 10.0, priority=90)[:1]]
    wide = a_gang("wide", *bundles(2, cpu=20.0), priority=60)
    world, cache = two_nodes(*hogs, wide), PlanCache()
    both = [replace(on("n1")[0], places=(Placement(NodeName("n1"), ()), Placement(NodeName("n2"), ())))]
    for _ in range(2):
        plan = plan_cycle(world, POLICY, NOW, budget=10_000, cache=cache, forecasts=both)
        assert plan.decisions == ()
    world.add_task(low)
    commit(world, plan_cycle(world, POLICY, NOW, budget=10_000, cache=cache, forecasts=both).decisions)
    plan = plan_cycle(world, POLICY, NOW, budget=10_000, cache=cache)
    assert [decision.subject for decision in plan.decisions] == [wide.id]
