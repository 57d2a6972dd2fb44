"""`gpubroker plan`: whether the components of a file fit the fleet, or the one that the file describes."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpubroker.cli import EXIT_NOT_NOW
from gpubroker.cli.session import Format, Output, broker_of, emit

_KNOWN = ("components", "fleet", "tenant")
_MOST_NODES = 8
_TURN_SECONDS = 30.0
"""One plan is worked out at a time, for 10 s at most; whoever asks waits for that of somebody else."""

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gpubroker.cluster.plan import FleetPlan


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
    with broker_of(context, _TURN_SECONDS) as broker:
        found = broker.plan(**asked)
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
        raise typer.BadParameter(
            f"{file} has no list `components`; docs/how-to/check-whether-it-fits.md shows one"
        )
    if unknown := asked.keys() - _KNOWN:
        names = ", ".join(sorted(map(str, unknown)))
        raise typer.BadParameter(f"{file}: unknown {names}; known: {', '.join(_KNOWN)}")
    return asked


def _drawn(found: "FleetPlan") -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    from gpubroker.cli.layout import Column, Rows

    nodes: dict[str, Counter[str]] = {}
    for place in found.places:
        nodes.setdefault(place["component"], Counter())[place["node"]] += 1
    columns = (
        Column("COMPONENT", share=0.3),
        Column("PLACED"),
        Column("MISSING"),
        Column("ON", wraps=True),
    )
    rows = [
        (one.name, f"{one.placed}/{one.count}", str(one.missing or ""), _on(nodes.get(one.name, Counter())))
        for one in found.components
    ]
    facts = Rows((Column(""), Column("", wraps=True)), list(_facts(found)))
    return Group(Text(found.message, style="bold"), Text(), Rows(columns, rows), facts)


def _on(nodes: Counter[str]) -> str:
    """How many on which nodes; of many nodes the first."""
    in_order = sorted(nodes.items(), key=lambda item: (len(item[0]), item[0]))
    named = [f"{node} ×{n}" if n > 1 else node for node, n in in_order[:_MOST_NODES]]
    more = f" and {len(nodes) - _MOST_NODES} more nodes" if len(nodes) > _MOST_NODES else ""
    return ", ".join(named) + more


def _facts(found: "FleetPlan") -> Iterator[tuple[str, str]]:
    from gpubroker.cli.tasks.draw_explanation import run_in_words

    for one in found.components:
        if one.missing:
            yield f"no place for {one.name}", one.message
    for run in found.displaced:
        ranks = "" if run.ranks is None else f" (only rank {', '.join(map(str, run.ranks))})"
        yield "displaces", f"{run_in_words(run)} on {run.node}{ranks}"
    yield "in all", _total(found.totals)
    if found.totals != found.totals_without_colocation:
        yield "without colocation", _total(found.totals_without_colocation)


def _total(sums: Mapping[str, Any]) -> str:
    from gpubroker.cli.layout import gib

    parts = []
    if gpus := sums.get("gpus"):
        parts.append(f"{gpus} GPUs ({sums['whole_gpus']} whole)" if gpus > 1 else "1 GPU")
    if sums.get("gpu_mb"):
        parts.append(f"{gib(sums['gpu_mb'])} GiB of GPU memory in parts")
    parts.append(f"{sums['cpu']:g} CPUs")
    if sums.get("memory_mb"):
        parts.append(f"{gib(sums['memory_mb'])} GiB of host memory")
    return ", ".join(parts)


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel="Cluster")(plan)
