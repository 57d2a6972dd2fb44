"""The events of decisions, submissions and requests, and the task that each belongs to."""

import pytest
from gpubroker_server.core.domain.decisions import (
    Decision,
    Notice,
    PledgeWrite,
    Request,
    device_delta_mb,
    tenant_delta_mb,
    write_move,
)
from gpubroker_server.core.domain.lease import LeaseState, PledgeEnd, Proof, release
from gpubroker_server.core.domain.task import Move
from gpubroker_server.core.domain.units import Position, TaskId
from gpubroker_server.core.world.events import Event, NewEvent, events_of, requested, submitted, task_of
from gpubroker_server.core.world.payload import encode, read_task
from msgspec.structs import replace

from tests.builders import NOW, a_device, a_lease, a_node, a_pledge, a_task, key

REQUEST = Request("r1", TaskId("t"), "default", "cancel", {"grace_seconds": 5.0}, NOW)


def test_the_events_of_a_decision_have_a_fixed_order_and_carry_the_changes() -> None:
    run, high = a_task("t", priority=10), a_task("high")
    new, old = a_lease(run, "gpu0", 20, version=1), a_lease(run, "gpu1", 30)
    decision = Decision(
        "t",
        "everything",
        tasks=(write_move(run, Move.CHANGED, priority=60),),
        leases=(new, release(old, Proof.PROCESS_ABSENT)),
        pledges=(
            PledgeWrite(a_pledge(high, "gpu0", 5)),
            PledgeWrite(a_pledge(run, "gpu0", 5), PledgeEnd.TAKEN),
        ),
        devices=(a_device(),),
        nodes=(a_node(),),
        requests_done=("r1",),
        notices=(Notice("memory.fragmented", "cluster", {"waiting": 3}),),
    )
    lines = list(events_of(decision))
    assert [line.kind for line in lines] == [
        "node.seen",
        "device.seen",
        "task.changed",
        "lease.held",
        "lease.released",
        "pledge.made",
        "pledge.taken",
        "request.done",
        "memory.fragmented",
    ]
    assert lines[2].fields == {"state": "pending", "priority": 60}
    assert lines[4].fields == {"state": "released", "proof": "process_absent"}


def test_device_delta_adds_new_leases_and_subtracts_released_ones() -> None:
    run = a_task("t")
    kept, gone = a_lease(run, "gpu1", 30, state=LeaseState.RELEASING), a_lease(run, "gpu2", 40)
    leases = (a_lease(run, "gpu0", 20, version=1), kept, release(gone, Proof.PROCESS_ABSENT))
    assert device_delta_mb(Decision("t", "ended", leases=leases)) == {key("gpu0"): 20, key("gpu2"): -40}


def test_tenant_delta_adds_new_leases_and_subtracts_released_ones() -> None:
    mine, others = a_task("mine", tenant="acme"), a_task("others", tenant="beta")
    given, kept = a_lease(mine, "gpu0", 20, version=1), a_lease(mine, "gpu1", 30, state=LeaseState.RELEASING)
    gone = [release(a_lease(whose, "gpu2", 40), Proof.PROCESS_ABSENT) for whose in (mine, others)]
    assert tenant_delta_mb(Decision("t", "ended", leases=(given, kept, *gone))) == {"acme": -20, "beta": -40}


def test_an_event_gets_its_position_and_time_and_keeps_the_rest() -> None:
    task = a_task("t")
    event = submitted(task).at(Position(7), NOW)
    assert (event.position, event.at, event.key, event.tenant, event.task) == (7, NOW, "t", "default", task)
    assert read_task(event.payload) == task


@pytest.mark.parametrize(
    ("event", "task"),
    [
        (submitted(a_task("t")), "t"),
        (requested(REQUEST), "t"),
        (NewEvent("pledge.made", "t:c/n1/gpu0", 1, "", {"preemptor": "t"}), "t"),
        (NewEvent("lease.held", "run:t:1:0:c/n1/gpu0", 2, "", {}), "t"),
        (NewEvent("lease.held", "model:t:1:0:c/n1/gpu0", 2, "", {}), "t"),
        (NewEvent("lease.held", "worker:w:1:0:c/n1/gpu0", 2, "", {}), None),
        (NewEvent("worker.left", "t", 1, "", {"set": "s"}), "t"),
        (NewEvent("node.seen", "n1", 1, "", {}), None),
    ],
)
def test_an_event_belongs_to_one_task_or_to_none(event: NewEvent, task: str | None) -> None:
    assert task_of(event) == task


def test_event_equals_itself_read_from_the_log() -> None:
    task = a_task("t")
    written = submitted(task).at(Position(1), NOW)
    read = Event(Position(1), NOW, "task.submitted", "t", 1, "default", encode(task))
    assert (written, hash(written)) == (read, hash(read))
    assert written != replace(read, version=2)
    assert written != "task.submitted"
    assert submitted(task).fields == written.fields == read.fields
