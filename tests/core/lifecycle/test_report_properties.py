"""Whatever agents say, in whatever order and how often: what never happens, and what makes no difference."""

from collections.abc import Iterator
from typing import Any

from gpubroker_server.core.domain.lease import Lease, LeaseState
from gpubroker_server.core.domain.orders import Checkpointed, Ended, Ending, Gone, NodeLost, Report, Started
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import TERMINAL, StopReason, Task, TaskState
from gpubroker_server.core.domain.units import Fence, Instant, NodeName, TaskId
from gpubroker_server.core.lifecycle.runs import apply_reports
from gpubroker_server.core.world.world import World
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.builders import GIB, NOW, a_device, a_lease, a_pledge, a_task, a_world, check_ledger, commit

POLICY = Policy()
TASKS = ("one", "two", "unknown")
PROOFS = ("process_absent", "boot_changed", "agent_restarted", "never_started", "shared_process")

LEASE_STATES = {
    TaskState.ADMITTED: [LeaseState.RESERVED],
    TaskState.RUNNING: [LeaseState.HELD],
    TaskState.STOPPING: [LeaseState.RESERVED, LeaseState.HELD, LeaseState.RELEASING],
}
ACTIVE = list(LEASE_STATES)
OVER = [LeaseState.RELEASING, LeaseState.QUARANTINED]


@st.composite
def tasks(draw: st.DrawFn, id: str) -> Task:
    """A task in any state it can be in at its second claim, or between the second and the third."""
    state = draw(st.sampled_from([*TaskState, *ACTIVE]))
    fields: dict[str, Any] = {"state": state, "fence": Fence(2), "version": draw(st.integers(3, 9))}
    if state in LEASE_STATES or state in TERMINAL:
        fields |= {"node": NodeName("n1"), "admitted_at": Instant(NOW - 100.0)}
    if state is TaskState.RUNNING:
        fields |= {"started_at": Instant(NOW - 90.0)}
    if state is TaskState.STOPPING:
        fields |= {"stop_reason": draw(st.sampled_from(StopReason)), "stop_deadline_at": NOW}
        fields |= {"freeing_for": draw(st.sampled_from([None, TaskId("high")]))}
    return a_task(id, gpu_mb=8 * GIB, max_retries=draw(st.integers(0, 1)), timeout_seconds=60.0, **fields)


@st.composite
def leases(draw: st.DrawFn, task: Task) -> list[Lease]:
    """What the task's newest claim holds, and what an older one may still hold."""
    found = []
    for fence, states in ((1, [*OVER, None]), (2, LEASE_STATES.get(task.state, [*OVER, None]))):
        state = draw(st.sampled_from(states))
        if state is not None:
            claim = replace(task, fence=Fence(fence))
            found.append(a_lease(claim, "gpu0", 8 * GIB, state=state, version=draw(st.integers(1, 4))))
    return found


@st.composite
def worlds(draw: st.DrawFn) -> World:
    high = a_task("high", gpu_mb=8 * GIB)
    parts: list[Any] = [a_device(), high, a_pledge(high, "gpu0", 8 * GIB)]
    for name in TASKS[:2]:
        task = draw(tasks(name))
        parts += [task, *draw(leases(task))]
    return a_world(*parts)


def reports_of(task: str, fence: int) -> Iterator[st.SearchStrategy[Report]]:
    run = {"task": st.just(TaskId(task)), "fence": st.just(Fence(fence)), "at": st.just(Instant(NOW - 1.0))}
    yield st.builds(Started, **run, pid=st.just(1))
    kept = {"digest": st.just("d"), "data": st.none(), "uri": st.none()}
    yield st.builds(Checkpointed, **run, sequence=st.integers(1, 3), **kept)
    yield st.builds(Ended, **run, ending=st.sampled_from(Ending))
    yield st.builds(Gone, **run, proof=st.sampled_from(PROOFS))


ANY_REPORT = st.one_of(
    st.just(NodeLost(NodeName("n1"), "n1-1", NOW, "no heartbeat")),
    *(report for task in TASKS for fence in (1, 2, 3) for report in reports_of(task, fence)),
)
LIVES = [list(reports_of(task, fence)) for task in TASKS for fence in (1, 2)]
BATCHES = st.lists(st.lists(ANY_REPORT, max_size=6), max_size=4)


@st.composite
def lives(draw: st.DrawFn) -> list[Report]:
    """What an agent says of its runs: in order for each run, the runs mixed, each up to some point."""
    lines: list[list[Report]] = []
    for life in LIVES:
        lines.append([draw(report) for report in life[draw(st.integers(0, 1)) : draw(st.integers(1, 4))]])
    mixed = []
    while any(lines):
        line = draw(st.sampled_from([line for line in lines if line]))
        mixed.append(line.pop(0))
    return mixed


def rows(world: World) -> tuple[dict[str, Task], dict[str, Lease]]:
    """Every row without its version."""
    found = (lease for claim in world.leases.values() for lease in claim.values())
    return (
        {name: replace(task, version=0) for name, task in world.tasks.items()},
        {lease.key: replace(lease, version=0) for lease in found},
    )


def tell(world: World, reports: list[Report]) -> None:
    decisions = apply_reports(world, reports, NOW, POLICY)
    subjects = [decision.subject for decision in decisions]
    assert len(subjects) == len(set(subjects))
    assert all(len(decision.tasks) <= 1 for decision in decisions)
    commit(world, decisions)
    check_ledger(world)


@given(worlds(), BATCHES)
def test_a_task_that_has_ended_never_changes(world: World, batches: list[list[Report]]) -> None:
    ended: dict[TaskId, Task] = {}
    for batch in batches:
        ended |= {name: task for name, task in world.tasks.items() if task.is_terminal}
        tell(world, batch)
        assert all(world.tasks.get(name, task) == task for name, task in ended.items())


@given(worlds(), BATCHES)
def test_memory_comes_back_only_by_the_proof_of_its_own_claim(
    world: World, batches: list[list[Report]]
) -> None:
    for batch in batches:
        before = rows(world)[1]
        tell(world, batch)
        proven = {(report.task, report.fence) for report in batch if isinstance(report, Gone)}
        after = rows(world)[1]
        released = {(lease.holder, lease.fence) for key, lease in before.items() if key not in after}
        assert released <= proven
        assert set(after) <= set(before)


@given(worlds(), BATCHES)
def test_reports_of_other_claims_than_the_newest_never_touch_the_task(
    world: World, batches: list[list[Report]]
) -> None:
    before = dict(world.tasks)
    for batch in batches:
        stale: list[Any] = [report for report in batch if getattr(report, "fence", 2) != 2]
        tell(world, stale)
    assert all(world.tasks.get(name, task) == task for name, task in before.items())


@given(worlds(), BATCHES)
def test_repeating_all_reports_changes_nothing(world: World, batches: list[list[Report]]) -> None:
    for batch in batches:
        tell(world, batch)
        after = rows(world)
        tell(world, batch)
        assert rows(world) == after


@settings(max_examples=200)
@given(st.data())
def test_a_batch_does_what_its_reports_do_one_by_one(data: st.DataObject) -> None:
    together = data.draw(worlds())
    apart = a_world(a_device())
    for task in together.tasks.values():
        apart.add_task(task)
    for claim in together.leases.values():
        for lease in claim.values():
            apart.add_lease(lease)
    for pledges in together.pledges.values():
        for pledge in pledges.values():
            apart.add_pledge(pledge)
    life = data.draw(lives())
    tell(together, life)
    for report in life:
        tell(apart, [report])
    assert rows(together) == rows(apart)
