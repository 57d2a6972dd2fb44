"""Every pending task gets its turn, whatever it asks for and whatever else of its band keeps coming."""

from itertools import cycle, islice
from typing import Any

import pytest
from gpubroker_server.core.domain.orders import Ending
from gpubroker_server.core.domain.policy import CustomLimit, Policy, TenantPolicy
from gpubroker_server.core.domain.units import Instant, Mib, Seconds
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.builders import NOW, a_demand, a_device, a_task, a_world
from tests.simulation.ground import Ground

BEAT_SECONDS = 4.0
AROUND_SECONDS = 4 * BEAT_SECONDS
"""To begin, to get ready, to end and to be gone: expected times are true."""
MAX_WAITED = 1200.0
"""Seconds: ageing from the bottom of the band to its top takes 120, the longest run 76; tasks that
are ahead by then go first."""
POOL = "pool:small:gpus"
WAITERS: tuple[dict[str, Any], ...] = (
    {"gpu_mb": 80},
    {"gpu_mb": 30},
    {"gpus": 2},
    {"gpu_mb": 20, "slots": ((POOL, 2.0),)},
    {"bundles": (a_demand(gpus=1),) * 2, "strategy": "strict_spread"},
    {"bundles": (a_demand(gpus=2),) * 2},
    {"bundles": (a_demand(gpu_mb=60),) * 4, "min_ranks": 3},
)
"""A device, a part of one, a node, a pool, and gangs: on two nodes, of the whole cluster, elastic."""
COMERS: tuple[dict[str, Any], ...] = (
    {"gpu_mb": 80},
    {"gpu_mb": 50},
    {"gpu_mb": 10, "slots": ((POOL, 1.0),)},
    {"gpu_mb": 20, "slots": (("tenant:beta", 1.0),)},
    {"bundles": (a_demand(gpu_mb=30),) * 2},
    {"bundles": (a_demand(gpu_mb=20),) * 3, "min_ranks": 1},
)
comers = st.fixed_dictionaries(
    {
        "asks": st.sampled_from(COMERS),
        "tenant": st.sampled_from(("acme", "acme", "beta")),
        "priority": st.sampled_from((69, 69, 60, 45)),
        "seconds": st.sampled_from((5.0, 20.0, 60.0)),
        "says": st.booleans(),
    }
)
QUOTAS = (
    (),
    (TenantPolicy("acme", weight=2.0),),
    (TenantPolicy("acme", "lab", Mib(320)), TenantPolicy("*", "lab", Mib(0))),
)
"""No task waits for others' guarantees, or for tenants with less use than its own: that may be for ever."""


def a_comer(
    asks: dict[str, Any], tenant: str, priority: int, seconds: float, *, says: bool
) -> dict[str, Any]:
    return {"asks": asks, "tenant": tenant, "priority": priority, "seconds": seconds, "says": says}


DEVICE, PART, OF_POOL, COUNTED, GANG, ELASTIC = COMERS
STOPPED_ON_AND_ON = [
    a_comer(PART, "beta", 45, 60.0, says=False),
    a_comer(OF_POOL, "acme", 45, 20.0, says=False),
    a_comer(GANG, "beta", 69, 60.0, says=True),
    a_comer(DEVICE, "acme", 60, 60.0, says=True),
    a_comer(ELASTIC, "acme", 45, 5.0, says=True),
    a_comer(COUNTED, "beta", 45, 5.0, says=True),
]
"""Runs were stopped for the task that waits, and what they left was taken by the more urgent behind it."""
BESIDE_A_PLEDGE = [
    a_comer(DEVICE, "acme", 69, 5.0, says=False),
    a_comer(DEVICE, "acme", 60, 5.0, says=True),
    a_comer(OF_POOL, "acme", 69, 5.0, says=False),
]
"""A small task starts on a device that is pledged in part to a gang, which has a reservation there too."""


@pytest.mark.hypothesis
@example(
    waits=WAITERS[2], priority=55, coming=STOPPED_ON_AND_ON, tenants=QUOTAS[1], is_alone=True, preemption=True
)
@example(waits=WAITERS[6], priority=65, coming=BESIDE_A_PLEDGE, tenants=(), is_alone=False, preemption=True)
@given(
    waits=st.sampled_from(WAITERS),
    priority=st.sampled_from((40, 55, 65)),
    coming=st.lists(comers, min_size=1, max_size=6),
    tenants=st.sampled_from(QUOTAS),
    is_alone=st.booleans(),
    preemption=st.booleans(),
)
@settings(max_examples=12)
def test_no_task_starves_within_a_band(
    waits: dict[str, Any],
    priority: int,
    coming: list[dict[str, Any]],
    tenants: tuple[TenantPolicy, ...],
    is_alone: bool,
    preemption: bool,
) -> None:
    """Others of the band keep coming, of higher priority and as many as there is room for; the task still
    starts, whatever it asks for and whatever may be preempted."""
    limits = CustomLimit(POOL, 2.0), CustomLimit("tenant:beta", 1.0)
    ageing = Seconds(4.0)
    mine = "zeta" if is_alone and not any(tenant.cohort for tenant in tenants) else "acme"
    policy = Policy(
        ageing_seconds_per_point=ageing, preemption=preemption, custom_limits=limits, tenants=tenants
    )
    fleet = [a_device(f"gpu{index}", node, mb=80) for node in ("n1", "n2") for index in (0, 1)]
    ground = Ground(a_world(*fleet), policy, NOW)
    newer = enumerate(cycle(coming))
    lengths, began = dict[str, float](), dict[str, float]()
    while "waits" not in began:
        assert ground.now < NOW + MAX_WAITED, "it never had its turn"
        for number, comer in islice(newer, max(0, 6 - len(ground.world.queue))):
            name = f"n{number:03}"
            lengths[name] = comer["seconds"]
            said = Seconds(comer["seconds"] + AROUND_SECONDS) if comer["says"] else None
            tenant = comer["tenant"] if policy.has_quotas or is_alone else mine
            fields = {"tenant": tenant, "priority": comer["priority"], "expected_seconds": said}
            ground.submit(
                a_task(name, submitted_at=Instant(ground.now), max_retries=9, **fields, **comer["asks"])
            )
        work_on(ground, lengths, began)
        ground.now += BEAT_SECONDS
        ground.turn()
        if "waits" not in ground.submitted:
            lengths["waits"] = 1.0
            ground.submit(
                a_task("waits", tenant=mine, priority=priority, submitted_at=Instant(ground.now), **waits)
            )
            assert "waits" in ground.submitted


def work_on(ground: Ground, lengths: dict[str, float], began: dict[str, float]) -> None:
    """Admitted runs begin; runs that have worked long enough, or are asked to stop, end and are gone."""
    for agent, process in ground.processes():
        task = process.order.task
        if not process.has_begun:
            ground.begin(agent, process)
        elif process.order.barrier and not process.is_ready:
            ground.get_ready(agent, process)
        elif process.stop_at is not None:
            ground.end(agent, process, Ending.STOPPED)
            ground.vanish(agent, process)
        elif process.goes and ground.now >= began.setdefault(task, ground.now) + lengths[task]:
            ground.end(agent, process, Ending.SUCCEEDED)
            ground.vanish(agent, process)
