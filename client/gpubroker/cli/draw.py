"""Answers as tables and lines for people."""

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpubroker.cli.bars import LEGEND, bar
from gpubroker.fleet import Gpu, Node, Stats
from gpubroker.models import Event, Explanation, Task, TaskState, Token

_SHOWN_ID_LENGTH = 8
_STATE_STYLES = {
    TaskState.PENDING: "yellow",
    TaskState.ADMITTED: "cyan",
    TaskState.RUNNING: "green",
    TaskState.STOPPING: "magenta",
    TaskState.SUCCEEDED: "bold green",
    TaskState.FAILED: "bold red",
    TaskState.EXPIRED: "red",
}


def short_id(task: str | None) -> str:
    """The end of an id: unlike its beginning, which is a time, it differs between tasks of one moment.

    Of another tenant's task the service tells no id.
    """
    return task[-_SHOWN_ID_LENGTH:] if task else "another tenant"


def gib(mb: float) -> str:
    return f"{mb / 1024:.1f}"


def demand(resources: Mapping[str, Any]) -> str:
    """`2 × 18.0 GiB`, `1 × ½ GPU`, `2 GPUs`, or nothing."""
    gpus = resources.get("gpus") or 0
    if not gpus:
        return ""
    times = f"{gpus} × " if gpus > 1 else ""
    if resources.get("gpu_mb"):
        return f"{times}{gib(resources['gpu_mb'])} GiB"
    if resources.get("gpu_fraction"):
        return f"{times}{resources['gpu_fraction']:g} GPU"
    return f"{gpus} whole"


def ago(at: datetime | None) -> str:
    if at is None:
        return ""
    seconds = max(0.0, time.time() - at.timestamp())
    if seconds < 100:
        return f"{seconds:.0f}s"
    if seconds < 6000:
        return f"{seconds / 60:.0f}m"
    return f"{seconds / 3600:.0f}h" if seconds < 360_000 else f"{seconds / 86400:.0f}d"


def note(task: Task) -> str:
    """The one thing worth knowing about a task in its present state."""
    match task.state:
        case TaskState.PENDING if task.pending:
            place = f" (position {task.pending.position})" if task.pending.position else ""
            return f"{task.pending.message}{place}"
        case TaskState.RUNNING if task.progress and task.progress.fraction is not None:
            return f"{task.progress.fraction:.0%} {task.progress.message or ''}".rstrip()
        case TaskState.STOPPING if task.stop_deadline_at:
            return f"{task.stop_reason}, at the latest {task.stop_deadline_at:%H:%M:%S}Z"
        case TaskState.FAILED | TaskState.EXPIRED if task.error:
            return (task.error.message.splitlines() or [task.error.kind])[0]
        case _:
            return ""


def tasks(listed: Sequence[Task]) -> RenderableType:
    table = _table("ID", "NAME", "STATE", "PRIORITY", "GPU MEMORY", "AGE", "NODE", "NOTE")
    for task in listed:
        table.add_row(
            short_id(task.id),
            Text(task.name),
            Text(str(task.raw.get("state", "")), style=_STATE_STYLES.get(task.state, "")),
            f"{task.priority} {task.band}",
            demand(task.resources),
            ago(task.submitted_at),
            task.node or "",
            Text(note(task)),
        )
    return table if listed else Text("no tasks")


def task(shown: Task) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    run = shown.run
    rows: dict[str, Any] = {
        "id": shown.id,
        "name": shown.name,
        "state": shown.raw.get("state"),
        "why": note(shown),
        "priority": f"{shown.priority} ({shown.band})",
        "runs": run.get("entrypoint") or " ".join(run.get("command") or ()) or run.get("kind"),
        "gpu": demand(shown.resources),
        "node": shown.node,
        "devices": ", ".join(f"{held.uuid} {gib(held.gpu_mb)} GiB {held.state}" for held in shown.devices),
        "attempt": shown.attempt or None,
        "preemptions": shown.preemptions or None,
        "failures": f"{shown.failures} of {shown.max_retries + 1} allowed" if shown.failures else None,
        "held": "yes" if shown.held else None,
        "labels": ", ".join(f"{name}={value}" for name, value in shown.labels.items()),
        "submitted": _time(shown.submitted_at),
        "started": _time(shown.started_at),
        "checkpoint": _time(shown.checkpoint_at),
        "finished": _time(shown.finished_at),
    }
    for name, value in rows.items():
        if value:
            table.add_row(Text(name, style="dim"), Text(str(value)))
    if shown.error and shown.error.traceback:
        return Group(table, Text(), Text(shown.error.traceback.rstrip(), style="red"))
    return table


def explanation(explained: Explanation) -> RenderableType:
    """The sentence; what else is in the way; and what each device says."""
    because = (f"{explained.reason}: ", "bold") if explained.reason else ""
    parts: list[RenderableType] = [Text.assemble(because, explained.message)]
    if explained.position:
        parts.append(Text(f"position {explained.position} of {explained.queue_length} in the queue"))
    parts += [Text(f"also {blocker.reason}: {blocker.message}") for blocker in explained.blockers[1:]]
    if explained.devices:
        table = _table("GPU", "FREE GiB", "HOLDERS", "VERDICT")
        for device in explained.devices:
            holders = " · ".join(
                f"{short_id(holder.id)} {gib(holder.gpu_mb)} at {holder.priority}"
                f"{' (stopping)' if holder.stopping else ''}"
                for holder in device.holders
            )
            table.add_row(
                f"{device.node} {device.index} {device.kind}",
                f"{gib(device.free_mb)}/{gib(device.allocatable_mb)}",
                holders,
                Text(device.message),
            )
        parts += [Text(), table]
    return Group(*parts)


def gpus(listed: Sequence[Gpu]) -> RenderableType:
    """One line per device below its node, with the bar that tells leased from used from foreign memory."""
    parts: list[RenderableType] = []
    for node, devices in groupby(listed, key=lambda gpu: gpu.node):
        there = list(devices)
        physical = sum(gpu.physical_mb for gpu in there)
        leased, used = sum(gpu.leased_mb for gpu in there), sum(gpu.used_mb for gpu in there)
        count = "1 GPU" if len(there) == 1 else f"{len(there)} GPUs"
        head = f"  {count}   leased {gib(leased)} · used {gib(used)} of {gib(physical)} GiB"
        parts.append(Text.assemble((node, "bold"), head))
        parts += [_gpu_line(gpu) for gpu in there]
    return (
        Group(*parts, Text(LEGEND, style="dim"))
        if parts
        else Text("no GPUs; to try things without one, declare simulated_devices in the service's settings")
    )


def _gpu_line(gpu: Gpu) -> Text:
    holders = " · ".join(
        f"{holder.name or short_id(holder.id)} {gib(holder.gpu_mb)}{' (stopping)' if holder.stopping else ''}"
        for holder in gpu.holders
    )
    pledges = " · ".join(
        f"{gib(pledge.arrived_mb)} of {gib(pledge.gpu_mb)} freed for {short_id(pledge.task)}"
        for pledge in gpu.pledges
    )
    foreign = gpu.foreign_mb + gpu.unaccounted_mb
    facts = [
        f"{gib(gpu.free_mb)} GiB free of {gib(gpu.physical_mb)}",
        holders,
        pledges,
        f"! {gib(foreign)} GiB used but not leased" if foreign else "",
        f"{gpu.utilization:.0%} busy" if gpu.utilization is not None else "",
        "no recent measurement" if gpu.stale else "",
    ]
    label = f"{gpu.index:>3} {gpu.kind:<10} "
    return Text.assemble(label, (bar(gpu), "green"), "  ", "   ".join(fact for fact in facts if fact))


def nodes(listed: Sequence[Node]) -> RenderableType:
    table = _table("NODE", "STATE", "CPU", "MEMORY", "RUNS", "GPUS")
    for node in listed:
        state = "cordoned" if node.cordoned else "ready" if node.ready else "not answering"
        table.add_row(
            node.name,
            Text(state, style="green" if state == "ready" else "yellow"),
            f"{node.cpu.get('used', 0):g}/{node.cpu.get('total', 0):g}",
            f"{gib(node.memory_mb.get('used', 0))}/{gib(node.memory_mb.get('total', 0))} GiB",
            f"{node.runs.get('used', 0)}/{node.runs.get('limit', 0)}",
            str(node.gpus),
        )
    return table if listed else Text("no nodes")


def stats(shown: Stats) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    gpu = shown.gpu
    sizes = " · ".join(
        f"{name} {gib(gpu[f'{name}_mb'])} GiB"
        for name in ("leased", "used", "free", "total")
        if f"{name}_mb" in gpu
    )
    table.add_row("gpu memory", sizes)
    table.add_row("tasks", " · ".join(f"{state} {count}" for state, count in shown.tasks.items()))
    table.add_row("executor", " ".join(str(value) for value in shown.executor.values() if value))
    if shown.age_seconds is not None:
        table.add_row("as of", f"{shown.age_seconds:.1f} s ago, event {shown.position}")
    return table


def events(listed: Sequence[Event]) -> RenderableType:
    return Group(*(event(line) for line in listed))


def event(line: Event) -> Text:
    at = f"{line.at:%H:%M:%S}" if line.at else ""
    said = " ".join(f"{name}={_cell(value)}" for name, value in line.fields.items() if value is not None)
    parts = ((f"{line.position:>6} {at} ", "dim"), (f"{line.kind:<20}", "bold"), f" {line.key} {said}")
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def tokens(listed: Sequence[Token]) -> RenderableType:
    table = _table("NAME", "TENANT", "HIGHEST PRIORITY", "SCOPES", "EXPIRES")
    for token in listed:
        scopes = " ".join(token.scopes)
        table.add_row(token.name, token.tenant, str(token.max_priority), scopes, _time(token.expires_at))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, no_wrap=column not in ("NOTE", "MESSAGE"), overflow="fold")
    return table


def _time(at: datetime | None) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S}Z" if at else ""


def _cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case float():
            return f"{value:.6g}"
        case dict() | list():
            return str(value)
        case _:
            return str(value)
