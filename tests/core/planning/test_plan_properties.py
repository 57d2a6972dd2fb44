"""What must hold for any cluster, any queue and any order of events."""

from collections.abc import Sequence

from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.lease import LeaseState
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.reasons import Reason
from gpubroker_server.core.domain.task import Task, TaskState, members_of
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.explain.explain import explain
from gpubroker_server.core.planning.cycle import Plan, Slice, plan_cycle
from gpubroker_server.core.planning.forecasts.forecasts import make_forecasts
from gpubroker_server.core.planning.forecasts.reservations import Forecast
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.places import Places
from gpubroker_server.core.planning.plan_cache import PlanCache
from gpubroker_server.core.planning.tenants.quota import Quotas
from gpubroker_server.core.world.world import World
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.builders import check_ledger, commit
from tests.core.naive import Naive, Step
from tests.core.scenarios import POLICY, Chapter, Story, clusters, stories, twin


def step_of(decision: Decision) -> Step:
    """What a decision does, in the naive twin's words."""
    ended = sorted((w.pledge.preemptor, w.pledge.device, str(w.end)) for w in decision.pledges if w.end)
    match decision.why:
        case "admit":
            task = decision.tasks[0].task
            if members_of(task):
                ranks = tuple((lease.rank, lease.device, lease.mb) for lease in decision.leases)
                return ("admit", task.id, tuple(m.node for m in members_of(task)), ranks, tuple(ended))
            devices = tuple((lease.device, lease.mb) for lease in decision.leases)
            return ("admit", task.id, task.node, devices, tuple(ended))
        case "grow":
            task = decision.tasks[0].task
            ranks = tuple((lease.rank, lease.device, lease.mb) for lease in decision.leases)
            joining = tuple(member.node for member in members_of(task) if member.is_joining)
            return ("grow", task.id, joining, ranks)
        case "preempt":
            victims = tuple(name_of(write.task, decision.subject) for write in decision.tasks)
            pledges = [written.pledge for written in decision.pledges if not written.end]
            made = sorted((pledge.device, pledge.mb, pledge.ranks) for pledge in pledges)
            return ("preempt", decision.subject, victims, tuple(made), tuple(ended))
    return ("withdraw", decision.subject, tuple(ended))


def name_of(victim: Task, preemptor: str) -> str:
    """`task`, or `task:rank,rank` of a gang that goes on without them."""
    if victim.state is TaskState.STOPPING:
        return victim.id
    leave = (m for m in members_of(victim) if not m.takes_part and not m.gone and m.freeing_for == preemptor)
    return f"{victim.id}:{','.join(str(member.rank) for member in leave)}"


def whole_plan(world: World, now: float, policy: Policy = POLICY, forecasts: Sequence[Forecast] = ()) -> Plan:
    return plan_cycle(world, policy, Instant(now), budget=10_000, forecasts=forecasts)


def foreseen(world: World, now: float, before: Sequence[Forecast] = ()) -> list[Forecast]:
    *_, forecasts = make_forecasts(world, POLICY, Instant(now), before)
    return forecasts


def check_pledges(world: World) -> None:
    """Every pledge is covered by what is free and what is leaving, so its preemptor will get its room."""
    for ledger in world.ledgers.values():
        stuck = any(h.lease.state is LeaseState.QUARANTINED for h in ledger.holdings.values())
        assert stuck or ledger.free_after_releases_mb() >= 0, (
            f"{ledger.device.key} has promised more than it will have"
        )


@given(clusters(), stories, st.sampled_from(("stranded", "stranded", "fgd", "best_fit", "spread")))
@settings(max_examples=120, deadline=None)
def test_the_plan_is_the_naive_twins_whatever_happened_before(
    world: World, story: list[Chapter], placement: str
) -> None:
    tale, policy = Story(world), replace(POLICY, placement=placement)
    forecasts: list[Forecast] = []
    for chapter in story:
        for _ in tale.happens(chapter):
            pass
        expected = Naive(world, policy, tale.now, forecasts).plan()
        plan = whole_plan(world, tale.now, policy, forecasts)
        assert [step_of(decision) for decision in plan.decisions] == expected
        commit(world, plan.decisions, tale.now)
        forecasts = foreseen(world, tale.now, forecasts)


@given(clusters(), stories, st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=120, deadline=None)
def test_nothing_is_leased_twice_and_slices_and_row_order_do_not_matter(
    world: World, story: list[Chapter], budget: int, turns: int
) -> None:
    """No byte is leased or promised twice in any world."""
    tale = Story(world)
    forecasts: list[Forecast] = []
    for chapter in story:
        for _ in tale.happens(chapter):
            check_ledger(world)
            check_pledges(world)
        shuffled, sliced = twin(world, budget), twin(world, budget + 1)
        plan = whole_plan(world, tale.now, POLICY, forecasts)
        assert whole_plan(shuffled, tale.now, POLICY, forecasts) == plan
        assert foreseen(shuffled, tale.now, forecasts) == foreseen(world, tale.now, forecasts)
        assert in_slices(sliced, tale.now, budget, turns, forecasts) == list(plan.decisions)
        commit(world, plan.decisions, tale.now)
        check_ledger(world)
        check_pledges(world)
        forecasts = foreseen(world, tale.now, forecasts)


@given(
    clusters(),
    stories,
    st.integers(1, 60),
    st.integers(1, 3),
    st.lists(st.booleans(), min_size=8, max_size=8),
)
@settings(max_examples=150, deadline=None)
def test_a_memory_changes_no_plan_even_if_some_plans_do_not_come_true(
    world: World, story: list[Chapter], budget: int, turns: int, comes_true: list[bool]
) -> None:
    tale, cache = Story(world), PlanCache()
    forecasts: list[Forecast] = []
    for chapter, lucky in zip(story, comes_true, strict=False):
        for _ in tale.happens(chapter):
            pass
        cursor = None
        forecasts = foreseen(world, tale.now, forecasts)
        for _ in range(200):
            now = Instant(tale.now)
            plain = plan_cycle(world, POLICY, now, cursor, budget=10_000, forecasts=forecasts)
            plan = in_turns(Slice(world, POLICY, now, cursor, cache, forecasts), budget, turns)
            assert plain.decisions[: len(plan.decisions)] == plan.decisions
            if plan.cursor is None or not lucky:
                assert plan.cursor is not None or plain.decisions == plan.decisions
                break
            commit(world, plan.decisions, tale.now)
            cursor = plan.cursor
        if lucky:
            commit(world, plan.decisions, tale.now)


def in_turns(part: Slice, budget: int, turns: int) -> Plan:
    for _ in range(turns):
        part.take_turn(budget)
        if part.is_last:
            break
    return part.plan()


def in_slices(
    world: World, now: float, budget: int, turns: int, forecasts: Sequence[Forecast]
) -> list[Decision]:
    decisions: list[Decision] = []
    cursor = None
    for _ in range(100):
        part = Slice(world, POLICY, Instant(now), cursor, forecasts=forecasts)
        plan = in_turns(part, budget, turns)
        commit(world, plan.decisions, now)
        decisions += plan.decisions
        cursor = plan.cursor
        if cursor is None:
            return decisions
    raise AssertionError("the cycle does not come to its end")


@given(clusters(), stories)
@settings(max_examples=120, deadline=None)
def test_every_pending_task_is_answered(world: World, story: list[Chapter]) -> None:
    tale = Story(world)
    for chapter in story:
        for _ in tale.happens(chapter):
            pass
        for task in [task for task in world.tasks.values() if task.state is TaskState.PENDING]:
            told = explain(world, task.id, POLICY, Instant(tale.now))
            assert told.blockers
            assert told.reason is told.blockers[0].reason
            fits = Places(Draft(world), POLICY, Instant(tale.now)).best(task) is not None
            fits = fits and not Quotas(Draft(world), POLICY).is_short(task)
            waits = task.held or task.awaits or (task.not_before or 0.0) > tale.now
            assert (told.reason is Reason.PENDING_EVALUATION) == (fits and not waits)
        commit(world, whole_plan(world, tale.now).decisions, tale.now)
