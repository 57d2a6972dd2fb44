"""`gpubroker ps` and `gpubroker show`: tasks as a table, and one task in full."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from gpubroker.cli import parsing
from gpubroker.cli.lookup import TaskWord, connect, stats_if_known, task_id
from gpubroker.cli.printing import Format, Output, Watch, emit, emit_all, eprint, watch
from gpubroker.cli.tables import (
    Column,
    PlainTable,
    ago,
    details,
    duration,
    gib,
    short_id,
    size,
    timestamp,
    with_short_ids,
)
from gpubroker.cli.tasks.events import past_of
from gpubroker.cli.watching import Changes
from gpubroker.tasks.naming import UNFINISHED, is_whole_id

if TYPE_CHECKING:
    from gpubroker.broker import Broker
    from gpubroker.tasks.task import Task
    from gpubroker.tasks.task_api import ListOptions
    from gpubroker.wire.environments import Environment
    from gpubroker.wire.forecasts import Expected
    from gpubroker.wire.quarantine import Quarantined
from gpubroker.wire.tasks import TaskDevice, TaskRank

NO_PAST: Mapping[str, str] = MappingProxyType({})
_REASONS_ASKED = 20
_OWN_KINDS = frozenset({"items", "dependency"})
"""The failures whose messages the service writes; others may quote the user's code."""
_PAGE = 500
"""The most tasks that the service returns in one answer."""
_STATE_STYLES = {
    "pending": "yellow",
    "admitted": "cyan",
    "running": "green",
    "stopping": "magenta",
    "succeeded": "bold green",
    "failed": "bold red",
    "expired": "red",
}
_COLUMNS = (
    Column("ID"),
    Column("NAME", share=0.2),
    Column("STATE"),
    Column("PRIO", until_width=100),
    Column("PRIORITY", from_width=100),
    Column("GPU MEMORY", from_width=100),
    Column("AGE", from_width=120),
    Column("NODE", from_width=120, share=0.2),
    Column("NOTE", wraps=True),
)
SortWord = Annotated[
    str | None,
    typer.Option(
        "--sort", help="submitted, finished (only ended tasks) or priority; -priority: the highest first."
    ),
]


def ps(
    everything: Annotated[bool, typer.Option("--all", "-a", help="Include finished tasks.")] = False,
    state: Annotated[
        list[str] | None, typer.Option("--state", "-s", help="Only tasks in this state; repeatable.")
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option("--label", "-l", metavar="NAME=VALUE", help="Only tasks with this label; repeatable."),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", "-n", help="Only tasks with this name.")] = None,
    kind: Annotated[
        str | None,
        typer.Option(help="Only entrypoint, command, function, inference, model or external (leases) tasks."),
    ] = None,
    model_type: Annotated[str | None, typer.Option(help="Only tasks of this model type.")] = None,
    stream: Annotated[str | None, typer.Option(help="Only tasks of this work stream.")] = None,
    after: Annotated[
        str | None, typer.Option("--after", metavar="TASK", help="Only tasks that run after this one.")
    ] = None,
    since: Annotated[
        Any,
        typer.Option(
            parser=parsing.time_ago,
            metavar="TIME",
            help="Only tasks submitted since a time, or 2h ago.",
        ),
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Another tenant's tasks; for admins.")] = None,
    all_tenants: Annotated[
        bool, typer.Option("--all-tenants", help="All tenants' tasks; for admins.")
    ] = False,
    sort: SortWord = None,
    limit: Annotated[
        int, typer.Option(min=1, help="At most this many tasks; above 500, the newest come first.")
    ] = 50,
    watching: Watch = False,
    output: Output = Format.TABLE,
) -> None:
    """List tasks and why they wait: what runs, the queue in its order, what ended last."""
    given = {
        "tenant": "*" if all_tenants else tenant,
        "state": state or ([] if everything or (sort or "").strip("-") == "finished" else UNFINISHED),
        "labels": parsing.pairs(label or [], "--label"),
        "name": name,
        "kind": kind,
        "model_type": model_type,
        "stream": stream,
        "submitted_from": since,
        "sort": sort,
    }
    filters = cast("ListOptions", {option: value for option, value in given.items() if value})
    is_filtered = len(filters) > 1 or bool(after)
    with connect() as broker:
        if after:
            filters["after"] = task_id(broker, after)
        if_none = partial(_none, broker, filters.get("state"), is_filtered=is_filtered)
        _list(broker, filters, limit, watching, output, if_none)


def _none(broker: Broker, states: Sequence[str] | str | None, *, is_filtered: bool) -> str:
    """Return what to print where no task is listed."""
    if states != UNFINISHED:
        return "no matching tasks"
    if is_filtered:
        return "no matching task is pending or running; --all includes finished tasks"
    stats = stats_if_known(broker)
    others = stats and stats.tasks.pending + stats.tasks.admitted + stats.tasks.running + stats.tasks.stopping
    if others:
        what = "task of another tenant is" if others == 1 else "tasks of other tenants are"
        return (
            f"no task of your tenant is pending or running; {others} {what}: gpubroker ps --all-tenants; "
            "--all includes finished tasks"
        )
    return "no task is pending or running; gpubroker ps --all includes finished tasks"


def _list(
    broker: Broker,
    filters: ListOptions,
    limit: int,
    watching: bool,
    output: Format,
    if_none: Callable[[], str],
) -> None:
    in_turn = limit < _PAGE and "sort" not in filters
    filters |= {"limit": limit + 1, "order": "turn"} if in_turn else {"limit": min(limit + 1, _PAGE)}

    def listed() -> list[Task]:
        found = list(islice(broker.list(**filters), limit + 1))
        if len(found) > limit:
            del found[limit:]
            newest = limit >= _PAGE and "sort" not in filters
            eprint(f"these are the {'newest' if newest else 'first'} {limit}; --limit shows more")
        return _with_reasons(broker, found) if output is Format.TABLE else found

    def drawn(found: Sequence[Task]) -> RenderableType:
        return task_table(found, "" if found else if_none(), has_tenants=filters.get("tenant") == "*")

    if watching:
        changes = Changes(broker, ("task.*", "queue.*"), tenant=filters.get("tenant"))
        watch(output, listed, drawn, changes.wait)
    else:
        emit_all(output, listed(), drawn)


def _with_reasons(broker: Broker, listed: list[Task]) -> list[Task]:
    """Return the tasks with the reasons why the first pending ones wait. A list has no reasons, since each
    costs the service time."""
    asked = [task.id for task in listed if task.state == "pending"][:_REASONS_ASKED]
    return [broker.get(task.id) if task.id in asked else task for task in listed]


def show(task: TaskWord, output: Output = Format.TABLE) -> None:
    """Show one task in full."""
    with connect() as broker:
        found = broker.get(task_id(broker, task))
        emit(output, found, lambda found: task_details(found, past_of(broker, found)))


def task_table(
    listed: Sequence[Task], if_none: str = "no tasks", *, has_tenants: bool = False
) -> RenderableType:
    rows: list[Sequence[str | Text]] = [
        (
            short_id(task.id),
            *([task.tenant] if has_tenants else []),
            task.name,
            Text(str(task.raw.get("state", "")), style=_STATE_STYLES.get(task.state, "")),
            str(task.priority),
            f"{task.priority} {task.band}",
            demand(task.resources.raw),
            ago(task.submitted_at),
            task.node or "",
            note,
        )
        for task, note in zip(listed, _notes(listed), strict=True)
    ]
    columns = (_COLUMNS[0], Column("TENANT"), *_COLUMNS[1:]) if has_tenants else _COLUMNS
    return PlainTable(columns, rows) if rows else Text(if_none)


def task_details(task: Task, past: Mapping[str, str] = NO_PAST) -> RenderableType:
    """Draw one task. `past` has lines from the task's events, by subject."""
    run = task.run
    rows: dict[str, Any] = {
        "id": task.id,
        "name": task.name,
        "state": task.raw.get("state"),
        "why": "" if task.state == "running" else _now(task),
        "progress": _progress(task) + _progress_end(task),
        "ends": _expected_end(task.eta) if task.eta else None,
        "priority": f"{task.priority} ({task.band})",
        "runs": run.entrypoint or shlex.join(run.command or ()) or run.kind,
        "model": run.model,
        "profile": task.profile,
        "upload": task.upload[:12],
        "environment": _environment(task.environment),
        "ray": f"a {task.ray} cluster" if task.ray else None,
        "gpu": demand(task.resources.raw),
        "size": task.sizing.message if task.sizing else None,
        "node": task.node,
        "devices": ", ".join(map(_device, task.devices)) if not task.ranks else None,
        "ranks": "\n".join(map(_rank, task.ranks or ())),
        "quarantine": "\n".join(map(_quarantined, task.quarantine)),
        "attempt": task.attempt,
        "failed": f"{task.failures} of at most {task.max_retries + 1} attempts" if task.failures else None,
        **past,
        "retry of": short_id(task.retry_of) if task.retry_of else None,
        "held": "yes" if task.held else None,
        "labels": ", ".join(f"{name}={value}" for name, value in task.labels.items()),
        "phases": _phases(task),
        "submitted": timestamp(task.submitted_at),
        "started": timestamp(task.started_at),
        "checkpoint": timestamp(task.checkpoint_at),
        "finished": timestamp(task.finished_at),
    }
    table = details(rows.items())
    if task.error and task.error.traceback:
        return Group(table, Text(), Text(task.error.traceback.rstrip(), style="red"))
    return table


def demand(resources: Mapping[str, Any]) -> str:
    """Return `2 × 18.0 GiB`, `1 × ½ GPU`, `2 GPUs`, or an empty text; for a gang, the demands of its
    ranks."""
    bundles = resources.get("bundles") or ()
    if bundles:
        ranks = [(bundle.get("count", 1), demand(bundle)) for bundle in bundles]
        least = resources.get("min_ranks") or inf
        return " + ".join(
            f"{count} rank{'s' if count > 1 else ''}" + (f" of {demand_text}" if demand_text else "")
            for count, demand_text in ranks
        ) + (f", at least {least}" if least < sum(count for count, _ in ranks) else "")
    gpus = resources.get("gpus") or 0
    if not gpus:
        return ""
    times = f"{gpus} × " if gpus > 1 else ""
    if resources.get("gpu_mb"):
        return f"{times}{gib(resources['gpu_mb'])} GiB"
    if resources.get("gpu_fraction"):
        return f"{times}{resources['gpu_fraction']:g} GPU"
    return f"{gpus} whole"


def failure(task: Task) -> str:
    """Return the first line of the error message, or else the kind of the error."""
    if task.error is None:
        return ""
    message = (task.error.message.splitlines() or [task.error.kind])[0]
    return with_short_ids(message) if task.error.kind in _OWN_KINDS else message


def _environment(given: Environment | None) -> str:
    if given is None:
        return ""
    packages = ", ".join(given.requirements) or (f"project {given.project[:12]}" if given.project else "")
    python = f"Python {given.python}" if given.python else ""
    return "; ".join(filter(None, (given.name, python, given.conda, packages, given.container)))


def _device(device: TaskDevice) -> str:
    return f"{device.uuid} {size(device.gpu_mb)} {device.state}"


def _rank(rank: TaskRank) -> str:
    return " ".join((f"{rank.rank}:", rank.state, "on", rank.node, *map(_device, rank.devices)))


def _quarantined(run: Quarantined) -> str:
    rank = f" rank {run.rank}" if run.kind == "gang_member" else ""
    return (
        f"! {size(run.gpu_mb)} of attempt {run.attempt}{rank}, for {ago(run.quarantined_at)}: {run.message}"
    )


def _notes(listed: Sequence[Task]) -> Iterator[str]:
    """Yield a note for each task. A reason of several waiting tasks is written once; the others name the
    first task that has it."""
    first: dict[str, str] = {}
    for task in listed:
        preempted = f"preempted {task.preemptions}×" if task.preemptions and not task.is_finished else ""
        reason = ""
        if task.state == "pending" and (waits := task.pending):
            place = f"position {waits.position}" if waits.position else short_id(task.id)
            first_place = first.setdefault(waits.message, place)
            reason = with_short_ids(waits.message) if first_place == place else f"as {first_place}"
            reason = f"{waits.position}. {reason}" if waits.position else reason
        parts = (_whole(task), _now(task, reason), preempted, task.raw.get("notice"))
        yield "; ".join(part for part in parts if part)


def _whole(task: Task) -> str:
    """Return which array or worker set the task is a worker of; empty for other tasks."""
    for label, whole in (("array", "array"), ("worker_set", "set")):
        id = task.labels.get(label, "")
        if is_whole_id(id):
            return f"worker of {whole} {short_id(id)}"
    return ""


def _now(task: Task, reason: str = "") -> str:
    """Return what matters about a task in its present state. `reason` says why the task waits, if known."""
    match task.state:
        case "pending" if task.pending:
            position = f" (position {task.pending.position})" if task.pending.position else ""
            inherited = task.pending.inherits
            note = (
                f"; inherits priority {inherited.priority} from {short_id(inherited.task)}"
                if inherited
                else ""
            )
            message = reason or f"{with_short_ids(task.pending.message)}{position}"
            return f"{message}{note}{_expected_start(task.pending.start)}"
        case "running":
            return _progress(task)
        case "stopping" if task.stop_deadline_at:
            return f"{task.stop_cause or task.stop_reason}, by {task.stop_deadline_at:%H:%M:%S}Z"
        case "failed" | "expired":
            return failure(task)
        case _:
            return ""


def _phases(task: Task) -> str:
    """Return the phases that took any time."""
    phases = {} if task.phases is None else task.phases.raw
    words = ((name.removesuffix("_seconds"), seconds) for name, seconds in phases.items())
    return ", ".join(f"{name} {duration(seconds)}" for name, seconds in words if seconds)


def _progress(task: Task) -> str:
    if task.progress is None or task.progress.fraction is None:
        return ""
    return f"{task.progress.fraction:.0%} {task.progress.message or ''}".rstrip()


def _progress_end(task: Task) -> str:
    """Return when the task ends at the rate of its progress reports; a run may stall."""
    progress = task.progress
    if progress is None or progress.eta_at is None or not progress.rate_per_second:
        return ""
    left = duration((progress.eta_at - progress.at).total_seconds())
    a_minute = progress.rate_per_second * 60
    return f" ({a_minute:.2%} a minute; at {timestamp(progress.at)} {left} were left)"


def _expected_end(eta: Expected) -> str:
    if not eta.n:
        return f"in about {duration(eta.p50_seconds)}, as stated at submit"
    runs = "1 run" if eta.n == 1 else f"{eta.n} runs"
    return f"in about {duration(eta.p50_seconds)}, 90% within {duration(eta.p90_seconds)} (from {runs})"


def _expected_start(start: Expected | None) -> str:
    if start is None:
        return ""
    basis = f"{start.basis}, {start.n} runs" if start.n else start.basis
    return (
        f"; starts in about {duration(start.p50_seconds)}, 90% within {duration(start.p90_seconds)} ({basis})"
    )
