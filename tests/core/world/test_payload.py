"""The payloads of events: what is written is read, and other releases read it."""

import json
from typing import Any

import pytest
from gpubroker_server.core.domain.decisions import Decision, write_move
from gpubroker_server.core.domain.demand import Demand, PlacementConstraints
from gpubroker_server.core.domain.holders import (
    INFERENCE,
    RUN,
    External,
    Gang,
    Holder,
    Member,
    Model,
    WorkerSeat,
)
from gpubroker_server.core.domain.lease import LeaseState
from gpubroker_server.core.domain.models import ModelUsage
from gpubroker_server.core.domain.task import Dependency, Move, StopReason, TaskState
from gpubroker_server.core.domain.units import NodeName, Seconds, TaskId
from gpubroker_server.core.world.events import events_of
from gpubroker_server.core.world.payload import (
    changed_task,
    encode,
    fields_of,
    payload_of,
    read,
    read_task,
    released_members,
)
from msgspec import ValidationError
from msgspec.structs import replace

from tests.builders import NOW, a_demand, a_lease, a_task

WHERE = PlacementConstraints(
    kinds=("H100",), min_power=5, nodes=(("zone", ("a", "b")),), prefer_nodes=(("node", ("n1",)),)
)
DEMAND = a_demand(
    gpu_mb=2048,
    cpu=1.0,
    custom={"licence": 2.0, "a": 1.0},
    where=WHERE,
    pool="lab",
    slots=(("tenant:a", 1.0),),
)


def test_task_comes_back_from_its_text() -> None:
    task = a_task(demand=DEMAND, max_retries=2, shareable=True, after=(Dependency(TaskId("a")),))
    assert read_task(encode(task)) == task


def test_task_under_notice_comes_back_from_its_text() -> None:
    task = a_task(state=TaskState.STOPPING, stop_reason=StopReason.CANCEL, stop_deadline_at=NOW)
    row = fields_of(task)
    assert (row["state"], row["stop_reason"]) == ("stopping", "cancel")
    assert read_task(row) == task


def test_tasks_read_from_texts_share_equal_demands() -> None:
    one, other = (read_task(encode(a_task(id, demand=DEMAND))) for id in "ab")
    assert one.demand is other.demand


def test_fields_of_a_later_release_are_left_out() -> None:
    task = a_task(demand=DEMAND)
    assert read_task({**fields_of(task), "of_a_later_release": 1}) == task
    after = changed_task(task, {"state": "pending", "priority": 70, "of_a_later_release": 1}, 9)
    assert (after.priority, after.version, after.demand) == (70, 9, DEMAND)


def test_changed_distinguishes_an_absent_field_from_none() -> None:
    task = a_task(stop_reason=StopReason.CANCEL, stop_deadline_at=NOW)
    after = changed_task(task, '{"state":"pending","stop_reason":null}', 2)
    assert (after.stop_reason, after.stop_deadline_at) == (None, NOW)


def test_defaults_are_not_encoded_except_the_state() -> None:
    assert fields_of(Demand()) == {}
    assert fields_of(a_task("t")) == {
        "id": "t", "tenant": "default", "name": "t", "priority": 50, "demand": {}, "submitted_at": NOW,
        "state": "pending",
    }  # fmt: skip


def test_value_is_its_own_payload_in_the_process_that_wrote_it() -> None:
    lease = a_lease(a_task(), "gpu0", 1)
    assert read(lease, type(lease)) is lease
    assert encode(encode(lease)) == encode(lease)


def test_payload_of_another_kind_is_refused() -> None:
    with pytest.raises(ValidationError, match="Expected `array`, got `object`"):
        read(encode(a_lease(a_task(), "gpu0", 1, state=LeaseState.HELD)), Member)
    with pytest.raises(ValidationError):
        read_task({"rank": 0})


GANG: dict[str, Any] = {"demand": Demand(bundles=(Demand(cpu=1.0),))}
HOLDERS: list[tuple[Holder, dict[str, Any], dict[str, Any]]] = [
    (RUN, {}, {}),
    (Gang(), GANG, {}),
    (WorkerSeat(TaskId("t0")), {}, {"array": "t0"}),
    (External(Seconds(60.0), 7), {}, {"external": {"ttl_seconds": 60.0, "pid": 7}}),
    (INFERENCE, {"demand": Demand(answered_by="llm")}, {}),
]


@pytest.mark.parametrize(("holder", "fields", "written"), HOLDERS)
def test_holder_has_its_fields_beside_those_of_the_task(
    holder: Holder, fields: dict[str, Any], written: dict[str, Any]
) -> None:
    task = a_task(holder=holder, **fields)
    text = fields_of(payload_of(task))
    assert {name: text[name] for name in ("array", "external", "model", "members") if name in text} == written
    assert "holder" not in text
    assert read_task(encode(payload_of(task))) == task


def test_model_and_members_come_back_from_their_texts() -> None:
    model = a_task(holder=Model("main", "llm", steps=("a",), usage=ModelUsage(NOW, (1.0, 0.0, 0.0, 0.0))))
    text = fields_of(payload_of(model))
    assert (text["model"]["server"], text["model"]["steps"]) == ("main", ["a"])
    assert read_task(text) == model
    gang = a_task(holder=Gang((Member(0, NodeName("n1"), address="h:1"),)), **GANG)
    assert read_task(encode(payload_of(gang))) == gang


def test_changed_holder_comes_back_from_the_text_of_an_event() -> None:
    loaded = Model("main", "llm", load_seconds=Seconds(4.0))
    for before, after in ((Gang(), Gang((Member(0, NodeName("n1")),))), (Model("main", "llm"), loaded)):
        task = a_task(holder=before, state=TaskState.ADMITTED, **GANG)
        write = write_move(task, Move.CHANGED, holder=after, priority=7)
        [event] = events_of(Decision(task.id, "test", tasks=(write,)))
        assert "holder" not in event.fields
        assert changed_task(task, encode(event.payload), event.version) == write.task


def test_fields_of_other_holders_change_nothing() -> None:
    """Release 0.2.0 wrote an empty list of members with some changes of tasks that are no gangs."""
    text = '{"state":"pending","members":[],"model":null}'
    for holder in (RUN, External(Seconds(60.0)), WorkerSeat(TaskId("t0"))):
        task = a_task(holder=holder)
        assert changed_task(task, text, 2) == replace(task, version=2)


def test_members_are_written_as_release_0_2_0_reads_them() -> None:
    """That release makes a Member of a list's values, and knows the first seven."""
    stays = Member(0, NodeName("n1"), address="h:1")
    leaves = Member(
        1, NodeName("n1"), type(stays.state).LEAVING, freeing_for=TaskId("t"), stop_deadline_at=NOW
    )
    late = Member(2, NodeName("n1"), bundle=1)
    rows = released_members((stays, leaves, late))
    assert [len(row) for row in rows] == [5, 7, 8]
    text = json.dumps({"state": "running", "members": rows})
    assert changed_task(a_task(holder=Gang()), text, 2).holder == Gang((stays, leaves, late))
