"""Answers as tables and lines for people."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf
from types import MappingProxyType
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from gpubroker.cli.cluster.bars import LEGEND, bar
from gpubroker.cli.cluster.draw_estimates import expected_end, expected_start
from gpubroker.cli.layout import Column, Rows, ago, gib, moment, short_id, size, span, with_short_ids
from gpubroker.cli.models.draw import model_server
from gpubroker.cli.tasks.event_lines import retold
from gpubroker.cluster.fleet import ForecastsKept, Fragmentation, Gpu, Holder, Node, Stats
from gpubroker.cluster.quarantine import Quarantined
from gpubroker.tasks.task import Event, Task, TaskDevice, TaskRank, TaskState, Token

NO_HISTORY: Mapping[str, str] = MappingProxyType({})
_NAME_CELLS = 24
_STATE_STYLES = {
    TaskState.PENDING: "yellow",
    TaskState.ADMITTED: "cyan",
    TaskState.RUNNING: "green",
    TaskState.STOPPING: "magenta",
    TaskState.SUCCEEDED: "bold green",
    TaskState.FAILED: "bold red",
    TaskState.EXPIRED: "red",
}


def demand(resources: Mapping[str, Any]) -> str:
    """`2 × 18.0 GiB`, `1 × ½ GPU`, `2 GPUs`, or nothing; of a gang what its ranks ask for."""
    bundles = resources.get("bundles") or ()
    if bundles:
        asked = [(bundle.get("count", 1), demand(bundle)) for bundle in bundles]
        least = resources.get("min_ranks") or inf
        return " + ".join(
            f"{count} rank{'s' if count > 1 else ''}" + (f" of {each}" if each else "")
            for count, each in asked
        ) + (f", at least {least}" if least < sum(count for count, _ in asked) else "")
    gpus = resources.get("gpus") or 0
    if not gpus:
        return ""
    times = f"{gpus} × " if gpus > 1 else ""
    if resources.get("gpu_mb"):
        return f"{times}{gib(resources['gpu_mb'])} GiB"
    if resources.get("gpu_fraction"):
        return f"{times}{resources['gpu_fraction']:g} GPU"
    return f"{gpus} whole"


def _held(device: TaskDevice) -> str:
    return f"{device.uuid} {size(device.gpu_mb)} {device.state}"


def _rank(rank: TaskRank) -> str:
    return " ".join((f"{rank.rank}:", rank.state, "on", rank.node, *map(_held, rank.devices)))


def _unconfirmed(one: Quarantined) -> str:
    """A run of which nobody can say that it is gone."""
    rank = f" rank {one.rank}" if one.kind == "gang_member" else ""
    return (
        f"! {size(one.gpu_mb)} of attempt {one.attempt}{rank}, since {ago(one.quarantined_at)}: {one.message}"
    )


def note(task: Task) -> str:
    """What is worth knowing about a task in its present state, and that it had to make room."""
    again = f"preempted {task.preemptions}×" if task.preemptions and not task.is_finished else ""
    return "; ".join(said for said in (_now(task), again) if said)


def _now(task: Task) -> str:
    match task.state:
        case TaskState.PENDING if task.pending:
            place = f" (position {task.pending.position})" if task.pending.position else ""
            heir = task.pending.inherits
            urgency = f"; inherits priority {heir.priority} from {short_id(heir.task)}" if heir else ""
            message = with_short_ids(task.pending.message)
            return f"{message}{place}{urgency}{expected_start(task.pending.start)}"
        case TaskState.RUNNING:
            return _progress(task)
        case TaskState.STOPPING if task.stop_deadline_at:
            return f"{task.stop_reason}, at the latest {task.stop_deadline_at:%H:%M:%S}Z"
        case TaskState.FAILED | TaskState.EXPIRED:
            return failure(task)
        case _:
            return ""


def _progress(task: Task) -> str:
    if task.progress is None or task.progress.fraction is None:
        return ""
    return f"{task.progress.fraction:.0%} {task.progress.message or ''}".rstrip()


def failure(task: Task) -> str:
    """The first line of why it failed; its kind if there is no message."""
    if task.error is None:
        return ""
    return (task.error.message.splitlines() or [task.error.kind])[0]


_TASK_COLUMNS = (
    Column("ID"),
    Column("NAME", share=0.2),
    Column("STATE"),
    Column("PRIORITY"),
    Column("GPU MEMORY", from_width=100),
    Column("AGE", from_width=120),
    Column("NODE", from_width=120, share=0.2),
    Column("NOTE", wraps=True),
)


def tasks(listed: Sequence[Task], if_none: str = "no tasks") -> RenderableType:
    rows = [
        (
            short_id(task.id),
            task.name,
            Text(str(task.raw.get("state", "")), style=_STATE_STYLES.get(task.state, "")),
            f"{task.priority} {task.band}",
            demand(task.resources),
            ago(task.submitted_at),
            task.node or "",
            note(task),
        )
        for task in listed
    ]
    return Rows(_TASK_COLUMNS, rows) if rows else Text(if_none)


def task(shown: Task, history: Mapping[str, str] = NO_HISTORY) -> RenderableType:
    """`history`: what is known of its past, by what it is about."""
    run = shown.run
    rows: dict[str, Any] = {
        "id": shown.id,
        "name": shown.name,
        "state": shown.raw.get("state"),
        "why": "" if shown.state is TaskState.RUNNING else _now(shown),
        "progress": _progress(shown),
        "ends": expected_end(shown.eta) if shown.eta else None,
        "priority": f"{shown.priority} ({shown.band})",
        "runs": run.get("entrypoint") or shlex.join(run.get("command") or ()) or run.get("kind"),
        "model": run.get("model"),
        "gpu": demand(shown.resources),
        "size": shown.sizing.message if shown.sizing else None,
        "node": shown.node,
        "devices": ", ".join(map(_held, shown.devices)) if not shown.ranks else None,
        "ranks": "\n".join(map(_rank, shown.ranks)) or None,
        "quarantine": "\n".join(map(_unconfirmed, shown.quarantine)) or None,
        "attempt": shown.attempt or None,
        "failed": f"{shown.failures}× of at most {shown.max_retries + 1}" if shown.failures else None,
        **history,
        "held": "yes" if shown.held else None,
        "labels": ", ".join(f"{name}={value}" for name, value in shown.labels.items()),
        "submitted": moment(shown.submitted_at),
        "started": moment(shown.started_at),
        "checkpoint": moment(shown.checkpoint_at),
        "finished": moment(shown.finished_at),
    }
    table = facts((name, str(value)) for name, value in rows.items() if value)
    if shown.error and shown.error.traceback:
        return Group(table, Text(), Text(shown.error.traceback.rstrip(), style="red"))
    return table


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Names on the left, what is to be said of them on the right."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name, style="dim"), Text(value))
    return table


@dataclass(frozen=True, slots=True)
class GpuLines:
    """One line per device below its node, with the bar that tells leased from used from foreign memory."""

    listed: Sequence[Gpu]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        cells = min(24, max(8, options.max_width // 5))
        for node, devices in groupby(self.listed, key=lambda gpu: gpu.node):
            there = list(devices)
            yield Text.assemble((node, "bold"), f"  {_sums(there)}")
            table = Table.grid(padding=(0, 1, 0, 0))
            for fits in (True, True, False):
                table.add_column(no_wrap=fits, overflow="ellipsis" if fits else "fold")
            number = {gpu.uuid: gpu.index for gpu in there}
            for gpu in there:
                label = f"{gpu.index:>3} {gpu.kind:<10}"
                whole = f"instance of {number.get(gpu.parent, gpu.parent)}   " if gpu.parent else ""
                facts = Text(f"{whole}{_gpu_facts(gpu)}")
                table.add_row(label, Text(bar(gpu, cells), style="green"), facts)
            yield table
        yield Text(LEGEND, style="dim")


def gpus(listed: Sequence[Gpu]) -> RenderableType:
    return GpuLines(listed) if listed else Text("no GPUs")


def _sums(listed: Sequence[Gpu]) -> str:
    there = [gpu for gpu in listed if not gpu.split]
    count = "1 GPU" if len(there) == 1 else f"{len(there)} GPUs"
    simulated = " (simulated)" if all(gpu.simulated for gpu in there) else ""
    leased, used, physical = (
        gib(sum(getattr(gpu, f"{part}_mb") for gpu in there)) for part in ("leased", "used", "physical")
    )
    return f"{count}{simulated}   leased {leased} · used {used} of {physical} GiB"


def _gpu_facts(gpu: Gpu) -> str:
    holders = " · ".join(
        f"{_cut(holder.name) or short_id(holder.id)} {size(holder.gpu_mb)}"
        f"{' (stopping)' if holder.stopping else ''}{_quarantine(holder)}{_overuse(holder)}"
        for holder in gpu.holders
    )
    pledges = " · ".join(
        f"{size(pledge.arrived_mb)} of {size(pledge.gpu_mb)} freed for {short_id(pledge.task)}"
        for pledge in gpu.pledges
    )
    foreign = gpu.foreign_mb + gpu.unaccounted_mb
    if gpu.split:
        return "split: its instances are leased"
    said = (
        f"{size(gpu.free_mb)} free of {gib(gpu.physical_mb)}{_stranded(gpu)}",
        holders,
        pledges,
        f"! {size(foreign)} used but not leased" if foreign else "",
        f"{gpu.utilization:.0%} busy" if gpu.utilization is not None else "",
        "no recent measurement" if gpu.stale else "",
    )
    return "   ".join(fact for fact in said if fact)


def _stranded(gpu: Gpu) -> str:
    return f", {size(gpu.stranded_mb)} stranded" if gpu.stranded_mb else ""


def _quarantine(holder: Holder) -> str:
    return f" (! in quarantine: {holder.quarantine['message']})" if holder.quarantine else ""


def _overuse(holder: Holder) -> str:
    return f" (! used {size(holder.overused_mb)})" if holder.overused_mb else ""


def _cut(name: str) -> str:
    return name if len(name) <= _NAME_CELLS else f"{name[: _NAME_CELLS - 1]}…"


_NODE_COLUMNS = (
    Column("NODE", share=0.3),
    Column("STATE"),
    Column("CPU"),
    Column("MEMORY"),
    Column("RUNS"),
    Column("GPUS"),
)


def nodes(listed: Sequence[Node]) -> RenderableType:
    rows = []
    for node in listed:
        heard = "ready" if node.silent_since is None else "silent"
        state = "cordoned" if node.cordoned else heard if node.ready else "not answering"
        rows.append(
            (
                node.name,
                Text(state, style="green" if state == "ready" else "yellow"),
                f"{node.cpu.get('used', 0):g}/{node.cpu.get('total', 0):g}",
                f"{gib(node.memory_mb.get('used', 0))}/{gib(node.memory_mb.get('total', 0))} GiB",
                f"{node.runs.get('used', 0)}/{node.runs.get('limit', 0)}",
                str(node.gpus),
            )
        )
    notes = [
        Text(f"! {node.name}: {node.agent['message']}", style="yellow")
        for node in listed
        if node.agent and node.agent.get("message")
    ]
    return Group(Rows(_NODE_COLUMNS, rows), *notes) if rows else Text("no nodes")


def stats(shown: Stats) -> RenderableType:
    gpu = shown.gpu
    sizes = (
        f"{name} {gib(gpu[f'{name}_mb'])} GiB"
        for name in ("leased", "used", "free", "total")
        if f"{name}_mb" in gpu
    )
    rows = [
        ("gpu memory", " · ".join(sizes)),
        *_pieces(shown.fragmentation),
        *(("forecasts", _kept(of)) for of in shown.forecasts),
        ("tasks", " · ".join(f"{state} {count}" for state, count in shown.tasks.items())),
        ("executor", executor(shown)),
        *(("model server", model_server(of)) for of in shown.model_servers),
        *([("nodes", f"! {shown.detection['message']}")] if shown.detection.get("message") else ()),
    ]
    if shown.age_seconds is not None:
        rows.append(("as of", f"{shown.age_seconds:.1f} s ago, event {shown.position}"))
    return facts(rows)


def _pieces(found: Fragmentation | None) -> Iterable[tuple[str, str]]:
    """How much of what is free is in pieces of no use, by kind where there are several."""
    if found is None or found.share is None:
        return
    kinds = [f"{of['kind']} {of['share']:.0%}" for of in found.kinds if of.get("share") is not None]
    more = f" ({' · '.join(kinds)})" if len(kinds) > 1 else ""
    yield "stranded", f"{found.share:.0%} of what is free, {gib(found.stranded_mb)} GiB{more}"
    if one := found.scattered:
        sizes = f"{size(one.gpu_mb)}" if one.gpus == 1 else f"{one.gpus} × {size(one.gpu_mb)}"
        free = f"{gib(one.free_mb)} GiB are free, at most {size(one.largest_mb)} in one piece"
        yield "in pieces", f"! {one.waiting} wait for {sizes}; {free}"


def _kept(of: ForecastsKept) -> str:
    return f"{of.basis}: {of.within_p90:.0%} of {of.n} by their p90, off by {span(of.median_error_seconds)}"


def executor(shown: Stats) -> str:
    """What runs the tasks, and whether it can."""
    return " ".join(str(value) for value in shown.executor.values() if value)


def events(listed: Sequence[Event]) -> RenderableType:
    return Group(*map(retold, listed))


_TOKEN_COLUMNS = (
    Column("NAME", share=0.3),
    Column("TENANT", share=0.2),
    Column("HIGHEST PRIORITY", from_width=80),
    Column("SCOPES", wraps=True),
    Column("EXPIRES"),
)


def tokens(listed: Sequence[Token]) -> RenderableType:
    rows = [
        (
            token.name,
            token.tenant,
            str(token.max_priority),
            " ".join(token.scopes),
            moment(token.expires_at) or "never",
        )
        for token in listed
    ]
    return Rows(_TOKEN_COLUMNS, rows)
