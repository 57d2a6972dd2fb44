"""Preemption on nodes where a task ahead has a reservation that no preemption can serve."""

from typing import Any

from gpubroker_server.core.domain.policy import Policy, TenantPolicy
from gpubroker_server.core.domain.units import Mib, Seconds, TaskId
from gpubroker_server.core.explain.advice import Advice, advise
from gpubroker_server.core.explain.diagnosis import diagnose
from gpubroker_server.core.explain.preemption_verdict import PreemptionStatus
from gpubroker_server.core.explain.survey import survey_nodes
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.planning.find_way import Evict
from gpubroker_server.core.planning.forecasts.forecasts import make_forecasts
from gpubroker_server.core.planning.forecasts.reservations import Forecast
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import GIB, NOW, a_device, a_node, a_task, a_world, holding
from tests.core.gangs import a_gang, bundles
from tests.core.naive import Naive
from tests.core.planning.test_cycle import stopped
from tests.core.planning.test_plan_properties import step_of

POLICY = Policy(ageing_seconds_per_point=Seconds(1e9), shield_seconds=Seconds(0.0))


def a_machine(*parts: Any, cpu: float = 2.0) -> World:
    """Two CPUs and one GPU."""
    return a_world(a_node("n1", cpu=cpu), a_device("gpu0"), *parts)


def foreseen(world: World, policy: Policy = POLICY) -> list[Forecast]:
    *_, made = make_forecasts(world, policy, NOW)
    return made


def victims(world: World, policy: Policy = POLICY) -> list[str]:
    """Return the runs that are preempted, as the planner and its naive twin say."""
    forecasts = foreseen(world, policy)
    plan = plan_cycle(world, policy, NOW, budget=10_000, forecasts=forecasts)
    twin = Naive(world, policy, NOW, forecasts)
    assert twin.plan([step_of(one) for one in plan.decisions]) == [step_of(one) for one in plan.decisions]
    return stopped(list(plan.decisions))


HOG = holding(a_task("hog", priority=20, cpu=2.0))
CPU_TASK = a_task("cpu-task", priority=79, cpu=2.0, submitted_at=NOW - 20)
GPU_TASK = a_task("gpu-task", priority=79, cpu=1.0, gpu_mb=GIB, submitted_at=NOW - 10)


def test_a_waiting_cpu_task_keeps_no_gpu_task_from_preempting() -> None:
    world = a_machine(HOG, CPU_TASK, GPU_TASK)
    assert [forecast.task for forecast in foreseen(world)][:1] == ["cpu-task"]
    assert victims(world) == ["hog"]


def test_behind_a_cpu_task_runs_that_could_make_its_room_are_not_preempted() -> None:
    """Idle work makes room for every task, so what it holds stays reserved for the task ahead."""
    idle = holding(a_task("idle", priority=5, cpu=1.0))
    hog = holding(a_task("hog", priority=20, cpu=1.0))
    assert victims(a_machine(idle, hog, CPU_TASK, GPU_TASK)) == ["hog"]
    peer = holding(a_task("peer", priority=79, cpu=1.0))
    assert victims(a_machine(idle, peer, CPU_TASK, GPU_TASK)) == []


def test_room_that_is_free_but_reserved_is_no_reason_to_preempt() -> None:
    hog = holding(a_task("hog", priority=20, cpu=1.0))
    assert victims(a_machine(hog, CPU_TASK, GPU_TASK)) == []


def test_a_waiting_gpu_task_keeps_its_nodes_closed() -> None:
    """It could stop the same runs once the others have ended."""
    assert victims(behind_a_gpu_task()) == []


def behind_a_gpu_task() -> World:
    peer = holding(a_task("peer", priority=79, gpu_mb=30 * GIB), "gpu0")
    wide = a_task("wide", priority=79, gpus=1, submitted_at=NOW - 20)
    return a_machine(HOG, peer, wide, GPU_TASK)


def test_gang_with_gpus_preempts_behind_a_cpu_task_and_behind_a_cpu_gang() -> None:
    gang = a_gang("gang", *bundles(1, cpu=1.0, gpu_mb=GIB), priority=79, submitted_at=NOW - 10)
    assert victims(a_machine(HOG, CPU_TASK, gang)) == ["hog"]
    wide = a_gang("wide", *bundles(1, cpu=2.0), priority=79, submitted_at=NOW - 20)
    assert victims(a_machine(HOG, wide, gang)) == ["hog"]
    assert victims(a_machine(HOG, wide, GPU_TASK)) == ["hog"]
    beside = a_gang("beside", *bundles(2, cpu=1.0, gpu_mb=GIB), priority=79, submitted_at=NOW - 10)
    one = holding(a_task("one", priority=20, cpu=1.0))
    assert victims(a_machine(one, wide, beside)) == [], "a rank of it would take the CPU that is reserved"


def test_what_is_lent_is_taken_back_behind_a_cpu_task() -> None:
    lab = TenantPolicy("acme", "lab", Mib(80 * GIB)), TenantPolicy("beta", "lab", Mib(0))
    policy = replace(POLICY, tenants=lab)
    lent = holding(a_task("lent", priority=79, tenant="beta", cpu=2.0, gpu_mb=80 * GIB), "gpu0")
    ahead = replace(CPU_TASK, tenant="acme")
    one = a_task("one", priority=79, tenant="acme", gpu_mb=GIB, cpu=1.0, submitted_at=NOW - 10)
    gang = a_gang("gang", *bundles(1, gpu_mb=GIB, cpu=1.0), priority=79, tenant="acme", submitted_at=NOW - 10)
    for owner in (one, gang):
        assert victims(a_machine(lent, ahead, owner), policy) == ["lent"]


def test_a_task_over_its_quota_makes_room_in_it_behind_a_cpu_task() -> None:
    policy = replace(POLICY, tenants=(TenantPolicy("acme", "", Mib(10 * GIB)),))
    mine = holding(a_task("mine", priority=20, tenant="acme", cpu=2.0, gpu_mb=10 * GIB), "gpu0")
    more = a_task("more", priority=79, tenant="acme", gpu_mb=GIB, cpu=1.0, submitted_at=NOW - 10)
    assert victims(a_machine(mine, CPU_TASK, more), policy) == ["mine"]


def test_at_the_backfill_depth_nodes_with_reservations_stay_closed() -> None:
    others = [a_task(f"small{n}", priority=79, cpu=1.0, submitted_at=NOW - 15 + n) for n in range(2)]
    large = replace(GPU_TASK, demand=replace(GPU_TASK.demand, cpu=2.0))
    hog = holding(a_task("hog", priority=20, cpu=1.0))
    world = a_machine(hog, CPU_TASK, *others, large)
    assert victims(world, replace(POLICY, backfill_depth=2)) == []
    assert victims(world, replace(POLICY, backfill_depth=3)) == ["hog"]


def told(world: World, name: str) -> Advice:
    return advise(
        diagnose(survey_nodes(Draft(world), world.tasks[TaskId(name)], POLICY, NOW, foreseen(world)))
    )


def test_an_explanation_names_the_task_ahead_that_keeps_it_from_preempting() -> None:
    advice = told(behind_a_gpu_task(), "gpu-task")
    assert advice.preemption.why is PreemptionStatus.RESERVED
    assert advice.preemption.message == (
        "no run is preempted, because what it would free on n1 is reserved for wide, ahead of it in the "
        "queue and expected to start in 100 s"
    )
    assert advice.start is None, "no start is promised in room that is reserved"


def test_an_explanation_behind_a_cpu_task_says_that_the_run_is_preempted() -> None:
    advice = told(a_machine(HOG, CPU_TASK, GPU_TASK), "gpu-task")
    assert isinstance(advice.way, Evict)
    assert advice.preemption.why is PreemptionStatus.POSSIBLE
    assert advice.start is not None
    assert advice.start.p50_at == NOW + 30.0, "when the notice of the run is over"
    assert told(a_machine(HOG, CPU_TASK, GPU_TASK), "cpu-task").preemption.why is PreemptionStatus.NO_GPUS
