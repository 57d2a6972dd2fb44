"""What was learned from past runs, as tables and words for people."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from gpubroker.cli.layout import Column, Rows, size, span
from gpubroker.tasks.estimates import Estimate, Expected

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


def expected_end(eta: Expected) -> str:
    if not eta.n:
        return f"in about {span(eta.p50_seconds)}, as its submitter said"
    runs = "1 run" if eta.n == 1 else f"{eta.n} runs"
    return f"in about {span(eta.p50_seconds)}, 9 of 10 within {span(eta.p90_seconds)} (going by {runs})"


def expected_start(start: Expected | None) -> str:
    """What to add to why a task waits; empty if nobody can tell when it starts."""
    if start is None:
        return ""
    known = f"{start.basis}, {start.n} runs" if start.n else start.basis
    return f"; starts in about {span(start.p50_seconds)}, 9 of 10 within {span(start.p90_seconds)} ({known})"
