"""The page of states agrees with the transition tables, and the tables are complete."""

import pytest
from gpubroker_server.core.domain.errors import IllegalTransition
from gpubroker_server.core.domain.lease import NEXT_STATES, LeaseState, move_lease
from gpubroker_server.core.domain.task import ACTIVE, TERMINAL, TRANSITIONS, Move, TaskState, move

from tests.architecture.state_diagram import PAGE, page
from tests.builders import a_lease, a_task

HOW = "docs/reference/states.md differs from the tables; run: python -m tests.architecture.state_diagram"

RUN_ENDS = {Move.REQUEUED, Move.SUCCEEDED, Move.FAILED}
"""The possible ends of a claimed task, in any active state."""


def test_the_page_of_states_is_generated_from_the_tables() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), HOW


def test_every_task_state_is_waiting_active_or_terminal() -> None:
    assert {TaskState.PENDING} | ACTIVE | TERMINAL == set(TaskState)
    assert not ACTIVE & TERMINAL


def test_an_ended_task_has_no_moves() -> None:
    assert {state for state, _ in TRANSITIONS} == set(TaskState) - TERMINAL


@pytest.mark.parametrize("state", sorted(ACTIVE))
def test_an_active_task_can_reach_every_end_of_a_run(state: TaskState) -> None:
    assert {what for old, what in TRANSITIONS if old is state} >= RUN_ENDS | {Move.CHANGED}


@pytest.mark.parametrize("state", [TaskState.ADMITTED, TaskState.RUNNING])
def test_every_run_can_be_asked_to_stop(state: TaskState) -> None:
    assert TRANSITIONS[state, Move.STOPPING] is TaskState.STOPPING


def test_a_start_and_an_end_reported_together_are_one_legal_move() -> None:
    after_start = TRANSITIONS[TaskState.ADMITTED, Move.STARTED]
    for what in RUN_ENDS:
        assert TRANSITIONS[TaskState.ADMITTED, what] is TRANSITIONS[after_start, what]


def test_every_state_is_reachable() -> None:
    reached = {TaskState.PENDING}
    for _ in TaskState:
        reached |= {new for (old, _), new in TRANSITIONS.items() if old in reached}
    assert reached == set(TaskState)


def test_a_move_that_is_not_in_the_table_is_refused_and_changes_nothing() -> None:
    ended = a_task(state=TaskState.SUCCEEDED)
    with pytest.raises(IllegalTransition, match="task is succeeded; it cannot be started"):
        move(ended, Move.STARTED)
    assert ended == a_task(state=TaskState.SUCCEEDED)


def test_the_lease_table_names_every_state_and_every_lease_can_be_released() -> None:
    assert set(NEXT_STATES) == set(LeaseState)
    assert [state for state, ways in NEXT_STATES.items() if LeaseState.RELEASED not in ways] == [
        LeaseState.RELEASED
    ]


def test_a_lease_only_goes_forward_and_may_skip_steps() -> None:
    """The leader moves a lease from any state to any later one in one step."""
    order = [
        LeaseState.RESERVED,
        LeaseState.HELD,
        LeaseState.RELEASING,
        LeaseState.QUARANTINED,
        LeaseState.RELEASED,
    ]
    for place, state in enumerate(order):
        assert NEXT_STATES[state] == set(order[place + 1 :])


def test_a_lease_never_goes_back() -> None:
    released = a_lease(a_task(), "gpu0", 1, state=LeaseState.RELEASED)
    with pytest.raises(IllegalTransition, match="is released; it cannot become held"):
        move_lease(released, LeaseState.HELD)
