"""Who waits for a limit or a quota: when it is told to start, and who may pass it."""

from typing import Any

import pytest
from gpubroker_server.core.domain.decisions import Decision, write_move
from gpubroker_server.core.domain.demand import PlacementConstraints
from gpubroker_server.core.domain.lease import LeaseState, Proof, release
from gpubroker_server.core.domain.policy import CustomLimit, Policy, TenantPolicy
from gpubroker_server.core.domain.reasons import Reason
from gpubroker_server.core.domain.task import Move, Task, TaskState
from gpubroker_server.core.domain.units import Instant, Mib, Seconds, TaskId
from gpubroker_server.core.explain.advice import advise
from gpubroker_server.core.explain.diagnosis import diagnose
from gpubroker_server.core.explain.explain import explain
from gpubroker_server.core.explain.survey import survey_nodes
from gpubroker_server.core.planning.forecasts.forecasts import make_forecasts
from gpubroker_server.core.planning.forecasts.reservations import Basis
from gpubroker_server.core.planning.forecasts.waiting import first_of_queue, waiting
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import GIB, NOW, a_demand, a_device, a_task, a_world, commit, holding, submit
from tests.core.gangs import a_gang
from tests.core.planning.test_backfill import POLICY, a_run, admitted, foreseen, gpus
from tests.core.planning.test_starvation import Hours

LICENCE = (("licence", 1.0),)
LICENSED = replace(POLICY, custom_limits=(CustomLimit("licence", 1.0),))


def test_the_first_tasks_that_wait_for_room_or_for_a_limit_have_forecasts() -> None:
    """None is made for others who wait for that limit, and room is kept for none of them."""
    licensed = [a_task(f"l{n}", gpu_mb=GIB, custom=LICENCE, submitted_at=NOW - 99 + n) for n in range(3)]
    world = a_world(a_device(), a_run("one", "gpu0", left=60.0, custom=LICENCE), *licensed)
    submit(world, a_task("next", gpu_mb=80 * GIB), a_task("other", gpu_mb=80 * GIB))
    made = foreseen(world, replace(LICENSED, forecasts=1))
    assert [(f.task, f.start_at - NOW, len(f.places)) for f in made] == [("l0", 60, 0), ("next", 60, 1)]
    assert foreseen(world, replace(LICENSED, forecasts=0)) == []
    assert foreseen(a_world()) == []


def test_who_waits_for_a_limit_is_foretold_when_it_and_room_are_there() -> None:
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


def test_who_waits_for_a_quota_is_foretold_when_enough_was_given_back() -> None:
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


def a_stream(policy: Policy, large: Task, **small: Any) -> dict[str, float]:
    """When each began: one small task of 600 s every 140 s to four GPUs, and soon a large one of all four."""
    hours = Hours(a_world(*gpus(4), *gpus(4, "n2")), {"large": 60.0}, policy)
    for number in range(40):
        name = f"small{number:02}"
        hours.lengths[name] = 600.0
        submit(hours.world, a_task(name, **{"gpus": 1, "submitted_at": Instant(hours.now), **small}))
        if number == 8:
            submit(hours.world, replace(large, submitted_at=Instant(hours.now)))
        until = hours.now + 140.0
        hours.turn()
        while hours.now < until:
            hours.let_time_pass(until)
            hours.turn()
    return hours.started


SLOT = "pool:gold:gpus"
POOL = replace(POLICY, custom_limits=(CustomLimit(SLOT, 4.0),))
QUOTA = replace(POLICY, tenants=(TenantPolicy("solo", guaranteed_mb=Mib(320 * GIB)),))


@pytest.mark.parametrize(
    ("policy", "large", "small"),
    [
        (POOL, {"slots": ((SLOT, 4.0),)}, {"slots": ((SLOT, 1.0),)}),
        (QUOTA, {"tenant": "solo"}, {"tenant": "solo"}),
    ],
    ids=["pool", "quota"],
)
def test_large_demand_of_a_limit_or_quota_is_not_starved_by_smaller_ones(
    policy: Policy, large: dict[str, Any], small: dict[str, Any]
) -> None:
    started = a_stream(policy, a_task("large", gpus=4, **large), **small)
    assert started["large"] - NOW <= 8 * 140.0 + 700.0, "it waits for those who were there"
    assert len(started) > 25, "and the others go on after it"
    assert "large" not in a_stream(replace(policy, forecasts=0), a_task("large", gpus=4, **large), **small)


def a_line(*behind: Task, **ahead: Any) -> World:
    """One licence of two is free, and the first in line needs both; it gets them in 60 s."""
    first = a_task("first", gpu_mb=GIB, custom=(("licence", 2.0),), submitted_at=NOW - 9, **ahead)
    running = a_run("one", "gpu0", left=60.0, custom=LICENCE, gpu_mb=GIB)
    seated = a_run("two", "gpu0", left=9.0, custom=(("seat", 1.0),), gpu_mb=GIB)
    return a_world(a_device(), running, seated, first, *behind)


TWO = replace(POLICY, custom_limits=(CustomLimit("licence", 2.0),))


def test_task_behind_the_first_in_a_line_takes_nothing_unless_it_is_short() -> None:
    """The line is for a limit; a task that stands ahead of the first one may use it."""
    world = a_line()
    for name, said in (("long", 600.0), ("short", 50.0), ("unknown", None)):
        fields = {"custom": LICENCE, "gpu_mb": GIB, "expected_seconds": said}
        submit(world, a_task(name, **fields), a_gang(f"{name}s", a_demand(gpu_mb=GIB), **fields))
    submit(world, a_task("cpu", cpu=1.0), a_task("other", gpu_mb=GIB))
    assert sorted(admitted(world, TWO)) == ["cpu", "other", "short"]
    ahead = a_line()
    forecasts = foreseen(ahead, TWO)
    submit(ahead, a_task("urgent", gpu_mb=GIB, custom=LICENCE, priority=60))
    assert list(admitted(ahead, TWO, forecasts)) == ["urgent"]


def test_a_line_ends_with_the_start_of_its_first() -> None:
    """Whoever stands behind it is let in in that very cycle, and in any slice."""
    world = a_line()
    forecasts = foreseen(world, TWO)
    one = world.tasks[TaskId("one")]
    leases = tuple(release(lease, Proof.PROCESS_ABSENT) for lease in world.leases_of(one))
    commit(world, Decision("one", "story", tasks=(write_move(one, Move.SUCCEEDED),), leases=leases))
    submit(world, a_task("next", gpu_mb=GIB, custom=(("licence", 0.0),)))
    assert sorted(admitted(world, TWO, forecasts)) == ["first", "next"]


def test_when_the_first_in_a_line_starts_the_next_one_is_not_passed_either() -> None:
    """In that very cycle, for which nobody has made forecasts anew."""
    pair = (("licence", 2.0),)
    second = a_task("second", gpu_mb=GIB, custom=pair, submitted_at=NOW - 8)
    world = a_line(second, expected_seconds=300.0)
    forecasts = foreseen(world, TWO)
    assert [(f.task, f.start_at - NOW, f.first_in) for f in forecasts] == [
        ("first", 60, {"licence"}),
        ("second", 360, {"licence"}),
    ]
    three = replace(TWO, custom_limits=(CustomLimit("licence", 4.0),))
    submit(world, a_task("small", gpu_mb=GIB, custom=LICENCE))
    assert sorted(admitted(world, three, forecasts)) == ["first"], "second needs what small would take"
    submit(world, a_task("short", gpu_mb=GIB, custom=LICENCE, expected_seconds=50.0))
    assert sorted(admitted(world, three, forecasts)) == ["first", "short"]


def test_a_task_behind_the_first_for_a_limit_shows_that_as_its_reason() -> None:
    world = a_line(a_task("new", gpu_mb=GIB, custom=LICENCE))
    forecasts = foreseen(world, TWO)
    found = explain(world, TaskId("new"), TWO, NOW, forecasts)
    assert found.reason is Reason.BEHIND_HIGHER_PRIORITY
    assert found.message == (
        "the limit that it needs is left to first, expected to start in 60 s; "
        "this task is not known to end by then"
    )
    told = advise(diagnose(survey_nodes(Draft(world), world.tasks[TaskId("new")], TWO, NOW, forecasts)))
    assert (told.way.places, told.way.eviction) == (None, None)
    assert told.remedies[0].change == {"expected_seconds": 60.0}


def test_quota_held_by_runs_that_are_over_counts_as_given_back() -> None:
    """Otherwise there would be no line while a run leaves, and the next task would pass."""
    ended = a_task("over", gpu_mb=160 * GIB, tenant="solo")
    over = holding(ended, "gpu0", state=TaskState.SUCCEEDED, lease_state=LeaseState.RELEASING)
    runs = a_run("one", "gpu1", left=60.0, tenant="solo", gpu_mb=160 * GIB)
    waits = a_task("waits", gpu_mb=300 * GIB, tenant="solo")
    large = [a_device(f"gpu{n}", mb=320 * GIB) for n in range(3)]
    [forecast] = foreseen(a_world(*large, over, runs, waits), QUOTA)
    assert (forecast.start_at - NOW, forecast.first_in) == (60, {"quota:solo"})
    [forecast] = foreseen(a_world(*large, over, replace(waits, demand=a_demand(gpu_mb=200 * GIB))), QUOTA)
    assert (forecast.start_at - NOW, forecast.first_in) == (0, {"quota:solo"})


@pytest.mark.parametrize("limits", [(), (CustomLimit("licence", 1.0, priority_threshold=70),)])
def test_a_limit_that_is_gone_or_kept_for_higher_priorities_never_opens(
    limits: tuple[CustomLimit, ...],
) -> None:
    running = a_run("one", "gpu0", left=60.0, custom=LICENCE, gpu_mb=GIB, priority=80)
    world = a_world(a_device(), running, a_task("waits", gpu_mb=GIB, custom=LICENCE))
    assert foreseen(world, replace(POLICY, custom_limits=limits)) == []


def test_limit_forecast_takes_its_basis_from_the_runs_that_use_the_limit() -> None:
    guessed = a_run("guessed", "gpu0"), a_task("first", gpus=1, expected_seconds=Seconds(50.0))
    running = a_run("one", "n2/gpu0", left=600.0, custom=LICENCE)
    waits = a_task(
        "waits", gpu_mb=GIB, custom=LICENCE, where=PlacementConstraints(nodes=(("node", ("n2",)),))
    )
    made = foreseen(a_world(*gpus(1), *gpus(1, "n2"), *guessed, running, waits), LICENSED)
    told = [(f.task, f.start_at - NOW, f.p90_at - NOW, f.basis) for f in made]
    assert told == [("first", 100, 900, Basis.GUESS), ("waits", 600, 600, Basis.STATED)]


def test_run_admitted_while_forecasts_are_made_counts_against_the_limit() -> None:
    """It counts until it is expected to give its share back."""
    nodes = [device for number in range(9) for device in gpus(1, f"n{number}")]
    running = a_run("one", "n0/gpu0", left=60.0, custom=LICENCE)
    first = a_task("first", gpus=1, gpu_mb=80 * GIB, submitted_at=NOW - 9)
    waits = a_task("waits", gpu_mb=GIB, custom=(("licence", 2.0),))
    world = a_world(*nodes, running, first, waits)
    steps = make_forecasts(world, TWO, NOW)
    next(steps)
    new = a_run("new", "n1/gpu0", left=600.0, custom=LICENCE)
    world.add_task(new.task)
    world.add_lease(new.leases[0])
    *_, made = steps
    assert {f.task: f.start_at - NOW for f in made} == {"first": 0, "waits": 600}


def test_who_is_passed_over_for_a_line_takes_turns_of_looking_too() -> None:
    licensed = [a_task(f"l{n}", gpu_mb=Mib(n + 1), custom=LICENCE, priority=60) for n in range(400)]
    world = a_world(a_device(), a_run("one", "gpu0", left=60.0, custom=LICENCE), *licensed)
    submit(world, a_task("next", gpu_mb=80 * GIB))
    found = list(waiting(Draft(world), LICENSED, NOW, 8))
    assert [one[0].id for one in found if one] == ["l0", "l1", "next"]
    assert len(found) > 3
    assert [task.id for task in first_of_queue(Draft(world), LICENSED, NOW, 8)] == ["next"]
    assert len(list(make_forecasts(world, LICENSED, NOW))) > 4


def test_a_look_for_the_first_of_a_limit_pauses_while_no_group_is_let_in() -> None:
    tasks = [a_task(f"t{number:03}", gpu_mb=(1 + number) * 100) for number in range(200)]
    policy = Policy(custom_limits=(CustomLimit("licence", 1.0),))
    found = list(waiting(Draft(a_world(a_device(), *tasks)), policy, NOW, 1))
    assert [task.id for task, _ in filter(None, found)] == ["t000"]
    assert None in found
