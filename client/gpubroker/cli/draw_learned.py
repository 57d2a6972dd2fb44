"""What was learned from past runs, as tables and words for people."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from gpubroker.cli.layout import Column, Rows, size, span
from gpubroker.estimates import Estimate

_COLUMNS = (
    Column("SUBJECT", share=0.4),
    Column("KIND", share=0.3),
    Column("RUNS"),
    Column("MEMORY p50"),
    Column("p95"),
    Column("TIME p50"),
    Column("p90"),
)


def estimates(listed: Sequence[Estimate]) -> RenderableType:
    rows = [_row(estimate) for estimate in listed]
    return Rows(_COLUMNS, rows) if rows else Text("nothing learned yet: no run has succeeded")


def _row(estimate: Estimate) -> tuple[str, ...]:
    memory, time = estimate.gpu_mb, estimate.seconds
    return (
        estimate.subject,
        estimate.kind,
        str(max(known.n for known in (memory, time) if known) if memory or time else 0),
        size(memory.p50) if memory else "",
        size(memory.p95) if memory else "",
        span(time.p50) if time else "",
        span(time.p90) if time else "",
    )
