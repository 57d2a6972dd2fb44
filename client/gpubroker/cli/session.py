"""What every command needs: a broker to ask, the task a person meant, and the shape of the output."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

import typer

from gpubroker.cli import EXIT_REFUSED, EXIT_USAGE, SHOWN_ID_LENGTH
from gpubroker.cli.tasks import last_task
from gpubroker.errors import Refused
from gpubroker.transport.connection import TOKEN_VARIABLE, client_file

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from gpubroker.broker import Broker
    from gpubroker.cluster.fleet import Stats

_TASK_ID_LENGTH = len("task_") + 26
_TASKS_SEARCHED = 2000
_RETRY_SECONDS = 3.0
"""A person at a terminal would rather read that nothing answers than wait for a service to come back."""
_WATCH_SECONDS = 1.0
_PIPE_WIDTH = 1000
UNFINISHED = ("pending", "admitted", "running", "stopping")
UNFINISHED_LEASES = "pending,held,stopping,quarantined"


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"
    NDJSON = "ndjson"


Output = Annotated[Format, typer.Option("--output", "-o", help="Shape of what goes to standard output.")]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Show it again each second, until Ctrl-C.")]
_WORDS = (
    "a unique name, 8 or more characters of an id's beginning or end, or `last`: the newest you submitted "
    "from here"
)
TaskWord = Annotated[str, typer.Argument(metavar="TASK", help=f"Id, {_WORDS}.")]
_EACH = typer.Argument(metavar="TASK...", help=f"For each: id, {_WORDS}.")
TaskWords = Annotated[list[str], _EACH]
AnyTaskWords = Annotated[list[str] | None, _EACH]


@contextmanager
def broker_of(context: typer.Context, retry_seconds: float = _RETRY_SECONDS) -> Iterator["Broker"]:
    """The service named by the global options, or else found as the SDK finds it."""
    from gpubroker.broker import Broker

    chosen: Mapping[str, str | None] = context.find_root().params
    with Broker(chosen.get("url"), chosen.get("token"), retry_seconds=retry_seconds) as broker:
        try:
            yield broker
        except Refused as refused:
            if refused.code == "unauthenticated":
                refused.add_note(_about_token(broker.connection.url, chosen.get("token")))
            if refused.code == "task-not-finished":
                refused.add_note("wait for it: gpubroker result TASK --wait")
            raise


def _about_token(url: str, given: str | None) -> str:
    """Where the refused token came from; one of another service's data directory is the usual mistake."""
    variable = os.environ.get(TOKEN_VARIABLE)
    source = "--token" if given else TOKEN_VARIABLE if variable else str(client_file())
    return (
        f"it was sent to {url} and came from {source}; give another with --token or {TOKEN_VARIABLE}, or "
        "name the service's data directory in GPUBROKER_DATA_DIR"
    )


def task_id(broker: "Broker", word: str, *, to_change: bool = False) -> str:
    """The id of the task a person meant; leaves with 6 if in doubt.

    A name goes before a part of an id; what is going to be changed must not be both. Each time that a model
    comes into memory is a task of the model's name: its earlier ones are only meant where it has no other.
    `last` is a task of the person's own: to look at, any newest one will do where there is none, and to
    change it must be named then.
    """
    if word.startswith("task_") and len(word) == _TASK_ID_LENGTH:
        return word
    if word == "last":
        return _last(broker, to_change)
    named = list(islice(broker.list(name=word, limit=6), 6))
    if all(task.run.get("kind") == "model" for task in named):
        named = [task for task in named if not task.is_finished] or named[:1]
    found = [task.id for task in named]
    if may_be_of_id(word) and (to_change or not found):
        recent = islice(broker.list(limit=500), _TASKS_SEARCHED)
        found += [task.id for task in recent if is_of_id(task.id, word) and task.id not in found]
    return _only(found, word, "task is named")


def lease_id(broker: "Broker", word: str) -> str:
    """The id of the external lease a person meant, as `task_id`: its holder is its name.

    A holder's earlier leases, which have ended, are only meant where it has no other.
    """
    if word.startswith("task_") and len(word) == _TASK_ID_LENGTH:
        return word
    if held := [lease.id for lease in broker.leases(state=UNFINISHED_LEASES, holder=word)]:
        return _only(held, word, "lease is held by")
    recent = list(islice(broker.leases(), _TASKS_SEARCHED))
    found = [lease.id for lease in recent if lease.holder == word]
    return _only(
        found or [lease.id for lease in recent if is_of_id(lease.id, word)], word, "lease is held by"
    )


def _only(found: Sequence[str], word: str, nothing: str) -> str:
    match found:
        case [only]:
            return only
        case []:
            raise _doubt(
                f"no {nothing} {word!r}, and "
                + (
                    f"of the newest {_TASKS_SEARCHED} no id begins or ends so"
                    if may_be_of_id(word)
                    else f"of an id at least {SHOWN_ID_LENGTH} characters are needed, as lists show them"
                )
            )
    raise _doubt(
        f"{word!r} may be any of {', '.join(found[:5])}{' ...' if found[5:] else ''}; type one of them"
    )


def _last(broker: "Broker", to_change: bool) -> str:
    url = broker.connection.url
    if known := last_task.submitted(url):
        return known
    newest = next(broker.list(limit=1), None)
    if newest is None:
        raise _doubt("there is no task yet")
    if to_change:
        raise _doubt(
            f"`last` is what you submitted from here, and that is nothing yet; the newest task of {url} is "
            f"{newest.id}{f' ({newest.name})' if newest.name else ''}; if you mean it, type its id"
        )
    say(f"nothing was submitted from here yet; this is the newest task of {url}")
    return newest.id


def _doubt(message: str) -> typer.Exit:
    say(f"gpubroker: {message}")
    return typer.Exit(EXIT_REFUSED)


def may_be_of_id(word: str) -> bool:
    """Fewer characters than lists show would soon mean somebody else's task."""
    return len(word.removeprefix("task_")) >= SHOWN_ID_LENGTH


def is_of_id(task: str, word: str) -> bool:
    """Whether a word stands for this id by its beginning or its end."""
    return may_be_of_id(word) and (task.startswith((word, f"task_{word}")) or task.endswith(word))


def stats_if_allowed(broker: "Broker") -> "Stats | None":
    """For a hint only: who may not see the cluster goes without."""
    try:
        return broker.stats()
    except Refused:
        return None


def agree(question: str) -> None:
    """Back if the person says yes; leaves otherwise, and where nobody can be asked."""
    if not sys.stdin.isatty():
        say("gpubroker: nobody is there to confirm it; say --yes")
        raise typer.Exit(EXIT_USAGE)
    if not typer.confirm(question, err=True):
        raise typer.Exit(EXIT_REFUSED)


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
        show(draw(answer))
    else:
        typer.echo(json.dumps(answer.raw, indent=2 if output is Format.JSON else None))


def emit_all(output: Format, answers: Sequence[A], draw: Callable[[Sequence[A]], "RenderableType"]) -> None:
    """Write a list to standard output: one table, one JSON array, or one line of JSON each."""
    match output:
        case Format.TABLE:
            show(draw(answers))
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


def show(drawn: "RenderableType", *, error: bool = False) -> None:
    """Tables fill their lines up; what only a terminal would need is left out of pipes and files."""
    out = console(error=error)
    if out.is_terminal:
        out.print(drawn)
        return
    with out.capture() as captured:
        out.print(drawn)
    typer.echo("\n".join(line.rstrip() for line in captured.get().splitlines()), err=error)


def console(*, error: bool = False) -> "Console":
    """For tables. A pipe gets the full width, so that nothing is cut off for a program."""
    from rich.console import Console

    is_terminal = (sys.stderr if error else sys.stdout).isatty()
    width = None if is_terminal else _PIPE_WIDTH
    return Console(highlight=False, markup=False, width=width, stderr=error)
