"""Commands that ask for a change of tasks: cancel, hold, release, priority, change."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from gpubroker.cli import quantities
from gpubroker.cli.session import (
    UNFINISHED,
    AnyTaskWords,
    Format,
    Output,
    TaskWord,
    TaskWords,
    agree,
    broker_of,
    emit_all,
    say,
    task_id,
)
from gpubroker.errors import BrokerError

if TYPE_CHECKING:
    from gpubroker.broker import Broker
    from gpubroker.operations import ChangeOptions, ListOptions
    from gpubroker.tasks.task import Task

_NONE = "none"
_PAGE = 200


def cancel(
    context: typer.Context,
    tasks: AnyTaskWords = None,
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="All that wait or run, instead of naming some.")
    ] = False,
    state: Annotated[
        list[str] | None, typer.Option("--state", "-s", help="All in this state; repeatable.")
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option("--label", "-l", metavar="NAME=VALUE", help="All with this label.")
    ] = None,
    stream: Annotated[str | None, typer.Option(help="All of this work stream.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before cancelling many.")] = False,
    grace: Annotated[
        float | None,
        typer.Option(parser=quantities.seconds, metavar="DURATION", help="Time to stop in after notice."),
    ] = None,
    reason: Annotated[str | None, typer.Option(help="Told in the event log.")] = None,
    output: Output = Format.TABLE,
) -> None:
    """End tasks: waiting ones at once, running ones after notice and their grace period.

    \b
    gpubroker cancel last
    gpubroker cancel --label run=42 --state pending
    """
    wanted = {"state": state, "labels": quantities.pairs(label or [], "--label"), "stream": stream}
    narrowed = {option: value for option, value in wanted.items() if value}
    if bool(tasks) == (everything or bool(narrowed)):
        raise typer.BadParameter("name tasks, or say which: --all, --state, --label, --stream")

    def end(broker: "Broker", task: str) -> "Task":
        return broker.cancel(task, grace_seconds=grace, reason=reason)

    if tasks:
        _change(context, tasks, output, end)
        return
    with broker_of(context) as broker:
        chosen = cast("ListOptions", {"state": UNFINISHED, "limit": _PAGE, **narrowed})
        found = sorted(broker.list(**chosen), key=lambda task: task.state != "pending")
        if found and not yes:
            agree(
                f"cancel {len(found)} tasks, of which {sum(t.state != 'pending' for t in found)} have begun?"
            )
        change_all(broker, [task.id for task in found], output, end)


def hold(context: typer.Context, tasks: TaskWords, output: Output = Format.TABLE) -> None:
    """Keep tasks in the queue until they are released."""
    _change(context, tasks, output, lambda broker, task: broker.change(task, held=True))


def release(context: typer.Context, tasks: TaskWords, output: Output = Format.TABLE) -> None:
    """Let held tasks run when there is room."""
    _change(context, tasks, output, lambda broker, task: broker.change(task, held=False))


def priority(
    context: typer.Context,
    task: TaskWord,
    value: Annotated[str, typer.Argument(metavar="PRIORITY", help="0 to 100, or the name of a band.")],
    output: Output = Format.TABLE,
) -> None:
    """Change the priority of a task."""
    wanted = quantities.priority(value)
    _change(context, [task], output, lambda broker, found: broker.change(found, priority=wanted))


def _or_none(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Also takes the word none, for what is to be taken away."""
    return lambda text: _NONE if text == _NONE else parse(text)


def change(
    context: typer.Context,
    tasks: TaskWords,
    priority: Annotated[
        Any,
        typer.Option(parser=quantities.priority, metavar="PRIORITY", help="0 to 100, or the name of a band."),
    ] = None,
    not_before: Annotated[
        Any,
        typer.Option(
            parser=_or_none(quantities.time_ahead), metavar="TIME", help="Do not start it earlier; or none."
        ),
    ] = None,
    queue_ttl: Annotated[
        Any,
        typer.Option(
            parser=_or_none(quantities.seconds),
            metavar="DURATION",
            help="Wait so long from now, or from the time before which it is not started; or none.",
        ),
    ] = None,
    deadline: Annotated[
        Any,
        typer.Option(
            parser=_or_none(quantities.time_ahead), metavar="TIME", help="Expire, or stop, by then; or none."
        ),
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """Change the priority of tasks, and the times of those that wait."""
    asked = {
        "priority": priority,
        "not_before": not_before,
        "queue_ttl_seconds": queue_ttl,
        "deadline_at": deadline,
    }
    wanted = {name: None if value == _NONE else value for name, value in asked.items() if value is not None}
    if not wanted:
        raise typer.BadParameter("say what to change: --priority, --not-before, --queue-ttl or --deadline")
    given = cast("ChangeOptions", wanted)
    _change(context, tasks, output, lambda broker, found: broker.change(found, **given))


def _change(
    context: typer.Context, words: Sequence[str], output: Format, change: Callable[["Broker", str], "Task"]
) -> None:
    """Find all the tasks before changing any, so that a mistyped word changes nothing."""
    with broker_of(context) as broker:
        try:
            found = [task_id(broker, word, to_change=True) for word in words]
        except typer.Exit:
            if len(words) > 1:
                say(f"nothing was changed, of none of the {len(words)}")
            raise
        change_all(broker, found, output, change)


def change_all(
    broker: "Broker", tasks: Sequence[str], output: Format, change: Callable[["Broker", str], "Task"]
) -> None:
    """Shows what was changed also where a later one is refused, and says which were not."""
    from gpubroker.cli import draw

    changed: list[Task] = []
    try:
        for task in tasks:
            changed.append(change(broker, task))
    except BrokerError as fault:
        if rest := tasks[len(changed) + 1 :]:
            fault.add_note(f"after it these were not tried: {', '.join(rest)}")
        if changed:
            emit_all(output, changed, draw.tasks)
        raise
    emit_all(output, changed, draw.tasks)
    for done in changed:
        if done.pending and done.pending.reason == "BackendUnavailable":  # so it is still as it was
            say(f"{done.id}: {done.pending.message}")


def add_to(app: typer.Typer) -> None:
    for command in (cancel, hold, release, priority, change):
        app.command(rich_help_panel="Tasks")(command)
