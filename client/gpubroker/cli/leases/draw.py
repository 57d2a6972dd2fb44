"""External leases as tables and words for people."""

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from gpubroker.cli.layout import Column, Rows, ago, moment, size, with_short_ids
from gpubroker.leases.lease import Lease, LeaseState

_COLUMNS = (
    Column("LEASE", share=0.3),
    Column("HOLDER", share=0.3),
    Column("STATE"),
    Column("PRIORITY", from_width=90),
    Column("MEMORY"),
    Column("NODE", from_width=70),
    Column("SINCE", from_width=90),
    Column("NOTE", wraps=True),
)
_STYLES = {
    LeaseState.PENDING: "yellow",
    LeaseState.HELD: "green",
    LeaseState.STOPPING: "magenta",
    LeaseState.QUARANTINED: "bold red",
}


def leases(listed: Sequence[Lease]) -> RenderableType:
    rows = [
        (
            lease.id,
            lease.holder,
            _state(lease),
            f"{lease.priority} {lease.band}",
            _memory(lease),
            lease.node or "",
            ago(lease.held_at or lease.requested_at),
            _note(lease),
        )
        for lease in listed
    ]
    return Rows(_COLUMNS, rows) if rows else Text("no leases")


def lease(shown: Lease) -> RenderableType:
    rows: dict[str, Any] = {
        "id": shown.id,
        "holder": shown.holder,
        "state": _state(shown),
        "why": _note(shown),
        "priority": f"{shown.priority} {shown.band}",
        "memory": _memory(shown),
        "node": shown.node,
        "GPUs": ", ".join(f"{device.uuid} {size(device.gpu_mb)}" for device in shown.devices),
        "process": shown.pid,
        "held": moment(shown.held_at),
        "renew by": moment(shown.deadline_at) if shown.state in (LeaseState.PENDING, LeaseState.HELD) else "",
        "ended": moment(shown.ended_at),
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        if value:
            table.add_row(name, value if isinstance(value, Text) else str(value))
    return table


def _state(lease: Lease) -> Text:
    return Text(str(lease.raw.get("state", "")), style=_STYLES.get(lease.state, ""))


def _memory(lease: Lease) -> str:
    each = size(lease.gpu_mb) if lease.gpu_mb else "whole"
    return f"{lease.gpus} × {each}" if lease.gpus > 1 else each


def _note(lease: Lease) -> str:
    if lease.notice:
        return f"to be given back ({lease.notice.reason}) by {moment(lease.notice.deadline_at)}"
    if lease.error:
        return lease.error.message
    return with_short_ids(lease.pending.message) if lease.pending else ""
