"""The commands `gpubroker cancel`, `retry`, `stack`, `hold`, `release`, `priority` and `change`."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.text import Text

from gpubroker.cli import parsing
from gpubroker.cli.lookup import (
    AnyTaskWords,
    TaskWord,
    TaskWords,
    WorkerId,
    change_each,
    connect,
    remember_last,
    task_id,
)
from gpubroker.cli.printing import Format, Output, confirm, emit, emit_all, eprint, show
from gpubroker.cli.tasks.view import task_table
from gpubroker.errors import Refused

if TYPE_CHECKING:
    from gpubroker.broker import Broker
    from gpubroker.tasks.task import Task
    from gpubroker.tasks.task_api import ChangeOptions, Filters
    from gpubroker.wire.tasks import Cancelled

_NONE = "none"
_PRIORITY_HELP = "0 to 100, or the name of a band."


def cancel(
    tasks: AnyTaskWords = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="All pending and running tasks.")] = False,
    state: Annotated[
        list[str] | None, typer.Option("--state", "-s", help="All tasks in this state; repeatable.")
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option("--label", "-l", metavar="NAME=VALUE", help="All tasks with this label; repeatable."),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", "-n", help="All tasks with this name.")] = None,
    kind: Annotated[str | None, typer.Option(help="All tasks of this kind, as in ps.")] = None,
    model_type: Annotated[str | None, typer.Option(help="All tasks of this model type.")] = None,
    stream: Annotated[str | None, typer.Option(help="All tasks of this work stream.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    grace: Annotated[
        float | None,
        typer.Option(
            parser=parsing.seconds,
            metavar="DURATION",
            help="Time that a running task has to stop after its notice.",
        ),
    ] = None,
    reason: Annotated[str | None, typer.Option(help="Reason to record in the event log.")] = None,
    output: Output = Format.TABLE,
) -> None:
    """Cancel tasks: pending ones at once, running ones after notice and their grace period.

    \b
    gpubroker cancel last
    gpubroker cancel --label run=42 --state pending
    """
    filters = {
        "state": state,
        "labels": parsing.pairs(label or [], "--label"),
        "name": name,
        "kind": kind,
        "model_type": model_type,
        "stream": stream,
    }
    used_filters = {option: value for option, value in filters.items() if value}
    if [bool(tasks), everything, bool(used_filters)].count(True) != 1:
        raise typer.BadParameter("name tasks, or select them with --all or with filters, such as --label")

    def cancel_one(broker: "Broker", task: str) -> "Task":
        return broker.cancel(task, grace_seconds=grace, reason=reason)

    if tasks:
        _change(tasks, output, cancel_one)
        return
    with connect() as broker:
        selection = cast("Filters", {} if everything else used_filters)
        if not yes:
            counted = broker.cancel_selected(everything=everything, dry_run=True, **selection)
            if counted.matched:
                more = "at least " if counted.has_more else ""
                confirm(f"cancel {more}{counted.matched} tasks, {counted.started} of them started?")
        done = broker.cancel_selected(everything=everything, grace_seconds=grace, reason=reason, **selection)
        emit(output, done, _cancelled)


def _cancelled(done: "Cancelled") -> Text:
    counts = {
        "cancelled": done.cancelled,
        "stopping": done.stopping,
        "already ended": done.already_ended,
        "stored: the leader will cancel them": done.stored,
    }
    return Text(
        ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count) or "no task matches"
    )


def retry(task: TaskWord, output: Output = Format.TABLE) -> None:
    """Run an ended task again, as a new task. Your token needs the same scopes as to submit it."""
    with connect() as broker:
        new_task = broker.retry(task_id(broker, task, to_change=True))
        remember_last(broker, new_task.id)
        emit_all(output, [new_task], task_table)


def stack(
    task: TaskWord,
    rank: Annotated[int, typer.Option(help="Rank of the gang whose threads to show.")] = 0,
    worker: WorkerId = None,
    output: Output = Format.TABLE,
) -> None:
    """Show where a running task is: the stacks of all its Python threads. The task keeps running."""
    with connect() as broker:
        seen = broker.stack(task_id(broker, task), rank=rank, worker=worker)
        if output is Format.TABLE:
            show(seen.stack or seen.message)  # as it is: a wrapped path cannot be copied
        else:
            emit(output, seen, lambda _: "")


def hold(tasks: TaskWords, output: Output = Format.TABLE) -> None:
    """Keep tasks in the queue until they are released."""
    _change(tasks, output, lambda broker, task: broker.change(task, held=True))


def release(tasks: TaskWords, output: Output = Format.TABLE) -> None:
    """Release held tasks, so that they can start."""
    _change(tasks, output, lambda broker, task: broker.change(task, held=False))


def priority(
    task: TaskWord,
    value: Annotated[str, typer.Argument(metavar="PRIORITY", help=_PRIORITY_HELP)],
    output: Output = Format.TABLE,
) -> None:
    """Change the priority of a task."""
    wanted = parsing.priority(value)
    _change([task], output, lambda broker, found: broker.change(found, priority=wanted))


def _or_none(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a parser that reads what `parse` reads, and also the word none, which removes the value."""
    return lambda text: _NONE if text == _NONE else parse(text)


def change(
    tasks: TaskWords,
    priority: Annotated[
        Any, typer.Option(parser=parsing.priority, metavar="PRIORITY", help=_PRIORITY_HELP)
    ] = None,
    not_before: Annotated[
        Any,
        typer.Option(
            parser=_or_none(parsing.time_ahead),
            metavar="TIME",
            help="Earliest start; none removes it.",
        ),
    ] = None,
    queue_ttl: Annotated[
        Any,
        typer.Option(
            parser=_or_none(parsing.seconds),
            metavar="DURATION",
            help="Expire after waiting this long from now, or from --not-before; none removes the limit.",
        ),
    ] = None,
    deadline: Annotated[
        Any,
        typer.Option(
            parser=_or_none(parsing.time_ahead),
            metavar="TIME",
            help="Time at which the task expires or is stopped; none removes it.",
        ),
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """Change the priority of tasks, or the times of pending ones."""
    words_by_option = {
        "priority": priority,
        "not_before": not_before,
        "queue_ttl_seconds": queue_ttl,
        "deadline_at": deadline,
    }
    changes = {
        name: None if value == _NONE else value
        for name, value in words_by_option.items()
        if value is not None
    }
    if not changes:
        raise typer.BadParameter("give at least one of --priority, --not-before, --queue-ttl, --deadline")
    options = cast("ChangeOptions", changes)
    _change(tasks, output, lambda broker, found: broker.change(found, **options))


def _change(words: Sequence[str], output: Format, change: Callable[["Broker", str], "Task"]) -> None:
    """Change these tasks and print them. All ids are looked up before any task is changed, so that a mistyped
    word changes nothing."""
    with connect() as broker:
        try:
            ids = [task_id(broker, word, to_change=True) for word in words]
        except (typer.Exit, Refused):
            if len(words) > 1:
                eprint(f"none of the {len(words)} tasks was changed")
            raise
        _change_all(broker, ids, output, change)


def _change_all(
    broker: "Broker", tasks: Sequence[str], output: Format, change: Callable[["Broker", str], "Task"]
) -> None:
    """Change these tasks and print those that were changed, even if a later change is refused."""
    changed: list[Task] = []
    try:
        change_each(tasks, lambda task: changed.append(change(broker, task)))
    finally:
        if changed or not tasks:
            emit_all(output, changed, task_table)
    for task in changed:
        if task.pending and task.pending.reason == "BackendUnavailable":
            eprint(f"{task.id}: {task.pending.message}")
