"""Each invariant of the history checker has a small history that violates it."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from gpubroker_server.core.domain.decisions import Decision, PledgeWrite, TaskWrite, write_move
from gpubroker_server.core.domain.lease import LeaseState, Pledge, PledgeEnd, Proof, move_lease, release
from gpubroker_server.core.domain.task import Move, StopReason, Task
from gpubroker_server.core.domain.units import Fence, Instant, Mib, Position
from gpubroker_server.core.world.events import Event, events_of, submitted
from msgspec.structs import replace

from tests.builders import GIB, NOW, a_device, a_node, a_task, key
from tests.chaos.history import violations
from tests.contracts.scenes import a_new_lease

GPU0 = key("gpu0")
MEMORY_MB = 80 * GIB


class Preemption:
    """`high` preempts `low`, which runs again afterwards."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._append(events_of(Decision("n1", "node_seen", nodes=(a_node(),), devices=(a_device(),))))
        low = self._submit(a_task("low", gpu_mb=60 * GIB, priority=10))
        high = self._submit(a_task("high", gpu_mb=40 * GIB, priority=80))
        low = self._claim(low, 60 * GIB)
        lease = self._move(self.lease, LeaseState.HELD)
        low = self._write(low, Move.STARTED, started_at=NOW)
        pledge = Pledge(high.id, GPU0, Mib(40 * GIB), 80, "default", NOW, Instant(NOW + 30.0))
        stops: dict[str, Any] = {"stop_reason": StopReason.PREEMPT, "stop_deadline_at": Instant(NOW + 30.0)}
        notice = write_move(low, Move.STOPPING, **stops, freeing_for=high.id)
        self._decide(tasks=(notice,), pledges=(PledgeWrite(pledge),))
        lease = self._move(lease, LeaseState.RELEASING)
        back = write_move(notice.task, Move.REQUEUED, preemptions=1, freeing_for=None)
        self._decide(tasks=(back,), leases=(release(lease, Proof.PROCESS_ABSENT),))
        admission = write_move(high, Move.ADMITTED, fence=Fence(1), node="n1")
        taken = a_new_lease(admission.task, 40 * GIB)
        end = PledgeWrite(pledge, PledgeEnd.CONSUMED)
        self._decide(tasks=(admission,), leases=(taken,), pledges=(end,))
        done = write_move(admission.task, Move.SUCCEEDED, finished_at=NOW)
        self._decide(tasks=(done,), leases=(move_lease(taken, LeaseState.RELEASING),))
        self._move(move_lease(taken, LeaseState.RELEASING), LeaseState.RELEASED)
        self._write(self._claim(back.task, 60 * GIB), Move.SUCCEEDED, finished_at=NOW)
        self._move(self.lease, LeaseState.RELEASED)

    def _append(self, new_events: Any) -> None:
        """One transaction, one second after the last."""
        at = Instant(NOW + len({event.at for event in self.events}))
        for new in new_events:
            self.events.append(new.at(Position(len(self.events) + 1), at))

    def _submit(self, task: Task) -> Task:
        self._append([submitted(task)])
        return task

    def _decide(self, **parts: Any) -> None:
        self._append(events_of(Decision("test", "test", **parts)))

    def _write(self, task: Task, what: Move, **changes: Any) -> Task:
        write = write_move(task, what, **changes)
        self._decide(tasks=(write,))
        return write.task

    def _claim(self, task: Task, mb: int) -> Task:
        write: TaskWrite = write_move(task, Move.ADMITTED, fence=Fence(task.fence + 1), node="n1")
        self.lease = a_new_lease(write.task, mb)
        self._decide(tasks=(write,), leases=(self.lease,))
        return write.task

    def _move(self, lease: Any, state: LeaseState) -> Any:
        is_end = state is LeaseState.RELEASED
        after = release(lease, Proof.PROCESS_ABSENT) if is_end else move_lease(lease, state)
        self._decide(leases=(after,))
        return after


def at(events: Sequence[Event], kind: str, key: str = "", nth: int = 0) -> int:
    """The index of the nth event of this kind whose key begins with `key`."""
    return [i for i, e in enumerate(events) if e.kind == kind and e.key.startswith(key)][nth]


def with_fields(events: list[Event], index: int, **fields: Any) -> list[Event]:
    events[index] = replace(events[index], payload={**events[index].fields, **fields})
    return events


def of_kind(events: list[Event], index: int, kind: str) -> list[Event]:
    events[index] = replace(events[index], kind=kind)
    return events


def again(events: list[Event], index: int, **changes: Any) -> list[Event]:
    """The event repeated at the end, in a separate transaction."""
    last = events[-1]
    echo = replace(events[index], position=last.position + 1, at=last.at + 1, **changes)
    return [*events, echo]


def without(events: list[Event], index: int) -> list[Event]:
    """The events without this one, renumbered."""
    left = [*events[:index], *events[index + 1 :]]
    return [replace(event, position=Position(n)) for n, event in enumerate(left, start=1)]


Mutation = Callable[[list[Event]], list[Event]]

VIOLATING: dict[str, Mutation] = {
    "the log has no gap": lambda events: [*events[:5], *events[6:]],
    "a task is submitted once": lambda events: again(events, at(events, "task.submitted")),
    "a task begins pending": lambda events: with_fields(events, 2, state="running"),
    "only a submitted task changes": lambda events: without(events, at(events, "task.submitted")),
    "an ended task stays ended": lambda events: again(events, at(events, "task.started"), version=99),
    "each change has the next version": lambda events: without(events, at(events, "lease.held")),
    "a task moves as the transition table says": lambda events: without(events, at(events, "task.requeued")),
    "each claim has the next fence": lambda events: with_fields(
        events, at(events, "task.admitted", "low", 1), fence=1
    ),
    "a task is claimed by one run at a time": lambda events: with_fields(
        with_fields(events, at(events, "lease.released"), state="held"), at(events, "lease.releasing")
    ),
    "memory is leased to the newest claim": lambda events: with_fields(
        events, at(events, "lease.reserved", "run:low", 1), fence=1
    ),
    "a lease is made once": lambda events: again(events, at(events, "lease.reserved")),
    "a lease is released once": lambda events: again(events, at(events, "lease.released")),
    "a lease goes forward only": lambda events: with_fields(
        events, at(events, "lease.releasing"), state="reserved"
    ),
    "a lease is released with a proof": lambda events: with_fields(
        events, at(events, "lease.released"), proof="it must be"
    ),
    "only a known lease changes": lambda events: without(events, at(events, "lease.reserved")),
    "memory is released when its run is over, not before": lambda events: with_fields(
        events, at(events, "lease.held"), state="released"
    ),
    "no byte is leased twice": lambda events: with_fields(
        events, at(events, "lease.reserved"), mb=MEMORY_MB + 1
    ),
    "no byte is leased or pledged twice": lambda events: with_fields(
        events, at(events, "pledge.made"), mb=MEMORY_MB + 1
    ),
    "a pledge is made once": lambda events: of_kind(events, at(events, "pledge.consumed"), "pledge.made"),
    "a pledge ends once": lambda events: again(events, at(events, "pledge.consumed")),
}


def test_a_complete_preemption_violates_no_invariant() -> None:
    assert violations(Preemption().events) == []


@pytest.mark.parametrize("invariant", VIOLATING)
def test_each_invariant_has_a_history_that_violates_it(invariant: str) -> None:
    found = violations(VIOLATING[invariant](Preemption().events))
    assert any(line.startswith(invariant) for line in found), found


def test_a_violation_names_its_position_and_event() -> None:
    [found] = violations(VIOLATING["each claim has the next fence"](Preemption().events))[:1]
    assert "position 20" in found
    assert "task.admitted low" in found


def test_given_capacities_override_those_of_the_log() -> None:
    assert violations(Preemption().events, {GPU0: 60 * GIB}) == []
    assert any("leased twice" in line for line in violations(Preemption().events, {GPU0: 60 * GIB - 1}))


def test_a_device_that_shrinks_does_not_violate_existing_leases() -> None:
    events = Preemption().events
    seen = events[at(events, "device.seen")]
    smaller = replace(seen, version=2, payload={**seen.fields, "physical_mb": 10 * GIB, "version": 2})
    where = at(events, "task.started")
    shrunk = [*events[:where], smaller, *events[where : at(events, "task.stopping")]]
    assert violations([replace(event, position=Position(n)) for n, event in enumerate(shrunk, 1)]) == []


@pytest.mark.parametrize("start", range(len(Preemption().events)))
def test_a_log_whose_beginning_was_pruned_is_checked_from_there(start: int) -> None:
    events = Preemption().events
    assert violations(events[start:], after=Position(start)) == []
    assert any("no gap" in line for line in violations(events[start + 1 :], after=Position(start))) or (
        start + 1 == len(events)
    )
