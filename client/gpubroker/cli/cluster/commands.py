"""Commands that look at the cluster: gpus, nodes, tenants, stats, policy."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from gpubroker.cli.session import (
    Format,
    Output,
    Watch,
    broker_of,
    emit,
    emit_all,
    stats_if_allowed,
    watch,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gpubroker.broker import Broker
    from gpubroker.cluster.fleet import Gpu


def gpus(context: typer.Context, watching: Watch = False, output: Output = Format.TABLE) -> None:
    """GPU memory: who leased what, what is used, what is free, and what nobody leased."""
    from gpubroker.cli import draw

    with broker_of(context) as broker:

        def drawn(listed: "Sequence[Gpu]") -> "RenderableType":
            return draw.gpus(listed) if listed else _why_none(broker)

        if watching:
            watch(output, lambda: broker.gpus().items, drawn)
        else:
            emit_all(output, broker.gpus().items, drawn)


def _why_none(broker: "Broker") -> str:
    from gpubroker.cli import draw

    stats = stats_if_allowed(broker)
    if stats and stats.executor.get("state") != "connected":
        return f"no GPUs yet: {draw.executor(stats)}"
    return "no GPUs; to try things without one, declare simulated_devices in the service's settings"


def nodes(context: typer.Context, output: Output = Format.TABLE) -> None:
    """Machines, and what is used of them."""
    from gpubroker.cli import draw

    with broker_of(context) as broker:
        emit_all(output, broker.nodes().items, draw.nodes)


def tenants(context: typer.Context, output: Output = Format.TABLE) -> None:
    """Who shares the cluster: what is guaranteed, held, borrowed and used, and who comes first."""
    from gpubroker.cli.cluster import draw_tenants

    with broker_of(context) as broker:
        emit_all(output, broker.tenants().items, draw_tenants.tenants)


def stats(context: typer.Context, output: Output = Format.TABLE) -> None:
    """Counts of tasks and of memory, and whether work can run."""
    from gpubroker.cli import draw

    with broker_of(context) as broker:
        emit(output, broker.stats(), draw.stats)


def policy(context: typer.Context, output: Output = Format.TABLE) -> None:
    """What the operator has chosen: bands, kinds, pools, limits, defaults."""
    from gpubroker.cli.cluster import draw_policy

    with broker_of(context) as broker:
        emit(output, broker.policy(), draw_policy.policy)


def add_to(app: typer.Typer) -> None:
    for command in (gpus, nodes, tenants, stats, policy):
        app.command(rich_help_panel="Cluster")(command)
