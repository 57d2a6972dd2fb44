"""`gpubroker targets` and `doctor`: whether the fleet is where its operator wants it, and what is wrong."""

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
from gpubroker.cli.tables import Column, PlainTable, ago, size

if TYPE_CHECKING:
    from gpubroker.transport.decoding import Raw
    from gpubroker.wire.fleet import Finding
    from gpubroker.wire.targets import Target

_STYLES: Final = {"critical": "bold red", "warning": "yellow"}

_COLUMNS = (
    Column("SCOPE", wraps=True),
    Column("MEASURE"),
    Column("TARGET"),
    Column("NOW"),
    Column("FOR"),
    Column("BACKGROUND", wraps=True),
)


def targets(output: Output = Format.TABLE) -> None:
    """Show targets, what is measured, and what keeps new work out.

    BACKGROUND is what background and idle work may take of that part of the
    fleet, if fleet.controller is on.
    """
    with connect() as broker:
        found = broker.targets()
        emit_all(output, found.items, lambda listed: Group(_table(listed), *_pressures(found.raw)))


def _table(listed: Sequence[Target]) -> RenderableType:
    if not listed:
        return Text("no process leads, or it has not looked at the fleet yet")
    return PlainTable(_COLUMNS, [_row(target) for target in listed])


def _row(target: Target) -> tuple[str | Text, ...]:
    now = "unknown" if target.value is None else f"{target.value:.0%}"
    return (
        target.scope,
        target.measure,
        f"{target.least:.0%} to {target.most:.0%}" if target.least else f"at most {target.most:.0%}",
        Text(f"{now} !", style="yellow") if target.state == "out" else now,
        ago(target.changed_at),
        _background(target),
    )


def _background(target: Target) -> str:
    if target.background_share is None:
        return ""
    return f"{target.background_share:.0%}, {size(target.background_left_mb or 0)} left"


def _pressures(raw: Raw) -> Iterator[Text]:
    for pressure in raw.get("backpressure", ()):
        value = "unknown" if pressure["value"] is None else f"{pressure['value']:g}"
        yield Text(
            f"! {pressure['measure']} is {value} (too high from {pressure['high']:g}): tasks with a priority "
            f"below {pressure['refused_below']} are refused",
            style="yellow",
        )


def doctor(output: Output = Format.TABLE) -> None:
    """Say what is wrong with the fleet, and what to do; exit code 1 if it is critical.

    Where gpubroker-server is installed it also looks at this machine, with or
    without a service.
    """
    with connect() as broker:
        found = broker.diagnostics().items
    report(found, output)


def report(found: Sequence[Finding], output: Format) -> None:
    """Print findings in this order. Raises typer.Exit if one is critical."""
    emit_all(output, found, _drawn)
    if any(finding.severity == "critical" for finding in found):
        raise typer.Exit(EXIT_ERROR)


def _drawn(found: Sequence[Finding]) -> RenderableType:
    return (
        Group(*(part for finding in found for part in _paragraph(finding)))
        if found
        else Text("nothing is wrong")
    )


def _paragraph(finding: Finding) -> Iterator[RenderableType]:
    known_for = ago(finding.first_seen_at)  # empty for a fault of this machine
    since = f" for {known_for}" if known_for else ""
    yield Text.assemble(
        (finding.severity, _STYLES.get(finding.severity, "")), f"  {finding.kind}  {finding.subject}{since}"
    )
    yield Padding(Text(finding.cause), (0, 0, 0, 4))
    evidence = ", ".join(f"{name} {value}" for name, value in finding.evidence.items())
    if evidence:
        yield Padding(Text(evidence, style="dim"), (0, 0, 0, 4))
    yield Padding(Text(f"> {finding.remedy}"), (0, 0, 0, 4))
