"""Rows as plain values: what is written can be read, and events share nothing mutable."""

import json

from gpubroker_server.core.domain.demand import PlacementConstraints
from gpubroker_server.core.domain.task import StopReason, TaskState
from gpubroker_server.core.world.event_codec import (
    changed_task,
    demand_fields,
    demand_from,
    task_fields,
    task_from,
)

from tests.builders import NOW, a_demand, a_task

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


def test_a_task_comes_back_from_json_as_it_was():
    task = a_task(demand=DEMAND, max_retries=2, shareable=True)
    assert task_from(json.loads(json.dumps(task_fields(task)))) == task


def test_a_task_under_notice_comes_back_as_it_was():
    task = a_task(state=TaskState.STOPPING, stop_reason=StopReason.CANCEL, stop_deadline_at=NOW)
    row = json.loads(json.dumps(task_fields(task)))
    assert (row["state"], row["stop_reason"]) == ("stopping", "cancel")
    assert task_from(row) == task


def test_what_a_later_release_has_added_to_a_task_is_left_out():
    task = a_task(demand=DEMAND)
    row = json.loads(json.dumps(task_fields(task))) | {"of_a_later_release": 1}
    assert task_from(row) == task
    changes = {"state": "pending", "priority": 70, "of_a_later_release": 1}
    assert changed_task(task, task.version + 1, changes).priority == 70


def test_only_what_differs_from_the_default_is_written():
    assert demand_fields(a_demand()) == {}
    assert demand_from({}) == a_demand()


def test_events_share_no_mutable_fields():
    first = demand_fields(DEMAND)
    first["gpu_mb"] = 1
    first["custom"][0][1] = 9.0
    first["where"]["kinds"].append("A100")
    assert demand_from(demand_fields(DEMAND)) == DEMAND
