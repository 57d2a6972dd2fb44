"""`gpubroker events`, and what a task's own events say about its past."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Group
from rich.text import Text

from gpubroker.cli import parsing
from gpubroker.cli.lookup import connect, task_id
from gpubroker.cli.printing import Format, Output, emit, emit_all, print_drawn
from gpubroker.cli.tables import duration, short_id, size, timestamp
from gpubroker.errors import Refused

if TYPE_CHECKING:
    from gpubroker.broker import Broker
    from gpubroker.tasks.event_reading import EventOptions
    from gpubroker.tasks.task import Task
    from gpubroker.wire.events import Event

_KIND_CELLS = 16
ATTEMPTS = "attempts"
_STOPPED = {
    "preempt": "preempted",
    "move": "moved",
    "cancel": "cancelled",
    "timeout": "over its time limit",
    "deadline": "past its deadline",
    "overuse": "over its lease",
    "rank_failed": "one rank failed",
    "rank_lost": "one rank was lost",
    "start_timeout": "its ranks were not ready in time",
}
_ENDS = frozenset({"succeeded", "failed", "cancelled", "expired"})


def events(
    task: Annotated[
        str | None, typer.Argument(metavar="TASK", help="Only events of this task, array or set.")
    ] = None,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Print new events as they happen; of a task until it has ended."),
    ] = False,
    after: Annotated[int | None, typer.Option(help="Start after this position of the log.")] = None,
    last: Annotated[
        int | None,
        typer.Option(
            "--last",
            "-n",
            min=0,
            max=500,
            help="Number of the newest events to start with, without --after. Default: 50; all of a task.",
        ),
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            "--kind", "-k", help="Only events of this kind: task.failed, or task.* for a subject; repeatable."
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(
            "--label",
            "-l",
            metavar="NAME=VALUE",
            help="Only events of tasks with this label; repeatable.",
        ),
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Only events of this tenant; for admins.")] = None,
    output: Output = Format.TABLE,
) -> None:
    """Print the event log: changes of tasks, leases, pledges, devices and nodes, in order. Checkpoints of a
    task that follow each other are counted in one line.

    A token sees the events of its tenant, and with the scope cluster:read those of nodes and devices.
    """
    with connect() as broker:
        wanted = None if task is None else task_id(broker, task)
        last = 50 if last is None and wanted is None else last
        options: EventOptions = {"after": after or 0} if after is not None or last is None else {"last": last}
        given = {"kind": kind, "labels": parsing.pairs(label or [], "--label"), "tenant": tenant}
        options |= cast("EventOptions", {name: value for name, value in given.items() if value})
        _print(broker, wanted, options, follow, output)


def _print(broker: Broker, wanted: str | None, options: EventOptions, follow: bool, output: Format) -> None:
    if output is Format.JSON and not follow:
        listed = list(broker.events(wanted, **options))
        emit_all(output, listed, lambda events: Group(*map(_event_line, events)))
        return
    try:
        if output is Format.TABLE:
            for line in _lines_of(broker.events(wanted, follow=follow, **options)):
                print_drawn(line)
            return
        for event in broker.events(wanted, follow=follow, **options):
            emit(Format.NDJSON, event, _event_line)
    except KeyboardInterrupt:
        return


def _lines_of(events: Iterable[Event]) -> Iterator[Text]:
    """Yield a line for each event, but only one for the checkpoints of a task that follow each other. When
    something else happens to the task, or at the end, a line says how many followed and when the last was."""
    saved: dict[str, tuple[Event, int]] = {}
    for event in events:
        _, count = saved.get(event.key, (event, -1))
        if _is_checkpoint(event):
            saved[event.key] = event, count + 1
            if count >= 0:
                continue
        elif count >= 0:
            yield from _folded(*saved.pop(event.key))
        yield _event_line(event)
    for last, count in saved.values():
        yield from _folded(last, count)


def _is_checkpoint(event: Event) -> bool:
    return event.kind == "task.changed" and event.fields.keys() == {"checkpoint_at"}


def _folded(last: Event, count: int) -> Iterator[Text]:
    if count:
        note = f"  (the last of {count} more checkpoints; -o json has all)" if count > 1 else ""
        yield _event_line(last).append(note, "dim")


def _event_line(event: Event) -> Text:
    """Return a line with position, time, kind, subject, and the new values in words. `-o json` has all
    fields."""
    subject, place = _subject(event)
    facts = ", ".join(fact for fact in (place, *_facts(event)) if fact)
    if not facts and event.kind.endswith(".changed"):
        facts = ", ".join(event.fields)
    return Text.assemble(
        (f"{event.position:>6} {event.at:%H:%M:%S} ", "dim"),
        (f"{event.kind:<{_KIND_CELLS}} ", "bold"),
        f"{subject}  {facts}",
    )


def _subject(event: Event) -> tuple[str, str]:
    """Return the subject of an event, and its device. For leases and pledges both are in the key."""
    match event.kind.partition(".")[0], event.key.split(":"):
        case "task", _:
            return short_id(event.key), ""
        case "lease", [_, holder, _, _, device]:
            return short_id(holder), _on(device)
        case "pledge", [preemptor, device]:
            return short_id(preemptor), _on(device)
        case "request", _:
            return short_id(event.fields.get("task")), ""
        case "device", _:
            return event.key.rpartition("/")[2], ""
        case _:
            return event.key, ""


def _on(device: str) -> str:
    """Return the place of a pledge in words. A pledge may be for a node itself: `/node/`."""
    return f"on {device.rstrip('/').rpartition('/')[2]}"


def _facts(event: Event) -> Iterator[str]:
    if event.kind.startswith("pledge.") and event.kind != "pledge.made":
        return  # its fields are those of pledge.made
    for name, value in event.fields.items():
        if value is not None and (word := _fact(name, value)):
            yield word


def _fact(name: str, value: Any) -> str:
    """Return a field in words; empty if it repeats another field or is only for programs."""
    match name:
        case "name" | "stop_reason" | "stop_cause" | "reason" | "what" | "kind" | "proof" | "by":
            return str(value)
        case "waiting" | "priority" | "preemptions" | "failures" | "cpu" | "index":
            return f"{name} {value}"
        case "mb" | "gpu_mb" | "physical_mb":
            return size(value) if value else ""
        case "need_mb" | "free_mb" | "largest_mb":
            return f"{name.removesuffix('_mb')} {size(value)}"
        case "overused_mb":
            return f"used {size(value)}" if value else ""
        case "values":
            return ", ".join(_learned(*lesson) for lesson in value)
        case "node":
            return f"on {value}"
        case "freeing_for":
            return f"for {short_id(value)}"
        case "demand" | "fields":
            return ", ".join(word for part, inner in value.items() if (word := _fact(part, inner)))
        case "ready":
            return "answers" if value else "does not answer"
        case "awaits":
            return "" if value else "waits for no other task any more"
        case "failed_by":
            return f"because of {short_id(value)}"
        case "after":
            return f"after {', '.join(short_id(task) for task, _ in value)}"
        case "held":
            return "held" if value else "released"
        case "gpus" if value > 1:
            return f"{value} GPUs"
        case "stop_deadline_at" | "checkpoint_at" | "not_before" | "deadline_at" | "expires_at":
            words = {"checkpoint_at": "saved at", "not_before": "not before", "expires_at": "expires at"}
            return f"{words.get(name, 'by')} {str(value)[11:19]}"
        case _:
            return ""


def _learned(kind: str, quantity: str, value: float | None) -> str:
    """Return the amount that a run used, and the kind of device. Without a value, the estimate was
    dropped."""
    used = "" if value is None else size(value) if quantity == "gpu_mb" else f"{value:g} s"
    return " ".join(word for word in (used or quantity, f"on {kind}" if kind else "") if word)


def past_of(broker: Broker, task: Task) -> dict[str, str]:
    """Return the reason why a task stopped, and its attempts if there were several, by subject. The events
    are fetched only for a task that was stopped or started again."""
    has_attempts = task.attempt > 1 or bool(task.preemptions or task.failures)
    if not has_attempts and not task.stop_reason and task.state != "cancelled":
        return {}
    lines: dict[str, str] = {}
    notice: Event | None = None
    saved_at, resumed = None, ""
    # An array or a worker set has the events of all its workers, and its view the attempts of the first.
    events = [event for event in broker.events(task) if task.id in (event.key, event.fields.get("task"))]
    if has_attempts:
        lines[ATTEMPTS] = "\n".join(attempts_of(events))
    for event in events:
        fields = event.fields
        saved_at = fields.get("checkpoint_at") or saved_at
        match event.kind:
            case "task.stopping" if fields.get("stop_reason") in ("preempt", "move"):
                notice, resumed = event, ""
            case "task.requeued" if notice and not resumed:
                resumed = _resumed_from(task, saved_at)
            case "request.made" if fields.get("what") == "cancel":
                by, reason = fields["fields"].get("by"), fields["fields"].get("reason")
                whose = f" by {by}" if by else ""
                lines["cancelled"] = (
                    f"requested at {timestamp(event.at)}{whose}{f': {reason}' if reason else ''}"
                )
    if notice is not None:
        what = "moved" if notice.fields["stop_reason"] == "move" else "preempted"
        if notice.fields.get("stop_cause"):
            what = "asked to leave"
        lines[what] = _preempted(broker, task, notice) + resumed
    return lines


def attempts_of(events: Iterable[Event]) -> Iterator[str]:
    """Return where each attempt ran, for how long, and why it ended."""
    number, node, stop_reason = 0, "", ""
    began: datetime | None = None
    failures = 0
    for event in events:
        fields = event.fields
        subject, _, change = event.kind.partition(".")
        if subject != "task":
            continue
        if change == "admitted":
            number, node, stop_reason, began = (
                fields.get("fence") or number + 1,
                fields.get("node") or "",
                "",
                None,
            )
        elif change == "started":
            began = event.at
        elif change == "stopping":
            stop_reason = _why_stopped(fields)
        elif number and (change == "requeued" or change in _ENDS):
            failed, failures = fields.get("failures", failures) > failures, fields.get("failures", failures)
            end = change if change in _ENDS else "failed" if failed else stop_reason or "its run was lost"
            yield f"{_attempt(number, node, began, event.at)}, {end} at {timestamp(event.at)}"
            number = 0
    if number:
        since = f"since {timestamp(began)}" if began else "starting"
        yield f"{number}: {f'on {node} ' if node else ''}{since}"


def _why_stopped(fields: Mapping[str, Any]) -> str:
    reason = str(fields.get("stop_reason") or "")
    said = (
        "asked to leave" if reason == "preempt" and fields.get("stop_cause") else _STOPPED.get(reason, reason)
    )
    return f"{said} for {fields['stop_cause']}" if fields.get("stop_cause") else said


def _attempt(number: int, node: str, began: datetime | None, ended: datetime | None) -> str:
    on_node = f"on {node} " if node else ""
    if began is None or ended is None:
        return f"{number}: {on_node}not started"
    return f"{number}: {on_node}for {duration((ended - began).total_seconds())}"


def _preempted(broker: Broker, task: Task, notice: Event) -> str:
    times = f"{task.preemptions}×, last " if task.preemptions > 1 else ""
    cause = notice.fields.get("stop_cause") or _preemptor(broker, notice.fields)
    return f"{times}at {timestamp(notice.at)}{f' for {cause}' if cause else ''}"


def _preemptor(broker: Broker, fields: Mapping[str, Any]) -> str:
    """Return the task for which the preempted one made room; empty if none is recorded, as by an earlier
    release."""
    if "freeing_for" not in fields:
        return ""
    preemptor = fields["freeing_for"]
    return f"{_name(broker, preemptor)} ({short_id(preemptor)})" if preemptor else "a task of another tenant"


def _resumed_from(task: Task, saved_at: str | None) -> str:
    resumes, starts = ("resumes", "starts") if task.state == "pending" else ("resumed", "started")
    if saved_at is None:
        return f"; without a checkpoint it {starts} from the beginning"
    return f"; it {resumes} from its checkpoint of {timestamp(datetime.fromisoformat(saved_at))}"


def _name(broker: Broker, task: str) -> str:
    try:
        return broker.get(task).name or "a task"
    except Refused:
        return "a task that is no longer kept"
