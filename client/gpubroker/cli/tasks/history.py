"""What a task's own events tell of it and its present state does not: who made it stop, and why."""

from datetime import datetime
from typing import TYPE_CHECKING

from gpubroker.cli.layout import moment, short_id
from gpubroker.tasks.task import TaskState

if TYPE_CHECKING:
    from gpubroker.broker import Broker
    from gpubroker.tasks.task import Event, Task


def told(broker: "Broker", task: "Task") -> dict[str, str]:
    """Lines about the past by what they are about; asks for the events only of a task that was stopped."""
    if not task.preemptions and not task.stop_reason and task.state is not TaskState.CANCELLED:
        return {}
    lines: dict[str, str] = {}
    notice: Event | None = None
    saved_at, after = None, ""
    for event in broker.events(task):
        fields = event.fields
        saved_at = fields.get("checkpoint_at") or saved_at
        match event.kind:
            case "task.stopping" if fields.get("stop_reason") in ("preempt", "move"):
                notice, after = event, ""
            case "task.requeued" if notice and not after:
                after = _from_where(task, saved_at)
            case "request.made" if fields.get("what") == "cancel":
                lines["cancelled"] = f"asked for at {moment(event.at)}{_because(event)}"
    if notice is not None:
        what = "moved" if notice.fields["stop_reason"] == "move" else "preempted"
        lines[what] = _preempted(broker, task, notice) + after
    return lines


def _preempted(broker: "Broker", task: "Task", notice: "Event") -> str:
    other = notice.fields.get("freeing_for")
    whom = f"{_name(broker, other)} ({short_id(other)})" if other else "a task of another tenant"
    times = f"{task.preemptions}×, last " if task.preemptions > 1 else ""
    return f"{times}at {moment(notice.at)} for {whom}"


def _from_where(task: "Task", saved_at: str | None) -> str:
    goes, begins = ("goes", "begins") if task.state is TaskState.PENDING else ("went", "began")
    if saved_at is None:
        return f"; without a checkpoint it {begins} anew"
    return f"; it {goes} on from its checkpoint of {moment(datetime.fromisoformat(saved_at))}"


def _name(broker: "Broker", task: str) -> str:
    from gpubroker.errors import Refused

    try:
        return broker.get(task).name or "a task"
    except Refused:
        return "a task that is no longer kept"


def _because(event: "Event") -> str:
    reason = event.fields["fields"].get("reason")
    return f": {reason}" if reason else ""
