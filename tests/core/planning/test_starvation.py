"""Hours on a small cluster: nobody is starved, nothing stands idle, and what was foretold comes true."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import cycle, islice
from math import inf
from typing import Any

import pytest
from gpubroker_server.core.domain.decisions import Decision, write_move
from gpubroker_server.core.domain.lease import LeaseState, Proof, move_lease, release
from gpubroker_server.core.domain.policy import CustomLimit, Policy
from gpubroker_server.core.domain.task import Move, TaskState
from gpubroker_server.core.domain.units import Instant, Seconds, TaskId
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.planning.forecasts.reservations import Forecast
from gpubroker_server.core.world.world import World
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_a_large_task_is_not_starved_by_small_ones_and_small_ones_still_fill():
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


def test_a_gang_over_several_nodes_is_not_starved_by_a_stream_of_single_tasks():
    """Four ranks of a whole GPU each; a task of one GPU comes every 70 s to eight, and takes 600 s."""
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
def test_no_forecast_is_late_because_of_a_later_task(work: list[Job]):
    """If run times are as said, and nobody stands ahead of anybody who came before."""
    hours = all_are_over(work)
    for name, said in hours.first_said.items():
        assert hours.started[name] <= said + 1e-6, f"{name} was to start by {said - NOW}"


@given(st.lists(jobs_and_gangs, min_size=3, max_size=9))
@settings(max_examples=60, deadline=None)
def test_with_gangs_no_forecast_comes_late_but_for_who_stands_ahead_and_had_its_turn_early(work: list[Job]):
    """A gang may find room before it was foretold, by where others came to lie: then it goes first."""
    hours = all_are_over([job for job in work if could_run(job[0])])
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
def test_ageing_and_shares_starve_no_task_within_a_band(wide: dict[str, Any], coming: list[Any]):
    starts_at(wide, coming)


def test_a_tenant_whose_runs_have_just_ended_does_not_take_the_room_reserved_for_another():
    """It has less than its share for that moment, every time: the wide task waited 12,000 s."""
    coming = (
        ("acme", {"gpu_mb": 30 * GIB}, 37.0, False),
        ("acme", {"gpus": 1}, 77.0, True),
        ("zeta", {"gpu_mb": 50 * GIB}, 77.0, True),
    )
    assert starts_at({"gpus": 4}, coming) < 600.0
