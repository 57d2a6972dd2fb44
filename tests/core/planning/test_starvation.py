"""Hours on a small cluster: nobody is starved, nothing stands idle, and what was foretold comes true."""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import cycle, islice
from math import inf
from typing import Any

import pytest
from gpubroker_server.core.domain.decisions import Decision, write_move
from gpubroker_server.core.domain.demand import PlacementConstraints
from gpubroker_server.core.domain.lease import LeaseState, Proof, move_lease, release
from gpubroker_server.core.domain.policy import CustomLimit, Policy
from gpubroker_server.core.domain.task import Move, TaskState
from gpubroker_server.core.domain.units import Instant, Seconds, TaskId
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.planning.forecasts.reservations import Forecast
from gpubroker_server.core.world.world import World
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.builders import GIB, NOW, a_task, a_world, commit, submit
from tests.core.gangs import a_gang, bundles
from tests.core.planning.test_backfill import POLICY, a_wide_task, foreseen, gpus


class Hours:
    """A cluster in which runs last as long as they last, and the clock jumps from end to end."""

    def __init__(self, world: World, lengths: dict[str, float], policy: Policy = POLICY) -> None:
        self.world, self.policy, self.lengths = world, policy, lengths
        self.now = float(NOW)
        self.started: dict[str, float] = {}
        self.forecasts: Sequence[Forecast] = ()
        self.first_said: dict[str, float] = {}
        self.leased: list[tuple[float, int]] = []

    def turn(self) -> None:
        now, whole = Instant(self.now), 10_000
        plan = plan_cycle(self.world, self.policy, now, budget=whole, forecasts=self.forecasts)
        for decision in plan.decisions:
            commit(self.world, decision, self.now)
            if decision.why == "admit":
                self._begin(decision.subject)
        self.forecasts = foreseen(self.world, self.policy, self.now, self.forecasts)
        for forecast in self.forecasts:
            if forecast.reserves_room:
                self.first_said.setdefault(forecast.task, forecast.start_at)

    def let_time_pass(self, until: float) -> None:
        """To the next end, or to this moment if it comes first."""
        ends = {name: at + self.lengths[name] for name, at in self.started.items() if self._runs(name)}
        self.now = min([until, *ends.values()])
        for name in sorted(name for name, at in ends.items() if at <= self.now):
            self._end(name)
        self.world.measure(replace(b.sample, at=Instant(self.now)) for b in self._books() if b.sample)

    def _books(self) -> Iterable[Any]:
        return self.world.ledgers.values()

    def _runs(self, name: str) -> bool:
        row = self.world.tasks.get(TaskId(name))
        return row is not None and row.state is TaskState.RUNNING

    def _begin(self, name: str) -> None:
        task = self.world.tasks[TaskId(name)]
        self.started[name] = self.now
        leases = tuple(move_lease(ls, LeaseState.HELD) for ls in self.world.leases_of(task))
        write = write_move(task, Move.STARTED, started_at=Instant(self.now))
        commit(self.world, Decision(name, "story", tasks=(write,), leases=leases), self.now)

    def _end(self, name: str) -> None:
        task = self.world.tasks[TaskId(name)]
        leases = tuple(release(ls, Proof.PROCESS_ABSENT) for ls in self.world.leases_of(task))
        write = write_move(task, Move.SUCCEEDED, finished_at=Instant(self.now))
        commit(self.world, Decision(name, "story", tasks=(write,), leases=leases), self.now)


def a_stream_of_small_tasks(hours: Hours, *, state: bool) -> float:
    """One of 600 s every 100 s on two GPUs that hold six; the mean share of memory that is leased."""
    shares: list[float] = []
    for number in range(60):
        name = f"small{number:02}"
        said = Seconds(600.0) if state else None
        hours.lengths[name] = 600.0
        submit(
            hours.world,
            a_task(name, gpu_mb=26 * GIB, submitted_at=Instant(hours.now), expected_seconds=said),
        )
        until = hours.now + 100.0
        while True:
            hours.turn()
            shares.append(sum(ledger.leased_mb() for ledger in hours.world.ledgers.values()) / (160 * GIB))
            if hours.now >= until:
                break
            hours.let_time_pass(until)
    return sum(shares) / len(shares)


def test_large_task_is_not_starved_by_small_ones_and_small_ones_still_fill() -> None:
    for state in (True, False):
        world = a_world(*gpus())
        hours = Hours(world, {"wide": 60.0})
        hours.now -= 1000.0
        for number in range(6):
            submit(world, a_task(f"first{number}", gpu_mb=26 * GIB, submitted_at=Instant(NOW - 2000)))
            hours.lengths[f"first{number}"] = 600.0 + number
        hours.now = NOW
        hours.turn()
        submit(world, a_wide_task(submitted_at=Instant(NOW)))
        share = a_stream_of_small_tasks(hours, state=state)
        assert hours.started["wide"] - NOW <= 1300, "it waits for those who were there, and not for ever"
        assert share > 0.6, "and room is not left idle for its sake"
        unprotected = Hours(a_world(*gpus()), {"wide": 60.0}, replace(POLICY, forecasts=0))
        for number in range(6):
            first = a_task(f"first{number}", gpu_mb=26 * GIB, submitted_at=Instant(NOW - 2000))
            submit(unprotected.world, first)
            unprotected.lengths[first.id] = 600.0 + number
        unprotected.turn()
        submit(unprotected.world, a_wide_task(submitted_at=Instant(NOW)))
        a_stream_of_small_tasks(unprotected, state=state)
        assert "wide" not in unprotected.started, "without forecasts it never gets both GPUs"


def test_gang_over_several_nodes_is_not_starved_by_single_tasks() -> None:
    """Each of four ranks has a whole GPU. Tasks of one GPU come every 70 s to eight GPUs and take 600 s."""
    for forecasts in (8, 0):
        devices = [device for number in range(4) for device in gpus(2, f"n{number}")]
        hours = Hours(a_world(*devices), {"gang": 60.0}, replace(POLICY, forecasts=forecasts))
        for number in range(80):
            name = f"small{number:02}"
            hours.lengths[name] = 600.0
            said = Seconds(600.0) if number % 2 else None
            small = {"gpus": 1, "submitted_at": Instant(hours.now), "expected_seconds": said}
            submit(hours.world, a_task(name, **small))
            if number == 10:
                ranks = a_gang("gang", *bundles(4, gpus=1), submitted_at=Instant(hours.now))
                submit(hours.world, ranks)
            until = hours.now + 70.0
            hours.turn()
            while hours.now < until:
                hours.let_time_pass(until)
                hours.turn()
        assert ("gang" in hours.started) == bool(forecasts), "without forecasts it never gets all four"
        if forecasts:
            assert hours.started["gang"] - NOW <= 10 * 70.0 + 700.0, "it waits for those who were there"


shapes = st.builds(
    lambda gpus, size: {"gpus": gpus, "gpu_mb": size * GIB},
    st.sampled_from((1, 1, 1, 2)),
    st.sampled_from((20, 40, 80)),
)
gangs = st.builds(
    lambda ranks, gpus, size, strategy: {
        "bundles": bundles(ranks, gpus=gpus, gpu_mb=size * GIB),
        "strategy": strategy,
    },
    st.sampled_from((2, 2, 3, 4)),
    st.sampled_from((1, 1, 2)),
    st.sampled_from((20, 40, 80)),
    st.sampled_from(("pack", "spread", "strict_pack", "strict_spread")),
)
lengths, arrival = st.sampled_from((50.0, 200.0, 700.0)), st.integers(0, 300)
jobs = st.tuples(shapes, lengths, arrival)
jobs_and_gangs = st.tuples(st.one_of(shapes, gangs), lengths, arrival)
Job = tuple[dict[str, Any], float, int]
"""(what it asks for, how long it runs, when it comes)"""
TWO_NODES = (*gpus(), *gpus(2, "n2"))


def could_run(asks: dict[str, Any]) -> bool:
    """If nobody else were there."""
    return bool(plan_cycle(a_world(*TWO_NODES, a_task("alone", **asks)), POLICY, NOW).decisions)


@given(st.lists(jobs, min_size=3, max_size=12))
@settings(max_examples=60, deadline=None)
def test_no_forecast_is_late_because_of_a_later_task(work: list[Job]) -> None:
    """If run times are as said, and nobody stands ahead of anybody who came before."""
    hours = all_are_over(work)
    for name, said in hours.first_said.items():
        assert hours.started[name] <= said + 1e-6, f"{name} was to start by {said - NOW}"


@given(st.lists(jobs_and_gangs, min_size=3, max_size=9))
@settings(max_examples=60, deadline=None)
def test_no_forecast_is_late_but_behind_a_gang_that_found_room_early(work: list[Job]) -> None:
    """A gang may find room before it was foretold, by where others came to lie: then it goes first."""
    check_forecasts([job for job in work if could_run(job[0])])


def test_a_gang_that_starts_as_foretold_makes_no_later_forecast_late() -> None:
    """At 200 s both nodes have room for it, and the single task that came last is to have a whole GPU."""
    gang = {"bundles": bundles(2, gpus=2, gpu_mb=20 * GIB), "strategy": "pack"}
    other = {"bundles": bundles(2, gpus=1, gpu_mb=40 * GIB), "strategy": "pack"}
    small = {"gpus": 1, "gpu_mb": 20 * GIB}
    check_forecasts(
        [
            (small, 50.0, 0),
            (small, 50.0, 101),
            (small, 200.0, 0),
            ({"gpus": 1, "gpu_mb": 40 * GIB}, 700.0, 0),
            ({"gpus": 1, "gpu_mb": 80 * GIB}, 50.0, 102),
            ({"gpus": 2, "gpu_mb": 80 * GIB}, 200.0, 0),
            (other, 50.0, 101),
            (gang, 50.0, 1),
        ]
    )


def check_forecasts(work: list[Job]) -> None:
    hours = all_are_over(work)
    for name, said in hours.first_said.items():
        ahead = [other for other in hours.started if other < name]
        was_early = any(hours.started[other] < hours.first_said.get(other, NOW) for other in ahead)
        assert was_early or hours.started[name] <= said + 1e-6, f"{name} was to start by {said - NOW}"


def all_are_over(work: list[Job]) -> Hours:
    """What became of them; they are named in the order in which they come."""
    hours = Hours(a_world(*TWO_NODES), {})
    arrivals = deque(sorted((NOW + at, number) for number, (*_, at) in enumerate(work)))
    while arrivals or len(hours.started) < len(work):
        while arrivals and arrivals[0][0] <= hours.now:
            asks, length, _ = work[arrivals.popleft()[1]]
            name = f"t{len(hours.lengths):02}"
            hours.lengths[name] = length
            said = Seconds(length)
            submit(hours.world, a_task(name, submitted_at=Instant(hours.now), expected_seconds=said, **asks))
        hours.turn()
        hours.let_time_pass(arrivals[0][0] if arrivals else inf)
    return hours


POOL = "pool:small:gpus"
SHARED = Policy(
    ageing_seconds_per_point=Seconds(10.0), custom_limits=(CustomLimit(POOL, 3.0),), preemption=False
)
WIDE: tuple[dict[str, Any], ...] = (
    {"gpus": 1},
    {"gpus": 2},
    {"gpus": 4},
    {"gpus": 1, "slots": ((POOL, 3.0),)},
    {"bundles": bundles(2, gpus=2)},
)
"""A device, two, a whole node, a whole pool, and a gang that needs both nodes."""
SMALL: tuple[dict[str, Any], ...] = (
    {"gpu_mb": 30 * GIB},
    {"gpu_mb": 50 * GIB},
    {"gpus": 1},
    {"gpu_mb": 10 * GIB, "slots": ((POOL, 1.0),)},
)
comers = st.tuples(
    st.sampled_from(("acme", "acme", "acme", "zeta")),
    st.sampled_from(SMALL),
    st.sampled_from((30.0, 70.0, 110.0)),
    st.booleans(),
)
"""(tenant, what it asks for, how long it runs, whether it says so)"""


def starts_at(wide: dict[str, Any], coming: Iterable[Any]) -> float:
    """When the wide task starts while for each task that starts a newer one of a higher priority comes."""
    hours = Hours(a_world(*gpus(4), *gpus(2, "n2")), {}, SHARED)
    newer = enumerate(cycle(coming))
    while "wide" not in hours.started:
        assert hours.now < NOW + 1200.0, "it never had its turn"
        for number, (tenant, asks, seconds, says) in islice(newer, 8 - len(hours.world.queue)):
            name = f"n{number:03}"
            hours.lengths[name] = seconds
            said = Seconds(seconds) if says else None
            fields = {"tenant": tenant, "submitted_at": Instant(hours.now), "expected_seconds": said}
            submit(hours.world, a_task(name, priority=69, **fields, **asks))
        hours.turn()
        if "wide" not in hours.world.tasks:
            hours.lengths["wide"] = 60.0
            submit(hours.world, a_task("wide", tenant="zeta", priority=40, submitted_at=NOW, **wide))
        hours.let_time_pass(hours.now + 20.0)
    return hours.started["wide"] - NOW


@pytest.mark.parametrize("wide", WIDE, ids=("device", "two", "node", "pool", "gang"))
@given(coming=st.lists(comers, min_size=3, max_size=9))
@settings(max_examples=4)
def test_ageing_and_shares_starve_no_task_within_a_band(wide: dict[str, Any], coming: list[Any]) -> None:
    starts_at(wide, coming)


def test_tenant_whose_runs_just_ended_does_not_take_others_reserved_room() -> None:
    """It has less than its share for that moment, every time: the wide task waited 12,000 s."""
    coming = (
        ("acme", {"gpu_mb": 30 * GIB}, 37.0, False),
        ("acme", {"gpus": 1}, 77.0, True),
        ("zeta", {"gpu_mb": 50 * GIB}, 77.0, True),
    )
    assert starts_at({"gpus": 4}, coming) < 600.0


def test_the_share_that_its_tenants_later_tasks_use_starves_no_aged_task() -> None:
    """The wide task asks for a whole pool. Tasks of the other tenant, which is below its share, always wait
    for the pool too: they alone had forecasts."""
    coming = (
        ("acme", {"gpu_mb": 30 * GIB}, 30.0, False),
        ("acme", {"gpu_mb": 10 * GIB, "slots": ((POOL, 1.0),)}, 30.0, False),
        ("zeta", {"gpu_mb": 30 * GIB}, 70.0, False),
    )
    assert starts_at({"gpus": 1, "slots": ((POOL, 3.0),)}, coming) < 600.0


def test_a_task_that_its_tenants_later_tasks_pass_passes_no_older_one() -> None:
    """Of the tenant's tasks for the pool each was passed by others that use other room. So they went ahead of
    the wide task of a tenant that used nothing of its share."""
    coming = (
        ("acme", {"gpu_mb": 30 * GIB}, 30.0, False),
        ("acme", {"gpu_mb": 30 * GIB}, 30.0, False),
        ("acme", {"gpu_mb": 10 * GIB, "slots": ((POOL, 1.0),)}, 70.0, False),
    )
    assert starts_at({"gpus": 1, "slots": ((POOL, 3.0),)}, coming) <= 140.0


def a_crowd(wide: dict[str, Any], policy: Policy, **small: Any) -> float:
    """When the wide task starts while twelve tasks of another tenant, which needs little, always wait too."""
    hours = Hours(a_world(*gpus(4), *gpus(2, "n2")), {"wide": 60.0}, policy)
    comes = {"gpus": 1, "priority": 69, "submitted_at": NOW}
    for number in range(2):
        hours.lengths[f"own{number}"] = 3000.0
        where = PlacementConstraints(nodes=(("node", ("n2",)),))
        submit(hours.world, a_task(f"own{number}", tenant="zeta", where=where, **comes))
    hours.turn()
    submit(hours.world, a_task("wide", tenant="zeta", priority=69, submitted_at=Instant(NOW - 1), **wide))
    while "wide" not in hours.started:
        assert hours.now < NOW + 1200.0, "it never had its turn"
        for number in range(len(hours.lengths), len(hours.lengths) + 13 - len(hours.world.queue)):
            hours.lengths[f"n{number:03}"] = 50.0 + number % 7
            fields = {"tenant": "acme", "priority": 69, "submitted_at": Instant(hours.now), **small}
            submit(hours.world, a_task(f"n{number:03}", **fields))
        hours.turn()
        hours.let_time_pass(hours.now + 20.0)
    return hours.started["wide"] - NOW


ON_ONE_NODE = PlacementConstraints(nodes=(("node", ("n1",)),))


@pytest.mark.parametrize(
    "wide",
    [{"gpus": 4}, {"bundles": bundles(4, gpus=1)}, {"gpus": 3, "slots": ((POOL, 3.0),)}],
    ids=["room", "gang", "pool"],
)
@pytest.mark.parametrize("says", [None, 60.0], ids=["unknown", "said"])
def test_no_crowd_of_another_tenant_keeps_an_aged_task_from_a_reservation(
    wide: dict[str, Any], says: float | None
) -> None:
    small = {"gpus": 1, "slots": ((POOL, 1.0),)} if "slots" in wide else {"gpus": 1}
    assert a_crowd({**wide, "where": ON_ONE_NODE}, SHARED, expected_seconds=says, **small) < 600.0


def test_two_reservations_do_not_hold_each_other_up() -> None:
    """One is ahead by its tenant's share, the other by its age: each bound the other one for minutes once a
    start was later than foretold, and the GPU stood idle."""
    hours = Hours(a_world(*gpus(2)), {"holds": 9000.0, "ends": 30.0, "aged": 60.0, "light": 60.0}, SHARED)
    for place, (name, tenant) in enumerate(
        (("holds", "zeta"), ("ends", "zeta"), ("aged", "zeta"), ("light", "acme"))
    ):
        said = Seconds(hours.lengths[name])
        fields = {"gpus": 1, "priority": 69, "submitted_at": Instant(NOW + place), "expected_seconds": said}
        submit(hours.world, a_task(name, tenant=tenant, **fields))
        hours.turn()
    hours.let_time_pass(NOW + 30.0)
    hours.forecasts = foreseen(hours.world, SHARED, hours.now, hours.forecasts)
    hours.now += 0.5
    hours.turn()
    assert [name for name in ("aged", "light") if name in hours.started] == ["light"]
