"""Commands that look at the cluster: gpus, nodes, stats."""

import typer

from gpubroker.cli.session import Format, Output, Watch, broker_of, emit, emit_all, watch


def gpus(context: typer.Context, watching: Watch = False, output: Output = Format.TABLE) -> None:
    """GPU memory: who leased what, what is used, what is free, and what nobody leased."""
    from gpubroker.cli import draw

    with broker_of(context) as broker:
        if watching:
            watch(output, lambda: broker.gpus().items, draw.gpus)
        else:
            emit_all(output, broker.gpus().items, draw.gpus)


def nodes(context: typer.Context, output: Output = Format.TABLE) -> None:
    """Machines, and what is used of them."""
    from gpubroker.cli import draw

    with broker_of(context) as broker:
        emit_all(output, broker.nodes().items, draw.nodes)


def stats(context: typer.Context, output: Output = Format.TABLE) -> None:
    """Counts of tasks and of memory, and whether work can run."""
    from gpubroker.cli import draw

    with broker_of(context) as broker:
        emit(output, broker.stats(), draw.stats)


def add_to(app: typer.Typer) -> None:
    for command in (gpus, nodes, stats):
        app.command(rich_help_panel="Cluster")(command)
