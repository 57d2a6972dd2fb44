"""`gpubroker doctor`: what is wrong, and what to do. The server's command of this name also looks at its
machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import typer
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from gpubroker.cli import EXIT_ERROR
from gpubroker.cli.lookup import connect
from gpubroker.cli.printing import Format, Output, emit_all
from gpubroker.cli.tables import ago

if TYPE_CHECKING:
    from gpubroker.cluster.fleet import Finding

_STYLES: Final = {"critical": "bold red", "warning": "yellow"}


def doctor(context: typer.Context, output: Output = Format.TABLE) -> None:
    """Say what is wrong with the fleet, and what to do; exit code 1 if it is critical.

    Where gpubroker-server is installed it also looks at this machine, with or
    without a service.
    """
    with connect(context) as broker:
        found = broker.diagnostics().items
    report(found, output)


def report(found: Sequence[Finding], output: Format) -> None:
    """Print findings in this order. Raises typer.Exit if one is critical."""
    emit_all(output, found, _drawn)
    if any(one.severity == "critical" for one in found):
        raise typer.Exit(EXIT_ERROR)


def _drawn(found: Sequence[Finding]) -> RenderableType:
    return Group(*(part for one in found for part in _paragraph(one))) if found else Text("nothing is wrong")


def _paragraph(one: Finding) -> Iterator[RenderableType]:
    since = f" for {ago(one.first_seen_at)}" if one.first_seen_at else ""
    yield Text.assemble((one.severity, _STYLES.get(one.severity, "")), f"  {one.kind}  {one.subject}{since}")
    yield Padding(Text(one.cause), (0, 0, 0, 4))
    evidence = ", ".join(f"{name} {value}" for name, value in one.evidence.items())
    if evidence:
        yield Padding(Text(evidence, style="dim"), (0, 0, 0, 4))
    yield Padding(Text(f"> {one.remedy}"), (0, 0, 0, 4))


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel="Cluster")(doctor)
