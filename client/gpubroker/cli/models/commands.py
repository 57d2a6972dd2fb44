"""Commands about models of servers: models, load, unload, pin."""

from typing import Annotated, Any

import typer

from gpubroker.cli import EXIT_WAIT_TIMEOUT, quantities
from gpubroker.cli.session import Format, Output, broker_of, emit, emit_all, say

Name = Annotated[str, typer.Argument(metavar="MODEL", help="As its server knows it.")]
Server = Annotated[str | None, typer.Option(metavar="NAME", help="Where several have the model.")]


def models(context: typer.Context, output: Output = Format.TABLE) -> None:
    """Models of servers: which are in memory, which wait for it, and for whom they stay."""
    from gpubroker.cli.models import draw as draw_served

    with broker_of(context) as broker:
        emit_all(output, broker.models().items, draw_served.models)


def load(
    context: typer.Context,
    model: Name,
    priority: Annotated[
        Any,
        typer.Option(
            help="0 to 100, or a band's name; else that of its configuration.",
            metavar="PRIORITY",
            parser=quantities.priority,
        ),
    ] = None,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", help="So long until it is there; else only ask for it.")
    ] = 0.0,
    server: Server = None,
    output: Output = Format.TABLE,
) -> None:
    """Bring a model into memory: it waits its turn, and may take the room of lower priorities."""
    from gpubroker.cli.models import draw as draw_served

    with broker_of(context) as broker:
        loaded = broker.load_model(model, priority=priority, wait_seconds=wait, server=server)
        emit(output, loaded, draw_served.asked_for)
    if wait and loaded.state != "resident":
        say(f"gpubroker: it was not there within {wait:g} s")
        raise typer.Exit(EXIT_WAIT_TIMEOUT)


def unload(context: typer.Context, model: Name, server: Server = None, output: Output = Format.TABLE) -> None:
    """Take a model out of memory once it has answered what it has; the next request brings it back."""
    from gpubroker.cli.models import draw as draw_served

    with broker_of(context) as broker:
        emit(output, broker.unload_model(model, server=server), draw_served.model)


def pin(
    context: typer.Context,
    model: Name,
    off: Annotated[bool, typer.Option("--off", help="It need not stay any longer.")] = False,
    server: Server = None,
    output: Output = Format.TABLE,
) -> None:
    """Keep a model in memory, whoever asks for its room."""
    from gpubroker.cli.models import draw as draw_served

    with broker_of(context) as broker:
        pinned = broker.pin_model(model, pinned=not off, server=server)
        emit(output, pinned, draw_served.model if off else draw_served.asked_for)


def add_to(app: typer.Typer) -> None:
    for command in (models, load, unload, pin):
        app.command(rich_help_panel="Models")(command)
