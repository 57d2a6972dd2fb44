"""What is remembered of tenants that found no way by their right where forecasts stand: once is enough."""

from typing import Any

import pytest
from gpubroker_server.core.domain.policy import CustomLimit, Policy, TenantPolicy
from gpubroker_server.core.domain.task import Placement
from gpubroker_server.core.domain.units import DeviceKey, Instant, Mib, NodeName
from gpubroker_server.core.planning import find_way
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.planning.forecasts.reservations import Basis, Forecast
from gpubroker_server.core.planning.plan_cache import PlanCache

from tests.builders import NOW, a_device, a_task, a_world, holding
from tests.core.gangs import bundles

POLICY = Policy(
    custom_limits=(CustomLimit("never", 0.0),),
    tenants=(
        TenantPolicy("alone", guaranteed_mb=Mib(80)),
        TenantPolicy("owner", "lab", Mib(80)),
        TenantPolicy("borrower", "lab", Mib(0)),
    ),
)
ONE: dict[str, Any] = {"gpu_mb": 20}
GANG: dict[str, Any] = {"bundles": bundles(2, gpu_mb=20)}


@pytest.mark.parametrize(
    ("tenant", "holder", "asks", "search"),
    [
        ("alone", "alone", ONE, "make_room_in_quota"),
        ("owner", "borrower", ONE, "reclaim"),
        ("owner", "borrower", GANG, "reclaim_for_gang"),
        ("borrower", "outsider", GANG, "choose_for_gang"),
    ],
)
def test_one_search_serves_all_tasks_closed_out_of_the_same_nodes(
    tenant: str, holder: str, asks: dict[str, Any], search: str, monkeypatch: Any
) -> None:
    """They could not be stopped for `first` in time, and so may have nobody stopped where it is to start."""
    asked: list[str] = []
    choose = getattr(find_way, search)

    def counted(offers: Any, task: Any, *rest: Any) -> Any:
        asked.append(task.id)
        return choose(offers, task, *rest)

    monkeypatch.setattr(find_way, search, counted)
    low = [holding(a_task(f"low{n}", tenant=holder, priority=40, gpu_mb=20), "n1/gpu0") for n in range(4)]
    full = holding(a_task("full", tenant="outsider", priority=90, gpu_mb=80), "n2/gpu0")
    first = a_task("first", tenant=tenant, priority=65, gpu_mb=80, custom={"never": 1.0})
    likes = [a_task(f"like{n}", tenant=tenant, priority=60, preemptions=3, **asks) for n in range(3)]
    world = a_world(a_device("gpu0", "n1", mb=80), a_device("gpu0", "n2", mb=80), *low, full, first, *likes)
    there, start = Placement(NodeName("n1"), ((DeviceKey("test/n1/gpu0"), Mib(80)),)), Instant(NOW + 60.0)
    kept = Forecast(first.id, (there,), start, start, Instant(NOW + 999.0), 0, Basis.STATED)
    assert plan_cycle(world, POLICY, NOW, cache=PlanCache(), forecasts=[kept]).decisions == ()
    assert [name for name in asked if name != "first"] == ["like0"]
    asked.clear()
    assert [d.why for d in plan_cycle(world, POLICY, NOW, cache=PlanCache()).decisions][:1] == ["preempt"]
    assert asked, "without that forecast there is a way"
