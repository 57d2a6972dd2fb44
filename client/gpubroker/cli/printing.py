"""Print answers as tables or JSON, and messages for people."""

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, NoReturn, Protocol, TypeVar

import typer
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment

from gpubroker.cli import EXIT_REFUSED, EXIT_USAGE

_PIPE_WIDTH = 1000


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"
    NDJSON = "ndjson"


Output = Annotated[Format, typer.Option("--output", "-o", help="Output format.")]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Refresh with each change until Ctrl-C.")]


class _Shown(Protocol):
    """An answer of the service."""

    @property
    def raw(self) -> Mapping[str, Any]: ...


A = TypeVar("A", bound=_Shown)


_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # colours, the cursor, modes
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"  # titles, the clipboard
    r"|\x1b[ -/]*[0-~]"
)
"""Control sequences, as ECMA-48 and xterm define them."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def harmless(text: str) -> str:
    """Return the text without control sequences, which a terminal would obey instead of show. A line that
    overwrote itself becomes several lines."""
    lines = _SEQUENCE.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return _CONTROL.sub("", lines)


@dataclass(frozen=True, slots=True)
class _Harmless:
    """A drawing whose texts may have been written by tasks, without control sequences."""

    drawn: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.drawn, options):
            yield segment if segment.control else Segment(harmless(segment.text), segment.style)


def show(text: str, *, end: str = "\n", error: bool = False) -> None:
    """Print what a task wrote, without control sequences at a terminal. A pipe or a file gets it
    unchanged."""
    stream = sys.stderr if error else sys.stdout
    typer.echo((harmless(text) if stream.isatty() else text) + end, nl=False, err=error, color=True)


def emit(output: Format, answer: A, draw: Callable[[A], RenderableType]) -> None:
    """Write one answer to standard output. `draw` is only called for a table."""
    if output is Format.TABLE:
        print_drawn(draw(answer))
    else:
        typer.echo(json.dumps(answer.raw, indent=2 if output is Format.JSON else None))


def emit_all(output: Format, answers: Sequence[A], draw: Callable[[Sequence[A]], RenderableType]) -> None:
    """Write a list to standard output: a table, a JSON array, or one line of JSON per item."""
    match output:
        case Format.TABLE:
            print_drawn(draw(answers))
        case Format.JSON:
            typer.echo(json.dumps([answer.raw for answer in answers], indent=2))
        case Format.NDJSON:
            for answer in answers:
                typer.echo(json.dumps(answer.raw))


def watch(
    output: Format,
    ask: Callable[[], Sequence[A]],
    draw: Callable[[Sequence[A]], RenderableType],
    wait: Callable[[], None],
) -> None:
    """Ask until Ctrl-C, each time that `wait` returns. A terminal shows one table that changes; a pipe gets
    every answer."""
    out = _console()
    try:
        if output is Format.TABLE and out.is_terminal:
            with Live(_Harmless(draw(ask())), console=out, auto_refresh=False, screen=True) as live:
                while True:
                    wait()
                    live.update(_Harmless(draw(ask())), refresh=True)
        while True:
            emit_all(output, ask(), draw)
            sys.stdout.flush()
            wait()
    except KeyboardInterrupt:
        return


def print_drawn(drawn: RenderableType, *, error: bool = False) -> None:
    """Print a table. In pipes and files its lines have no spaces at their end."""
    out = _console(error=error)
    if out.is_terminal:
        out.print(_Harmless(drawn))
        return
    with out.capture() as captured:
        out.print(drawn)
    typer.echo("\n".join(line.rstrip() for line in captured.get().splitlines()), err=error)


def _console(*, error: bool = False) -> Console:
    """Return a console. A pipe gets a large width, so that no cell is cut off for a program."""
    is_terminal = (sys.stderr if error else sys.stdout).isatty()
    width = None if is_terminal else _PIPE_WIDTH
    return Console(highlight=False, markup=False, width=width, stderr=error)


def eprint(message: str) -> None:
    """Print a message to standard error. It may quote what a task wrote."""
    show(message, error=True)


def refuse(message: str) -> NoReturn:
    eprint(f"gpubroker: {message}")
    raise typer.Exit(EXIT_REFUSED)


def confirm(question: str) -> None:
    """Return if the person answers yes; otherwise exit. Without a terminal, exit."""
    if not sys.stdin.isatty():
        eprint("gpubroker: cannot ask for confirmation without a terminal; use --yes")
        raise typer.Exit(EXIT_USAGE)
    if not typer.confirm(question, err=True):
        raise typer.Exit(EXIT_REFUSED)
