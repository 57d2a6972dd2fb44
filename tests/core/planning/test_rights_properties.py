"""Who may make room beside forecasts by the right of its tenant: each task for itself, not for its likes."""

from typing import Any

from gpubroker_server.core.domain.policy import CustomLimit, Policy, TenantPolicy
from gpubroker_server.core.domain.task import Placement
from gpubroker_server.core.domain.units import DeviceKey, Instant, Mib, NodeName
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.planning.forecasts.reservations import Basis, Forecast
from gpubroker_server.core.planning.plan_cache import PlanCache
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import NOW, a_device, a_task, a_world, holding
from tests.core.naive import Naive
from tests.core.planning.test_plan_properties import step_of

POLICY = Policy(
    preemption_budget=1,
    custom_limits=(CustomLimit("never", 0.0),),
    tenants=(
        TenantPolicy("alone", guaranteed_mb=Mib(40)),
        TenantPolicy("owner", "lab", Mib(80)),
        TenantPolicy("borrower", "lab", Mib(0)),
    ),
)
NODES = ("n1", "n2")
runs = st.tuples(st.sampled_from(("alone", "borrower")), st.sampled_from(NODES), st.integers(1, 90))


@given(
    held=st.lists(runs, min_size=3, max_size=8),
    tenant=st.sampled_from(("alone", "owner", "borrower")),
    gpu_mb=st.sampled_from((20, 30)),
    waiting=st.lists(
        st.tuples(st.integers(0, 1), st.sampled_from((0.0, 200.0, 900.0))), min_size=2, max_size=5
    ),
    kept=st.lists(st.tuples(st.sampled_from(NODES), st.sampled_from((60.0, 900.0))), max_size=2),
)
@settings(max_examples=80)
def test_with_shields_and_forecasts_the_plan_is_the_naive_twins(
    held: list[tuple[str, str, int]],
    tenant: str,
    gpu_mb: int,
    waiting: list[tuple[int, float]],
    kept: list[tuple[str, float]],
) -> None:
    parts: list[Any] = [a_device("gpu0", node, mb=80) for node in NODES]
    used = dict.fromkeys(NODES, 0)
    for number, (whose, node, seconds) in enumerate(held):
        if used[node] < 80:
            used[node] += 20
            run = a_task(f"r{number}", tenant=whose, priority=40, gpu_mb=20)
            parts.append(holding(run, f"{node}/gpu0", started_at=Instant(NOW - seconds)))
    for number, (count, waited) in enumerate(waiting):
        fields: dict[str, Any] = {"tenant": tenant, "preemptions": count, "gpu_mb": gpu_mb}
        came_at = Instant(NOW + number - 9.0 - waited)
        parts.append(a_task(f"w{number}", priority=60, submitted_at=came_at, **fields))
    forecasts = []
    for number, (node, later) in enumerate(kept):
        first = a_task(f"first{number}", tenant="other", priority=65, gpu_mb=80, custom={"never": 1.0})
        parts.append(first)
        there, at = (
            Placement(NodeName(node), ((DeviceKey(f"test/{node}/gpu0"), Mib(80)),)),
            Instant(NOW + later),
        )
        forecasts.append(Forecast(first.id, (there,), at, at, Instant(at + 99.0), 0, Basis.STATED))
    world = a_world(*parts)
    expected = Naive(world, POLICY, NOW, forecasts).plan()
    cache = PlanCache()
    for _ in range(2):
        plan = plan_cycle(world, POLICY, NOW, budget=10_000, cache=cache, forecasts=forecasts)
        assert [step_of(decision) for decision in plan.decisions] == expected
