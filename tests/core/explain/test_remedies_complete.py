"""No remedy is missing: on small clusters every change is tried and compared with the remedies."""

from collections.abc import Iterable, Iterator
from math import ceil
from typing import Any

from gpubroker_server.core.domain.demand import Demand, PlacementConstraints, need_mb
from gpubroker_server.core.domain.policy import Policy, TenantPolicy
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Mib, TaskId
from gpubroker_server.core.explain.advice import advise
from gpubroker_server.core.explain.demand_changes import STEPS
from gpubroker_server.core.explain.diagnosis import diagnose
from gpubroker_server.core.explain.possible import check_demand
from gpubroker_server.core.explain.remedy_planner import MIN_SHARE, Remedy
from gpubroker_server.core.explain.survey import survey_nodes
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.world.world import World
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.builders import NOW, a_demand, a_device, a_node, a_task, a_world, holding, let_go, submit
from tests.core.scenarios import twin

POLICY = Policy(
    tenants=(
        TenantPolicy("acme", "lab", Mib(40)),
        TenantPolicy("beta", "lab", Mib(50), borrow_mb=Mib(20)),
        TenantPolicy("solo", guaranteed_mb=Mib(60)),
    ),
    backfill_depth=0,
)
TENANTS = ("default", "default", "acme", "beta", "solo")
KINDS = {"big": 80, "small": 40}
"""MiB: so few that each size can be tried."""

BIG_ONLY, ON_N1 = PlacementConstraints(kinds=("big",)), PlacementConstraints(nodes=(("node", ("n1",)),))
PLAIN: tuple[dict[str, Any], ...] = (
    {"gpu_mb": 30},
    {"gpu_mb": 60, "cpu": 1.0},
    {"gpus": 1},
    {"gpus": 2},
    {"gpus": 2, "gpu_mb": 30},
    {"gpu_mb": 20, "where": BIG_ONLY},
    {"gpu_mb": 30, "where": ON_N1},
    {"gpus": 1, "where": PlacementConstraints(kinds=("big",), nodes=(("node", ("n1",)),))},
    {"gpu_mb": 20, "cpu": 3.0, "memory_mb": 60},
    {"cpu": 4.0},
)
RANKS: tuple[dict[str, Any], ...] = (
    {"gpu_mb": 20},
    {"gpu_mb": 30, "cpu": 1.0},
    {"gpus": 1},
    {"gpu_mb": 30, "where": BIG_ONLY},
    {"gpu_mb": 20, "where": ON_N1},
)
STRATEGIES = ("pack", "spread", "strict_pack", "strict_spread")


@st.composite
def worlds(draw: st.DrawFn, task: Task) -> World:
    """One or two nodes of one or two devices, some runs there, and one task that may wait."""
    parts: list[Any] = [task]
    for number in range(1, draw(st.integers(1, 2)) + 1):
        node = f"n{number}"
        parts.append(a_node(node, cpu=4.0, memory_mb=100))
        for index in range(draw(st.integers(1, 2))):
            kind = draw(st.sampled_from(("big", "small")))
            device = a_device(f"gpu{index}", node, mb=KINDS[kind], kind=kind)
            parts.append(device)
            for mb in draw(st.sampled_from(((), (10,), (30,), (10, 20), (20, 20)))):
                run = a_task(
                    f"r{len(parts)}",
                    gpu_mb=mb,
                    cpu=draw(st.sampled_from((0.0, 0.0, 1.0))),
                    memory_mb=draw(st.sampled_from((0, 20))),
                    priority=draw(st.sampled_from((10, 50, 60, 95))),
                    tenant=draw(st.sampled_from(TENANTS)),
                    expected_seconds=draw(st.sampled_from((None, 200.0, 300.0))),
                )
                parts.append(holding(run, device.key))
    return a_world(*parts)


waiting = st.fixed_dictionaries(
    {"priority": st.sampled_from((5, 50, 80)), "tenant": st.sampled_from(TENANTS)}
)
tasks = st.builds(lambda asked, shape: a_task("new", **asked, **shape), waiting, st.sampled_from(PLAIN))
gangs = st.builds(
    lambda asked, ranks, strategy, least: a_task(
        "new", **asked, bundles=ranks, strategy=strategy, min_ranks=least if least < len(ranks) else None
    ),
    waiting,
    st.lists(st.sampled_from(RANKS).map(lambda fields: a_demand(**fields)), min_size=2, max_size=4).map(tuple)
    | st.integers(2, 4).flatmap(lambda n: st.sampled_from(RANKS).map(lambda f: (a_demand(**f),) * n)),
    st.sampled_from(STRATEGIES),
    st.integers(2, 4),
)


def decided(world: World, task: Task, ended: str = "") -> str:
    """What the planner makes of such a task: admit, preempt, or nothing."""
    other = twin(world, 1)
    old = other.tasks.pop(task.id)
    other.queue.remove(old)
    if ended:
        let_go(other, ended, requeue=False)
    submit(other, task)
    found = plan_cycle(other, POLICY, NOW, budget=10_000).decisions
    return next((one.why for one in found if one.subject == task.id), "")


def best(world: World, task: Task, demands: Iterable[tuple[Any, Demand]]) -> Any:
    """The first of these that may be submitted, and with which it starts at once."""
    devices, nodes = [ledger.device for ledger in world.ledgers.values()], world.nodes.values()
    for value, demand in demands:
        may_be = check_demand(demand, devices, nodes, POLICY) is None
        if may_be and decided(world, replace(task, demand=demand)) == "admit":
            return value
    return None


def least_priority(world: World, task: Task) -> int | None:
    """From which on it starts, or has others stopped for it."""
    if decided(world, task):
        return None
    steps = sorted({run.priority + 1 for run in world.tasks.values()} | {90})
    above = (step for step in steps if task.priority < step <= 100)
    return next((step for step in above if decided(world, replace(task, priority=step))), None)


def helpful_ends(world: World, task: Task) -> list[str]:
    runs = (row for row in world.tasks.values() if row.state is TaskState.RUNNING and row.expected_seconds)
    return [run.id for run in runs if decided(world, task, run.id) == "admit"]


def remedies_of(world: World) -> list[Remedy] | None:
    """None if it need not wait at all."""
    found = advise(diagnose(survey_nodes(Draft(world), world.tasks[TaskId("new")], POLICY, NOW)))
    return None if found.way.places is not None else list(found.remedies)


def by_field(remedies: list[Remedy]) -> dict[str, Any]:
    """What each remedy that changes one number or word changes it to."""
    found = dict[str, Any]()
    for remedy in remedies:
        change = remedy.change
        inside = change.get("bundles")
        for name in ("gpu_mb", "gpus", "min_ranks", "strategy", "priority"):
            if name in change or (inside and name in inside):
                found[name] = change[name] if inside is None or name in change else inside[name]
    return found


def smaller(world: World, demand: Demand) -> Iterator[tuple[int, Demand]]:
    asked = demand.gpu_mb or max(needs_of(world, demand))
    for mb in range(asked - 1, ceil(MIN_SHARE * asked) - 1, -1):
        yield mb, replace(demand, gpu_mb=Mib(mb), gpu_fraction=None, exclusive=False)


def needs_of(world: World, part: Demand) -> Iterator[int]:
    return (need_mb(part, ledger.device) or 0 for ledger in world.ledgers.values())


def capped(world: World, demand: Demand, mb: int) -> Demand:
    bundles = tuple(
        replace(part, gpu_mb=Mib(mb)) if (part.gpu_mb or max(needs_of(world, part))) > mb else part
        for part in demand.bundles
    )
    return replace(demand, bundles=bundles)


def check_waits_and_priorities(world: World, task: Task, found: list[Remedy]) -> None:
    assert by_field(found).get("priority") == least_priority(world, task)
    ends = helpful_ends(world, task)
    after = [remedy.after.id for remedy in found if remedy.after is not None]
    assert bool(after) == bool(ends)
    assert set(after) <= set(ends)
    for lower in (0, 30, 49):
        if lower < task.priority:
            assert decided(world, replace(task, priority=lower)) != "admit", "less priority helps nobody"


def wider(world: World, task: Task, **where: Any) -> bool:
    parts = task.demand.bundles or (task.demand,)
    looser = tuple(replace(part, where=replace(part.where, **where)) for part in parts)
    demand = replace(task.demand, bundles=looser) if task.demand.bundles else looser[0]
    return demand != task.demand and bool(best(world, task, [(True, demand)]))


def check_places(world: World, task: Task, found: list[Remedy]) -> None:
    changes = [dict(remedy.change.get("bundles", remedy.change)) for remedy in found]
    kinds, nodes = wider(world, task, kinds=()), wider(world, task, nodes=())
    assert ({"kinds": []} in changes) == kinds
    assert ({"nodes": {}} in changes) == nodes
    both = wider(world, task, kinds=(), nodes=()) and not (kinds or nodes)
    assert ({"kinds": [], "nodes": {}} in changes) == both


@given(st.data(), tasks)
@settings(max_examples=50, deadline=None)
def test_every_change_that_would_help_a_task_is_a_remedy(data: st.DataObject, task: Task) -> None:
    world = data.draw(worlds(task))
    found = remedies_of(world)
    if found is None:
        return
    demand, fields = task.demand, by_field(found)
    check_waits_and_priorities(world, task, found)
    check_places(world, task, found)
    sizes = smaller(world, demand) if demand.gpus else iter(())
    assert fields.get("gpu_mb") == best(world, task, sizes)
    fewer = range(demand.gpus - 1, 0, -1)
    assert fields.get("gpus") == best(world, task, ((n, replace(demand, gpus=n)) for n in fewer))
    less = (
        (True, replace(demand, cpu=cpu, memory_mb=Mib(memory_mb)))
        for cpu in {demand.cpu, *(part for part in (1.0, 2.0, 3.0) if part < demand.cpu)}
        for memory_mb in {demand.memory_mb, *(part for part in (20, 40) if part < demand.memory_mb)}
    )
    is_told = any({"cpu", "memory_mb"} & remedy.change.keys() for remedy in found)
    assert is_told == bool(best(world, task, less))


@given(st.data(), gangs)
@settings(max_examples=50, deadline=None)
def test_nothing_that_would_help_a_gang_is_left_untold(data: st.DataObject, gang: Task) -> None:
    world = data.draw(worlds(gang))
    found = remedies_of(world)
    if found is None:
        return
    demand, fields = gang.demand, by_field(found)
    check_waits_and_priorities(world, gang, found)
    check_places(world, gang, found)
    fewer = range(demand.least_ranks - 1, 0, -1)
    assert fields.get("min_ranks") == best(world, gang, ((n, replace(demand, min_ranks=n)) for n in fewer))
    asked = max(part.gpu_mb or max(needs_of(world, part)) for part in demand.bundles)
    steps = range(STEPS - 1, ceil(MIN_SHARE * STEPS) - 1, -1)
    sizes = dict.fromkeys(asked * step // STEPS for step in steps)
    assert fields.get("gpu_mb") == best(world, gang, ((mb, capped(world, demand, mb)) for mb in sizes if mb))
    looser = ((name, replace(demand, strategy=name)) for name in ("pack", "spread"))
    strict = demand.strategy.removeprefix("strict_")
    assert fields.get("strategy") == (strict if best(world, gang, looser) else None)


@given(st.data(), tasks | gangs)
@settings(max_examples=50, deadline=None)
def test_every_remedy_is_true_for_tasks_and_for_gangs(data: st.DataObject, task: Task) -> None:
    world = data.draw(worlds(task))
    for remedy in remedies_of(world) or []:
        ended = "" if remedy.after is None else remedy.after.id
        expected = "admit" if remedy.places else "preempt"
        assert decided(world, remedy.task, ended) == expected, remedy.message
