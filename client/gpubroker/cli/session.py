"""What every command needs: a broker to ask, the task a person meant, and the shape of the output."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

import typer

from gpubroker.cli import EXIT_REFUSED

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from gpubroker.broker import Broker

_TASK_ID_LENGTH = len("task_") + 26
_TASKS_SEARCHED = 2000
_RETRY_SECONDS = 3.0
"""A person at a terminal would rather read that nothing answers than wait for a service to come back."""
_WATCH_SECONDS = 1.0
_PIPE_WIDTH = 1000


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"
    NDJSON = "ndjson"


Output = Annotated[Format, typer.Option("--output", "-o", help="Shape of what goes to standard output.")]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Show it again each second, until Ctrl-C.")]
TaskWord = Annotated[
    str, typer.Argument(metavar="TASK", help="Id, a unique beginning or end of one, or `last`.")
]
TaskWords = Annotated[
    list[str], typer.Argument(metavar="TASK...", help="Ids, unique beginnings or ends, or `last`.")
]


@contextmanager
def broker_of(context: typer.Context) -> Iterator["Broker"]:
    """The service named by the global options, or else found as the SDK finds it."""
    from gpubroker.broker import Broker

    chosen: Mapping[str, str | None] = context.find_root().params
    with Broker(chosen.get("url"), chosen.get("token"), retry_seconds=_RETRY_SECONDS) as broker:
        yield broker


def task_id(broker: "Broker", word: str) -> str:
    """The id of the task a person meant. Looks through the newest 2000 tasks; leaves with 6 if in doubt."""
    if word.startswith("task_") and len(word) == _TASK_ID_LENGTH:
        return word
    if word == "last":
        found = [task.id for task in islice(broker.list(limit=1), 1)]
    else:
        recent = islice(broker.list(limit=500), _TASKS_SEARCHED)
        found = [task.id for task in recent if _is_meant(task.id, word)]
    if len(found) == 1:
        return found[0]
    if word == "last":
        say("there is no task yet")
    elif found:
        say(
            f"{word!r} is the beginning or end of {len(found)} tasks: {', '.join(found[:5])}; type more of it"
        )
    else:
        say(f"none of the newest {_TASKS_SEARCHED} tasks has an id that begins or ends with {word!r}")
    raise typer.Exit(EXIT_REFUSED)


def _is_meant(task: str, word: str) -> bool:
    return task.startswith((word, f"task_{word}")) or task.endswith(word)


def say(message: str) -> None:
    """A message for the person, on standard error."""
    typer.echo(message, err=True)


class Answered(Protocol):
    """A model of the SDK."""

    @property
    def raw(self) -> Mapping[str, Any]: ...


A = TypeVar("A", bound=Answered)


def emit(output: Format, answer: A, draw: Callable[[A], "RenderableType"]) -> None:
    """Write one answer to standard output; `draw` is only called where a table is wanted."""
    if output is Format.TABLE:
        console().print(draw(answer))
    else:
        typer.echo(json.dumps(answer.raw, indent=2 if output is Format.JSON else None))


def emit_all(output: Format, answers: Sequence[A], draw: Callable[[Sequence[A]], "RenderableType"]) -> None:
    """Write a list to standard output: one table, one JSON array, or one line of JSON each."""
    match output:
        case Format.TABLE:
            console().print(draw(answers))
        case Format.JSON:
            typer.echo(json.dumps([answer.raw for answer in answers], indent=2))
        case Format.NDJSON:
            for answer in answers:
                typer.echo(json.dumps(answer.raw))


def watch(
    output: Format, ask: Callable[[], Sequence[A]], draw: Callable[[Sequence[A]], "RenderableType"]
) -> None:
    """Ask each second until Ctrl-C: a picture that changes on a terminal, one answer after another off it."""
    from rich.live import Live

    out = console()
    try:
        if output is Format.TABLE and out.is_terminal:
            with Live(draw(ask()), console=out, auto_refresh=False, screen=True) as live:
                while True:
                    time.sleep(_WATCH_SECONDS)
                    live.update(draw(ask()), refresh=True)
        while True:
            emit_all(output, ask(), draw)
            sys.stdout.flush()
            time.sleep(_WATCH_SECONDS)
    except KeyboardInterrupt:
        return


def console() -> "Console":
    """Standard output for tables. A pipe gets the full width, so that nothing is cut off for a program."""
    from rich.console import Console

    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
