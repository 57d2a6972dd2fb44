"""`gpubroker estimates`: what past runs took."""

from typing import Annotated

import typer

from gpubroker.cli.session import Format, Output, broker_of, emit_all

Subject = Annotated[str | None, typer.Argument(help="Model type, name or entrypoint; nothing: all.")]


def estimates(context: typer.Context, subject: Subject = None, output: Output = Format.TABLE) -> None:
    """What past runs took: GPU memory at its peak, and time."""
    from gpubroker.cli.cluster import draw_estimates

    with broker_of(context) as broker:
        emit_all(output, broker.estimates(subject).items, draw_estimates.estimates)


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel="Tasks")(estimates)
