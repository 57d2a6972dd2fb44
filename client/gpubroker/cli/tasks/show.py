"""Commands that look at tasks: ps, show, explain, wait, result, logs, events."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from gpubroker.cli import quantities
from gpubroker.cli.session import (
    UNFINISHED,
    Format,
    Output,
    TaskWord,
    Watch,
    broker_of,
    emit,
    emit_all,
    say,
    stats_if_allowed,
    task_id,
    watch,
)
from gpubroker.cli.tasks import outcome

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gpubroker.broker import Broker
    from gpubroker.operations import ListOptions
    from gpubroker.tasks.explanation import Explanation
    from gpubroker.tasks.task import Task

_REASONS_ASKED = 20
_NOTHING_TO_DO = "nothing waits or runs; gpubroker ps --all shows what has ended"
_NONE_OF_THESE = "none of these waits or runs; with --all you see those that have ended"

WaitTimeout = Annotated[
    float | None,
    typer.Option(
        "--timeout", parser=quantities.seconds, metavar="DURATION", help="Wait no longer, such as 90s."
    ),
]


def ps(
    context: typer.Context,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Finished ones, too.")] = False,
    state: Annotated[list[str] | None, typer.Option("--state", "-s", help="Only these; repeatable.")] = None,
    label: Annotated[list[str] | None, typer.Option("--label", "-l", metavar="NAME=VALUE")] = None,
    name: Annotated[str | None, typer.Option("--name", "-n", help="Only tasks of this name.")] = None,
    kind: Annotated[
        str | None,
        typer.Option(help="Only entrypoint, command, function, inference, model or external (a lease)."),
    ] = None,
    model_type: Annotated[str | None, typer.Option(help="Only of this model type.")] = None,
    stream: Annotated[str | None, typer.Option(help="Only of this work stream.")] = None,
    after: Annotated[
        str | None, typer.Option("--after", metavar="TASK", help="Only those that run after this one.")
    ] = None,
    since: Annotated[
        Any,
        typer.Option(
            parser=quantities.time_ago, metavar="TIME", help="Only those submitted since: 2h, or a time."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, newest first.")] = 50,
    watching: Watch = False,
    output: Output = Format.TABLE,
) -> None:
    """Tasks, newest first, and why the waiting ones wait."""
    from gpubroker.cli import draw

    given = {
        "state": state or ([] if everything else UNFINISHED),
        "labels": quantities.pairs(label or [], "--label"),
        "name": name,
        "kind": kind,
        "model_type": model_type,
        "stream": stream,
        "submitted_from": since,
    }
    wanted = cast("ListOptions", {option: value for option, value in given.items() if value})
    wanted["limit"] = min(limit, 200)
    with broker_of(context) as broker:
        if after:
            wanted["after"] = task_id(broker, after)

        def listed() -> "list[Task]":
            found = list(islice(broker.list(**wanted), limit + 1))
            if len(found) > limit:
                del found[limit:]
                say(f"these are the newest {limit} and there are more; see them with --limit")
            return _with_reasons(broker, found) if output is Format.TABLE else found

        def drawn(found: "Sequence[Task]") -> "RenderableType":
            if state or everything:
                return draw.tasks(found, "no such task")
            return draw.tasks(found, _NONE_OF_THESE if len(wanted) > 2 else _NOTHING_TO_DO)

        if watching:
            watch(output, listed, drawn)
        else:
            emit_all(output, listed(), drawn)


def _with_reasons(broker: "Broker", listed: list["Task"]) -> list["Task"]:
    """Lists do not say why a task waits, since that is worked out per task; ask for the newest of them."""
    asked = [task.id for task in listed if task.state == "pending"][:_REASONS_ASKED]
    return [broker.get(task.id) if task.id in asked else task for task in listed]


def show(context: typer.Context, task: TaskWord, output: Output = Format.TABLE) -> None:
    """Everything about one task."""
    from gpubroker.cli import draw
    from gpubroker.cli.tasks import history

    with broker_of(context) as broker:
        emit(
            output,
            broker.get(task_id(broker, task)),
            lambda found: draw.task(found, history.told(broker, found)),
        )


def explain(context: typer.Context, task: TaskWord, output: Output = Format.TABLE) -> None:
    """Why a task waits and what would help, with a verdict per device; or where it runs, or how it ended."""
    from gpubroker.cli.tasks.draw_explanation import explanation

    with broker_of(context) as broker:
        emit(
            output,
            broker.explain(task_id(broker, task)),
            lambda found: explanation(found, _about(broker, found)),
        )


def _about(broker: "Broker", explained: "Explanation") -> "Iterator[str]":
    """What the next question would be: why it failed, who preempted it, whether the cluster is there."""
    from gpubroker.cli import draw
    from gpubroker.cli.tasks import history

    found = broker.get(explained.id)
    if found.error and found.is_finished:
        yield f"{found.error.kind}: {draw.failure(found)}; more: gpubroker show {found.id}"
    for name, line in history.told(broker, found).items():
        yield f"{name} {line}"
    if explained.reason == "BackendUnavailable" and (stats := stats_if_allowed(broker)):
        yield f"executor: {draw.executor(stats)}"


def wait(
    context: typer.Context, task: TaskWord, timeout: WaitTimeout = None, output: Output = Format.TABLE
) -> None:
    """Wait until a task is finished. The exit code says how it ended."""
    from gpubroker.cli import draw
    from gpubroker.operations import check_success

    with broker_of(context) as broker:
        wanted = task_id(broker, task)
        outcome.wait(broker, wanted, timeout)
        emit(output, broker.get(wanted), draw.task)
        check_success(broker.outcome(wanted))


def result(
    context: typer.Context,
    task: TaskWord,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Wait for the end first.")] = False,
    timeout: WaitTimeout = None,
    save: Annotated[Path | None, typer.Option(help="Write the result to this file.")] = None,
    output: Output = Format.TABLE,
) -> None:
    """Print what a finished task returned; its log goes to standard error."""
    with broker_of(context) as broker:
        wanted = task_id(broker, task)
        if wait:
            outcome.wait(broker, wanted, timeout)
        outcome.show(broker.outcome(wanted), output, save)


def logs(context: typer.Context, task: TaskWord) -> None:
    """Print the end of what a finished task printed, at most 16 KiB.

    Of a running task nothing can be read yet.
    """
    with broker_of(context) as broker:
        typer.echo(outcome.log_of(broker.outcome(task_id(broker, task))), nl=False)


def events(
    context: typer.Context,
    task: Annotated[str | None, typer.Argument(help="Only of this task.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as they happen.")] = False,
    after: Annotated[int | None, typer.Option(help="Begin after this position of the log.")] = None,
    last: Annotated[int, typer.Option("--last", "-n", help="Without --after: so many of the newest.")] = 50,
    output: Output = Format.TABLE,
) -> None:
    """The event log: every change of a task, lease, pledge, device and node, in order."""
    from gpubroker.cli import draw
    from gpubroker.cli.tasks.event_lines import retold

    with broker_of(context) as broker:
        wanted = None if task is None else task_id(broker, task)
        if after is None:
            after = 0 if wanted else max(0, broker.stats().position - last)
        if output is Format.JSON and not follow:
            emit_all(output, list(broker.events(wanted, after=after)), draw.events)
            return
        try:
            for line in broker.events(wanted, after=after, follow=follow):
                emit(Format.NDJSON if output is Format.JSON else output, line, retold)
        except KeyboardInterrupt:
            return


def add_to(app: typer.Typer) -> None:
    for command in (ps, show, explain, wait, result, logs, events):
        app.command(rich_help_panel="Tasks")(command)
