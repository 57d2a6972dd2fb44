"""`gpubroker plan`: whether the components of a file fit the fleet, or a fleet that the file describes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from gpubroker.cli import EXIT_NOT_NOW
from gpubroker.cli.lookup import connect
from gpubroker.cli.printing import Format, Output, emit
from gpubroker.cli.tables import Column, PlainTable, details, gib
from gpubroker.cli.tasks.explain import run_in_words

if TYPE_CHECKING:
    from gpubroker.wire.plans import FleetPlan, Totals

_KNOWN = ("components", "fleet", "tenant")
_MAX_NODES = 8
_RETRY_SECONDS = 30.0
"""The seconds for which a plan is retried: the service computes one plan at a time, for at most 10 s, and
refuses others meanwhile."""


def plan(
    file: Annotated[
        Path,
        typer.Option("--file", "-f", exists=True, dir_okay=False, help="YAML or JSON file to check."),
    ],
    output: Output = Format.TABLE,
) -> None:
    """Check whether components fit, what is missing, and which runs they would displace.

    The exit code is 8 if they do not fit.

    \b
    gpubroker plan -f fleet.yaml
    """
    description = _read(file)
    with connect(_RETRY_SECONDS) as broker:
        answer = broker.plan(**description)
        emit(output, answer, _plan)
    if not answer.fits:
        raise typer.Exit(EXIT_NOT_NOW)


def _read(file: Path) -> dict[str, Any]:
    import yaml

    try:
        description = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"cannot read {file}: {error}") from None
    if not isinstance(description, dict) or not isinstance(description.get("components"), list):
        raise typer.BadParameter(
            f"{file} has no list `components`; docs/how-to/check-whether-it-fits.md shows one"
        )
    if unknown := description.keys() - _KNOWN:
        names = ", ".join(sorted(map(str, unknown)))
        raise typer.BadParameter(f"{file} has unknown keys: {names}; known keys: {', '.join(_KNOWN)}")
    return description


def _plan(found: FleetPlan) -> RenderableType:
    nodes: dict[str, Counter[str]] = {}
    for place in found.places:
        nodes.setdefault(place.component, Counter())[place.node] += 1
    columns = (
        Column("COMPONENT", share=0.3),
        Column("PLACED"),
        Column("MISSING"),
        Column("ON", wraps=True),
    )
    rows = [
        (
            component.name,
            f"{component.placed}/{component.count}",
            str(component.missing or ""),
            _on(nodes.get(component.name, Counter())),
        )
        for component in found.components
    ]
    facts = details(_facts(found))
    return Group(Text(found.message, style="bold"), Text(), PlainTable(columns, rows), Text(), facts)


def _on(nodes: Counter[str]) -> str:
    """Return the number of places on each node. Only the first of many nodes are named."""
    in_order = sorted(nodes.items(), key=lambda item: (len(item[0]), item[0]))
    named = [f"{node} ×{n}" if n > 1 else node for node, n in in_order[:_MAX_NODES]]
    more = f" and {len(nodes) - _MAX_NODES} more nodes" if len(nodes) > _MAX_NODES else ""
    return ", ".join(named) + more


def _facts(found: FleetPlan) -> Iterator[tuple[str, str]]:
    for component in found.components:
        if component.missing:
            yield f"no place for {component.name}", component.message or ""
    for run in found.displaced:
        ranks = "" if run.ranks is None else f" (only rank {', '.join(map(str, run.ranks))})"
        yield "displaces", f"{run_in_words(run)} on {run.node}{ranks}"
    yield "total", _total(found.totals)
    if found.totals != found.totals_without_colocation:
        yield "without colocation", _total(found.totals_without_colocation)


def _total(sums: Totals) -> str:
    parts = []
    if sums.gpus:
        parts.append(f"{sums.gpus} GPUs ({sums.whole_gpus} whole)" if sums.gpus > 1 else "1 GPU")
    if sums.gpu_mb:
        parts.append(f"{gib(sums.gpu_mb)} GiB of GPU memory in parts")
    parts.append(f"{sums.cpu:g} CPUs")
    if sums.memory_mb:
        parts.append(f"{gib(sums.memory_mb)} GiB of host memory")
    return ", ".join(parts)
