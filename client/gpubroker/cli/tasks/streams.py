"""`gpubroker streams`, and `streams put`, `signal`, `next` and `delete`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from gpubroker.cli import parsing
from gpubroker.cli.lookup import connect, listed_name
from gpubroker.cli.printing import Format, Output, emit, emit_all, eprint
from gpubroker.cli.tables import Column, PlainTable

if TYPE_CHECKING:
    from gpubroker.broker import Broker
    from gpubroker.wire.streams import DrawnStream, WorkStream

streams = typer.Typer(help="List work streams and what each counts now; change them.")

Name = Annotated[str, typer.Argument(metavar="STREAM", help="Name of the work stream.")]


@streams.callback(invoke_without_command=True)
def list_(context: typer.Context, output: Output = Format.TABLE) -> None:
    """List work streams: their factors, weights and chances to be drawn."""
    if context.invoked_subcommand is None:
        with connect() as broker:
            emit_all(output, broker.streams().items, _streams)


@streams.command()
def put(
    name: Name,
    curriculum: Annotated[float, typer.Argument(metavar="WEIGHT", help="Its curriculum weight, above 0.")],
    because: Annotated[
        str, typer.Option(metavar="REASON", help="The reason; recorded with your token's name.")
    ] = "",
    output: Output = Format.TABLE,
) -> None:
    """Give a work stream its curriculum weight. One that does not exist begins to."""
    with connect() as broker:
        emit(output, broker.put_stream(name, curriculum, reason=because), _stream)


@streams.command()
def signal(
    name: Name,
    progress: Annotated[
        float | None, typer.Option(help="Present quality, such as its Elo: more is better.")
    ] = None,
    data_age: Annotated[
        float | None,
        typer.Option(parser=parsing.seconds, metavar="TIME", help="Age of its newest data, such as 10m."),
    ] = None,
    quality: Annotated[float | None, typer.Option(help="Quality of its data, from 0 to 1.")] = None,
    output: Output = Format.TABLE,
) -> None:
    """Tell of a work stream's progress, of the age of its data, of their quality."""
    if progress is None and data_age is None and quality is None:
        raise typer.BadParameter("give at least one of --progress, --data-age and --quality")
    with connect() as broker:
        told = broker.signal_stream(
            _named(broker, name), progress=progress, data_age_seconds=data_age, quality=quality
        )
        emit(output, told, _stream)


@streams.command("next")
def next_(
    seed: Annotated[int | None, typer.Option(help="Draws the same stream while weights are equal.")] = None,
    output: Output = Format.TABLE,
) -> None:
    """Draw the work stream to go on with, and print its name."""
    with connect() as broker:
        emit(output, broker.next_stream(seed=seed), _drawn)


@streams.command()
def delete(name: Name) -> None:
    """Forget what was told of a work stream. One of the settings stays, with the weight it has there."""
    with connect() as broker:
        broker.delete_stream(_named(broker, name))
        eprint(f"what was told of {name} is forgotten")


_COLUMNS = (
    Column("STREAM", share=0.25),
    Column("CURRICULUM"),
    Column("VELOCITY"),
    Column("STALENESS"),
    Column("QUALITY"),
    Column("WEIGHT"),
    Column("CHANCE"),
)


def _named(broker: Broker, word: str) -> str:
    return listed_name(word, lambda: (stream.name for stream in broker.streams().items), "work stream")


def _streams(listed: Sequence[WorkStream]) -> RenderableType:
    rows = [
        (
            stream.name,
            *(
                f"{getattr(stream.factors, name):.3g}"
                for name in ("curriculum", "velocity", "staleness", "quality")
            ),
            f"{stream.weight:.3g}",
            "paused" if stream.paused else f"{stream.probability:.1%}",
        )
        for stream in listed
    ]
    return PlainTable(_COLUMNS, rows) if rows else Text("no work streams; see: gpubroker streams put --help")


def _stream(stream: WorkStream) -> RenderableType:
    return _streams([stream])


def _drawn(drawn: DrawnStream) -> str:
    return drawn.stream.name
