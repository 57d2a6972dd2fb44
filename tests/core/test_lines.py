"""Who waits for a limit or a quota: when it is told to start, and who may pass it."""

from dataclasses import replace

from service.core.backfill import Basis
from service.core.policy import CustomLimit, TenantPolicy
from service.core.units import Mib
from tests.builders import GIB, NOW, a_device, a_task, a_world, submit
from tests.core.test_backfill import POLICY, a_run, foreseen, gpus

LICENCE = (("licence", 1.0),)
LICENSED = replace(POLICY, custom_limits=(CustomLimit("licence", 1.0),))


def test_forecasts_are_for_the_first_who_wait_for_room_and_for_the_first_in_line_for_a_limit():
    """None is made for others who wait for that limit, and room is kept for none of them."""
    licensed = [a_task(f"l{n}", gpu_mb=GIB, custom=LICENCE, submitted_at=NOW - 99 + n) for n in range(3)]
    world = a_world(a_device(), a_run("one", "gpu0", left=60.0, custom=LICENCE), *licensed)
    submit(world, a_task("next", gpu_mb=80 * GIB), a_task("other", gpu_mb=80 * GIB))
    made = foreseen(world, replace(LICENSED, forecasts=1))
    assert [(f.task, f.start_at - NOW, len(f.places)) for f in made] == [("l0", 60, 0), ("next", 60, 1)]
    assert foreseen(world, replace(LICENSED, forecasts=0)) == []
    assert foreseen(a_world()) == []


def test_who_waits_for_a_limit_is_foretold_when_it_and_room_are_there():
    """By the runs that must end first, and by what is said of them."""
    waits = a_task("next", gpus=1, custom=LICENCE)
    runs = a_run("one", "gpu0", left=600.0), a_run("two", "n2/gpu0", left=60.0, custom=LICENCE)
    [forecast] = foreseen(a_world(*gpus(1), *gpus(1, "n2"), *runs, waits), LICENSED)
    assert (forecast.start_at - NOW, forecast.basis) == (60, Basis.STATED)
    runs = a_run("one", "gpu0", left=60.0), a_run("two", "n2/gpu0", custom=LICENCE)
    [forecast] = foreseen(a_world(*gpus(1), *gpus(1, "n2"), *runs, waits), LICENSED)
    assert (forecast.start_at - NOW, forecast.basis) == (100, Basis.GUESS)
    stuck = a_task("next", gpu_mb=GIB, custom=(("gone", 1.0),))
    assert foreseen(a_world(a_device(), stuck), LICENSED) == []


def test_who_waits_for_a_quota_is_foretold_when_enough_was_given_back():
    """Of its own tenant, or of its cohort."""
    quota = replace(
        POLICY,
        tenants=(
            TenantPolicy("red", "c", guaranteed_mb=Mib(40 * GIB)),
            TenantPolicy("blue", "c", guaranteed_mb=Mib(80 * GIB)),
            TenantPolicy("solo", guaranteed_mb=Mib(40 * GIB)),
        ),
    )
    runs = (
        a_run("r", "gpu0", left=600.0, tenant="red", gpu_mb=40 * GIB),
        a_run("b", "gpu0", left=300.0, tenant="blue", gpu_mb=40 * GIB),
        a_run("s", "gpu1", left=200.0, tenant="solo", gpu_mb=40 * GIB),
    )
    wants = {"gpu_mb": 70 * GIB, "tenant": "red"}
    world = a_world(*gpus(4), *runs, a_task("first", **wants), a_task("later", **wants))
    submit(world, a_task("mine", gpu_mb=20 * GIB, tenant="solo"))
    made = [(f.task, f.start_at - NOW, len(f.places)) for f in foreseen(world, quota)]
    assert made == [("first", 300, 0), ("mine", 200, 0)]
    few = replace(quota, forecasts=1)
    assert [forecast.task for forecast in foreseen(world, few)] == ["first"], "so many lines"
