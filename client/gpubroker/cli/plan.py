"""`gpubroker plan`: whether the components of a file fit the fleet, or the one that the file describes."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpubroker.cli import EXIT_NOT_NOW
from gpubroker.cli.session import Format, Output, broker_of, emit

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gpubroker.planned import FleetPlan


def plan(
    context: typer.Context,
    file: Annotated[
        Path,
        typer.Option("--file", "-f", exists=True, dir_okay=False, help="YAML or JSON."),
    ],
    output: Output = Format.TABLE,
) -> None:
    """Whether components fit, what is missing, and what they would displace; exit code 8 if they do not fit.

    \b
    gpubroker plan -f fleet.yaml
    """
    asked = _read(file)
    with broker_of(context) as broker:
        found = broker.plan(asked["components"], asked.get("fleet"))
        emit(output, found, _drawn)
    if not found.fits:
        raise typer.Exit(EXIT_NOT_NOW)


def _read(file: Path) -> dict[str, Any]:
    import yaml

    try:
        asked = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"{file} cannot be read: {error}") from None
    if not isinstance(asked, dict) or not isinstance(asked.get("components"), list):
        raise typer.BadParameter(f"{file} has no list `components`; docs/plan.md shows one")
    if unknown := asked.keys() - {"components", "fleet"}:
        raise typer.BadParameter(f"{file}: unknown {', '.join(sorted(unknown))}; known: components, fleet")
    return asked


def _drawn(found: "FleetPlan") -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    from gpubroker.cli.draw_explained import run_in_words
    from gpubroker.cli.layout import Column, Rows

    nodes: dict[str, Counter[str]] = {}
    for place in found.places:
        nodes.setdefault(place["component"], Counter())[place["node"]] += 1
    columns = (
        Column("COMPONENT", share=0.3),
        Column("PLACED"),
        Column("MISSING"),
        Column("NODES", wraps=True),
    )
    rows = [
        (
            one.name,
            f"{one.placed}/{one.count}",
            str(one.missing or ""),
            ", ".join(
                f"{node} ×{n}" if n > 1 else node for node, n in nodes.get(one.name, Counter()).items()
            ),
        )
        for one in found.components
    ]

    lines = [Text(f"displaces {run_in_words(run)} on {run.node}") for run in found.displaced]
    lines.append(Text(f"in all: {_total(found.totals)}"))
    if found.totals != found.totals_without_colocation:
        lines.append(Text(f"without colocation: {_total(found.totals_without_colocation)}"))
    return Group(Text(found.message, style="bold"), Text(), Rows(columns, rows), Text(), *lines)


def _total(sums: Mapping[str, Any]) -> str:
    from gpubroker.cli.layout import gib

    gpus = f"{sums['gpus']} GPUs ({sums['whole_gpus']} whole)" if sums.get("gpus") else "no GPUs"
    sizes = f"{gib(sums['gpu_mb'])} GiB in parts, {sums['cpu']:g} CPUs, {gib(sums['memory_mb'])} GiB"
    return f"{gpus}, {sizes} of host memory"


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel="Cluster")(plan)
