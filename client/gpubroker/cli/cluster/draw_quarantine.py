"""What is in quarantine, as a table for people."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from gpubroker.cli.layout import Column, Rows, ago, size
from gpubroker.cluster.quarantine import Quarantined, Released

_COLUMNS = (
    Column("ID", share=0.3),
    Column("NAME", share=0.2),
    Column("ATTEMPT"),
    Column("NODE", share=0.2),
    Column("MEMORY"),
    Column("SINCE"),
    Column("WAITS FOR", wraps=True),
)


def quarantined(listed: Sequence[Quarantined]) -> RenderableType:
    rows = [
        (
            one.id or f"(tenant {one.tenant})",
            one.name,
            f"{one.attempt} rank {one.rank}" if one.kind == "gang_member" else str(one.attempt),
            one.node,
            size(one.gpu_mb),
            ago(one.quarantined_at),
            one.message,
        )
        for one in listed
    ]
    return Rows(_COLUMNS, rows) if rows else Text("nothing is in quarantine")


def released(shown: Released) -> RenderableType:
    said = f"{size(shown.gpu_mb)} of {shown.id} given back; free once it is measured"
    left = f"; still in quarantine of it: {size(sum(one.gpu_mb for one in shown.quarantine))}"
    return Text(said + left if shown.quarantine else said)
