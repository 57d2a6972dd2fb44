"""What a task's own events tell of it and its present state does not: who made it stop, and why."""

from typing import TYPE_CHECKING

from gpubroker.cli.layout import moment, short_id
from gpubroker.models import TaskState

if TYPE_CHECKING:
    from gpubroker.broker import Broker
    from gpubroker.models import Event, Task


def told(broker: "Broker", task: "Task") -> dict[str, str]:
    """Lines about the past by what they are about; asks for the events only of a task that was stopped."""
    stopped_by_person = task.state is TaskState.CANCELLED or task.stop_reason == "cancel"
    if not (task.preemptions or task.stop_reason or stopped_by_person):
        return {}
    lines: dict[str, str] = {}
    for event in broker.events(task):
        if event.kind == "task.stopping" and event.fields.get("stop_reason") == "preempt":
            lines["preempted"] = _preempted(broker, task, event)
        elif event.kind == "request.made" and event.fields.get("what") == "cancel":
            lines["cancelled"] = f"asked for at {moment(event.at)}{_because(event)}"
    return lines


def _preempted(broker: "Broker", task: "Task", event: "Event") -> str:
    other = event.fields.get("freeing_for")
    whom = f"{_name(broker, other)} ({short_id(other)})" if other else "a task of another tenant"
    times = f"{task.preemptions}×, " if task.preemptions > 1 else ""
    said = f"{times}last at {moment(event.at)} for {whom}" if times else f"at {moment(event.at)} for {whom}"
    if task.state is not TaskState.PENDING:
        return said
    if task.checkpoint_at is None:
        return f"{said}; it has no checkpoint and begins anew"
    return f"{said}; it goes on from its checkpoint of {moment(task.checkpoint_at)}"


def _name(broker: "Broker", task: str) -> str:
    from gpubroker.errors import Refused

    try:
        return broker.get(task).name or "a task"
    except Refused:
        return "a task that is no longer kept"


def _because(event: "Event") -> str:
    reason = event.fields["fields"].get("reason")
    return f": {reason}" if reason else ""
