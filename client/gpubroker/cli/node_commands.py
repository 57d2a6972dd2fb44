"""`gpubroker nodes`, `cordon`, `drain`, `uncordon`, `disk` and `clean`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from gpubroker.cli import parsing
from gpubroker.cli.lookup import connect, listed_name
from gpubroker.cli.printing import Format, Output, emit, emit_all
from gpubroker.cli.tables import Column, PlainTable, gib_of, size_of_bytes, timestamp

if TYPE_CHECKING:
    from gpubroker.broker import Broker
    from gpubroker.wire.nodes import Node, NodeDisk

Name = Annotated[str, typer.Argument(metavar="NODE", help="Name of the node, as in `gpubroker nodes`.")]
Because = Annotated[
    str, typer.Option(metavar="REASON", help="Shown with the node, and recorded with your token's name.")
]


def nodes(
    sort: Annotated[
        str | None,
        typer.Option(
            help="name, cpu, memory_mb, gpu_mb (what is free of them), runs or idle_seconds; -cpu: the most "
            "first."
        ),
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """List nodes: what is held of them (CPU, MEMORY, RUNS), and how busy and full they are.

    USED is host memory and DISK the fullest of the watched disks, by all programs. STORE is what objects take
    of Ray's object store.
    """
    with connect() as broker:
        emit_all(output, broker.nodes(sort=sort).items, _nodes)


def cordon(node: Name, because: Because = "", output: Output = Format.TABLE) -> None:
    """Start nothing new on a node. What runs there goes on."""
    with connect() as broker:
        emit(output, broker.cordon(_named(broker, node), because), _node)


def drain(
    node: Name,
    deadline: Annotated[
        float | None,
        typer.Option(
            parser=parsing.seconds,
            metavar="TIME",
            help="Time after which remaining runs are stopped, whatever their priority, such as 10m.",
        ),
    ] = None,
    because: Because = "",
    output: Output = Format.TABLE,
) -> None:
    """Cordon a node and ask what runs there to leave, as in a preemption.

    Runs get notice and their grace period, and start elsewhere without using a retry; models are unloaded.
    Critical tasks, and runs that are protected from preemption, stay until the deadline.
    `gpubroker nodes` shows what is left.
    """
    with connect() as broker:
        emit(output, broker.drain(_named(broker, node), because, deadline_seconds=deadline), _node)


def uncordon(node: Name, because: Because = "", output: Output = Format.TABLE) -> None:
    """Let tasks start on a node again."""
    with connect() as broker:
        emit(output, broker.uncordon(_named(broker, node), because), _node)


def disk(node: Name, output: Output = Format.TABLE) -> None:
    """Show how full a node's disks are, and what its disk guard would delete."""
    with connect() as broker:
        emit(output, broker.disk(_named(broker, node)), _disk)


def clean(
    node: Name,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Delete; otherwise only show what would go.")
    ] = False,
    output: Output = Format.TABLE,
) -> None:
    """Delete old logs, empty databases, stale checkpoints and copied data below the operator's roots.

    Runs the operator's sync commands first. Stops when the disk is no fuller than `warn_percent`.
    """
    with connect() as broker:
        emit(output, broker.clean(_named(broker, node), dry_run=not yes), _disk)


def _named(broker: Broker, word: str) -> str:
    return listed_name(word, lambda: (node.name for node in broker.nodes(history="0")), "node")


_DISK_COLUMNS = (Column("DISK", wraps=True), Column("USED"), Column("FREE"), Column("LEVEL"))
_FILE_COLUMNS = (Column("FILE", wraps=True), Column("CLASS"), Column("SIZE"), Column("MODIFIED"))
_MAX_FILES = 50


def _disk(seen: NodeDisk) -> RenderableType:
    parts: list[RenderableType] = []
    used = [
        (
            disk.path,
            f"{1 - disk.free_bytes / max(1, disk.total_bytes):.0%}",
            size_of_bytes(disk.free_bytes),
            disk.level,
        )
        for disk in seen.disks
    ]
    if used:
        parts.append(PlainTable(_DISK_COLUMNS, used))
    files = [
        (file.path, file.file_class, size_of_bytes(file.size_bytes), timestamp(file.modified_at))
        for file in seen.files[:_MAX_FILES]
    ]
    if files:
        parts.append(PlainTable(_FILE_COLUMNS, files))
    if len(seen.files) > _MAX_FILES:
        parts.append(Text(f"and {len(seen.files) - _MAX_FILES} more"))
    verb = "deleted" if seen.deleted else "would go" if seen.files else "to delete"
    count = {0: "nothing", 1: "1 file"}.get(len(seen.files), f"{len(seen.files)} files")
    size = f", {size_of_bytes(seen.freed_bytes)}" if seen.files else ""
    parts.append(Text(f"{count}{size} {verb}"))
    parts += [Text(f"{kept} kept: {reason.replace('_', ' ')}") for reason, kept in sorted(seen.kept.items())]
    parts += [Text(f"! {note}", style="yellow") for note in _disk_notes(seen)]
    return Group(*parts)


def _disk_notes(seen: NodeDisk) -> Iterator[str]:
    if not seen.roots:
        yield "no roots are configured (fleet.disk.roots), so nothing is ever deleted"
    if seen.first_pass and seen.roots:
        yield "the first pass after a change of configuration deletes nothing"
    if seen.message:
        yield seen.message


def _node(node: Node) -> RenderableType:
    return _nodes([node])


_NODE_COLUMNS = (
    Column("NODE", share=0.3),
    Column("STATE"),
    Column("CPU"),
    Column("BUSY"),
    Column("MEMORY"),
    Column("USED"),
    Column("DISK"),
    Column("STORE"),
    Column("RUNS"),
    Column("GPUS"),
)


def _nodes(listed: Sequence[Node]) -> RenderableType:
    rows = [
        (
            node.name,
            _state(node),
            f"{node.cpu.used:g}/{node.cpu.total:g}",
            busy,
            gib_of(node.memory_mb.used, node.memory_mb.total, unit=" GiB"),
            memory,
            disk,
            store,
            f"{node.runs.used}/{node.runs.limit}",
            str(node.gpus),
        )
        for node in listed
        for busy, memory, disk, store in [_measured(node)]
    ]
    notes = [Text(f"! {node.name}: {note}", style="yellow") for node in listed for note in _notes(node)]
    return Group(PlainTable(_NODE_COLUMNS, rows), *notes) if rows else Text("no nodes")


def _measured(node: Node) -> tuple[str, str, str, str]:
    """Return how busy the node's CPUs are, and how full its memory, its fullest disk and its object store
    are."""
    now = node.measured
    if now is None or now.stale:
        return "", "", "", ""
    fullest = max((1 - disk.free_mb / disk.total_mb for disk in now.disks if disk.total_mb), default=None)
    used = 1 - now.memory_available_mb / max(1, now.memory_total_mb)
    store = now.object_store
    stored = None if store is None or store.used_mb is None else store.used_mb / max(1, store.total_mb)
    shares = (now.cpu, used, fullest, stored)
    busy, memory, disk, kept = ("" if share is None else f"{share:.0%}" for share in shares)
    return busy, memory, disk, kept


def _notes(node: Node) -> Iterator[str]:
    if node.drain and not node.drain.done:
        until = node.drain.deadline_at
        ends = f"; what is left at {timestamp(until)} is killed" if until else ""
        yield f"{node.drain.left} still there{ends}"
    if node.cordoned_by or node.cordon_reason:
        by = f" by {node.cordoned_by}" if node.cordoned_by else ""
        closed = "drained" if node.drain else "cordoned"
        yield f"{closed}{by}{f' because {node.cordon_reason!r}' if node.cordon_reason else ''}"
    if node.disk_full:
        yield f"nothing starts until there is room on {node.disk_full}"
    if agent := node.agent:
        if agent.message:
            yield agent.message
        yield from (f"{gpu}: {why}" for gpu, why in (agent.gpu_faults or {}).items())
        if agent.gpu_absence:
            yield f"no GPU: {agent.gpu_absence}"


def _state(node: Node) -> Text:
    if node.drain:
        state = "drained" if node.drain.done else "draining"
    elif not node.ready:
        state = "not answering"
    elif node.cordoned:
        state = "cordoned"
    elif node.disk_full:
        state = "disk full"
    else:
        state = "ready" if node.silent_since is None else "silent"
    return Text(state, style="green" if state == "ready" else "yellow")
