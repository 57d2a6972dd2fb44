"""`gpubroker models`, `models measure`, `load`, `unload` and `pin`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from gpubroker.cli import EXIT_WAIT_TIMEOUT, parsing
from gpubroker.cli.lookup import connect, listed_name
from gpubroker.cli.printing import Format, Output, emit, emit_all, eprint
from gpubroker.cli.tables import Column, PlainTable, ago, size

if TYPE_CHECKING:
    from gpubroker.broker import Broker
    from gpubroker.wire.models import MeasuredModel, ServedModel

Name = Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model on its server.")]
Priority = Annotated[
    Any,
    typer.Option(
        help="0 to 100, or the name of a band. Default: as configured.",
        metavar="PRIORITY",
        parser=parsing.priority,
    ),
]
Server = Annotated[
    str | None, typer.Option(metavar="NAME", help="The model's server, if several have the model.")
]
LoadWait = Annotated[
    Any,
    typer.Option(
        "--wait",
        parser=parsing.seconds,
        metavar="DURATION",
        help="Longest time to wait until it is in memory, such as 5m.",
    ),
]

models = typer.Typer(help="List the models of servers; measure how much memory one takes.")


@models.callback(invoke_without_command=True)
def list_(
    context: typer.Context,
    state: Annotated[
        list[str] | None,
        typer.Option("--state", "-s", help="resident, loading, draining, waiting or cold; may be repeated."),
    ] = None,
    server: Annotated[str | None, typer.Option(metavar="NAME", help="Only models of this server.")] = None,
    sort: Annotated[
        str | None,
        typer.Option(help="state, name, gpu_mb, priority or loaded; -gpu_mb: the largest first."),
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """List the models of servers: first those in memory, then those that wait for it, then the others."""
    if context.invoked_subcommand is None:
        with connect() as broker:
            emit_all(output, broker.models(state=state, server=server, sort=sort).items, _models)


@models.command()
def measure(
    model: Name,
    batch_size: Annotated[
        list[int] | None,
        typer.Option(
            metavar="ROWS", help="Rows of a request; repeatable. Default: 1, and the most that it takes."
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="INPUT=3,224,224",
            help="Shape of an input, without rows; repeatable. Default: the model's own, and 1 where any "
            "length will do.",
        ),
    ] = None,
    priority: Priority = None,
    wait: LoadWait = "5m",
    server: Server = None,
    output: Output = Format.TABLE,
) -> None:
    """Measure how much GPU memory a model takes: load it, ask it, unload it.

    It is asked with zeros while its GPU is measured. Later loads lease the size
    that was learned. The model must not be in memory.
    """
    with connect() as broker:
        measured = broker.measure_model(
            model,
            batch_sizes=batch_size or (),
            shapes=parsing.shapes(shape or [], "--shape"),
            priority=priority,
            wait_seconds=wait,
            server=server,
        )
        emit(output, measured, _measured)


def load(
    model: Name,
    priority: Priority = None,
    wait: LoadWait = "0",
    server: Server = None,
    output: Output = Format.TABLE,
) -> None:
    """Load a model into memory, in its turn; it may take the room of lower priorities."""
    with connect() as broker:
        loaded = broker.load_model(_named(broker, model), priority=priority, wait_seconds=wait, server=server)
        emit(output, loaded, _requested)
    if wait and loaded.state != "resident":
        eprint(f"gpubroker: {model} was not in memory within {wait:g} s")
        raise typer.Exit(EXIT_WAIT_TIMEOUT)


def unload(model: Name, server: Server = None, output: Output = Format.TABLE) -> None:
    """Unload a model after its current requests; the next request loads it again."""
    with connect() as broker:
        emit(output, broker.unload_model(_named(broker, model), server=server), _model)


def pin(
    model: Name,
    off: Annotated[bool, typer.Option("--off", help="End the pin.")] = False,
    server: Server = None,
    output: Output = Format.TABLE,
) -> None:
    """Keep a model in memory, even if others need the room."""
    with connect() as broker:
        pinned = broker.pin_model(_named(broker, model), pinned=not off, server=server)
        emit(output, pinned, _model if off else _requested)


_COLUMNS = (
    Column("MODEL", share=0.3),
    Column("SERVER"),
    Column("STATE"),
    Column("PRIORITY"),
    Column("MEMORY"),
    Column("LOADED"),
    Column("NOTE", wraps=True),
)


def _named(broker: Broker, word: str) -> str:
    return listed_name(word, lambda: (model.name for model in broker.models().items), "model")


def _models(listed: Sequence[ServedModel]) -> RenderableType:
    """Return the table. A reason that holds for several models of a server stands once below it."""
    notes = [(each, " ".join((each.reason or "").split())) for each in listed]
    times = Counter((model.server, note) for model, note in notes if note and model.state == "cold")
    shared = {of_server: count for of_server, count in times.items() if count > 1}
    rows = [
        (
            model.name,
            model.server,
            model.state,
            "pinned" if model.pinned else "" if model.priority is None else str(model.priority),
            "" if model.gpu_mb is None else size(model.gpu_mb),
            ago(model.loaded_at),
            "" if (model.server, note) in shared else note,
        )
        for model, note in notes
    ]
    below = [
        Text(f"! {count} models of {server}: {note}", style="yellow")
        for (server, note), count in shared.items()
    ]
    return Group(PlainTable(_COLUMNS, rows), *below) if rows else Text("no models")


def _model(shown: ServedModel) -> Text:
    memory = "" if shown.gpu_mb is None else f" of {size(shown.gpu_mb)}"
    pinned = ", pinned" if shown.pinned else ""
    return Text(f"{shown.name}{memory} on {shown.server}: {shown.state}{pinned}")


def _measured(shown: MeasuredModel) -> Text:
    asked = " and ".join(map(str, shown.batch_sizes))
    rows = f" with {asked} row{'s' * (asked != '1')}" if asked else ""
    basis = " as the settings say (gpu_mb)" if shown.configured else " with its margin"
    return Text(
        f"{shown.name} took {size(shown.measured_mb)}, asked{rows}\n"
        f"on {shown.server}, GPU {shown.device} ({shown.kind})\n"
        f"its next load leases {size(shown.next_mb)},{basis}"
    )


def _requested(shown: ServedModel) -> RenderableType:
    if shown.state == "resident":
        return _model(shown)
    commands = ["gpubroker models"] + ([f"gpubroker explain {shown.task}"] if shown.task else [])
    hint = f"\nrequested, not in memory yet; to follow it: {', '.join(commands)}"
    return Text.assemble(_model(shown), hint, f"\n{shown.reason}" if shown.reason else "")
