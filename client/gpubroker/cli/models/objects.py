"""Commands about what was uploaded for queued inferences: upload, objects, objects delete."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from gpubroker.cli import EXIT_REFUSED, SHOWN_ID_LENGTH
from gpubroker.cli.layout import moment, size_of_bytes
from gpubroker.cli.session import (
    Format,
    Output,
    broker_of,
    emit,
    emit_all,
    is_of_id,
    may_be_of_id,
    say,
)
from gpubroker.errors import BrokerError

if TYPE_CHECKING:
    from gpubroker.broker import Broker
    from gpubroker.models.objects import StoredObject

objects = typer.Typer(help="What your tenant has uploaded for queued inferences.")

_WHOLE_ID = re.compile("[0-9a-f]{64}")


@objects.callback(invoke_without_command=True)
def list_(context: typer.Context, output: Output = Format.TABLE) -> None:
    """What your tenant has uploaded for queued inferences, newest first, and how much it counts."""
    from gpubroker.cli.models import draw_objects

    if context.invoked_subcommand is not None:
        return
    with broker_of(context) as broker:
        found = sorted(broker.objects(), key=_created, reverse=True)
        emit_all(output, found, draw_objects.objects)
        if output is Format.TABLE:
            usage = broker.object_usage()
            counted, most = size_of_bytes(usage.counted_bytes), size_of_bytes(usage.most_bytes)
            say(f"they count {counted} of the {most} that your tenant may have")


@objects.command()
def delete(
    context: typer.Context,
    ids: Annotated[
        list[str],
        typer.Argument(
            metavar="ID...", help="For each: id, or 8 or more characters of its beginning or end."
        ),
    ],
) -> None:
    """Delete objects, to make room. Inferences that were queued before have their values already."""
    with broker_of(context) as broker:
        found = _meant(broker, ids)
        for at, id in enumerate(found):
            try:
                broker.delete_object(id)
            except BrokerError as fault:
                if rest := found[at + 1 :]:
                    fault.add_note(f"after it these were not tried: {', '.join(rest)}")
                raise
            say(f"deleted {id}")


def upload(
    context: typer.Context,
    file: Annotated[
        typer.FileBinaryRead,
        typer.Argument(metavar="FILE", help="Its bytes as they are; `-`: what comes in."),
    ],
    output: Output = Format.TABLE,
) -> None:
    """Store the bytes of a file for queued inferences to name, and print the id."""
    with broker_of(context) as broker:
        stored = broker.upload(file.read())
        emit(output, stored, lambda stored: stored.id)
        say(f"{size_of_bytes(stored.size_bytes)}, kept until {moment(stored.expires_at)} or longer if used")


def _created(stored: "StoredObject") -> float:
    return stored.created_at.timestamp() if stored.created_at else 0.0


def _meant(broker: "Broker", words: Sequence[str]) -> Sequence[str]:
    """All that a person meant, before any is deleted; leaves with 6 if in doubt."""
    if all(map(_WHOLE_ID.fullmatch, words)):
        return list(dict.fromkeys(words))
    known = [kept.id for kept in broker.objects()]
    return list(dict.fromkeys(word if _WHOLE_ID.fullmatch(word) else _only(known, word) for word in words))


def _only(known: Sequence[str], word: str) -> str:
    found = [id for id in known if is_of_id(id, word)]
    if len(found) == 1:
        return found[0]
    if found:
        doubt = f"{word!r} may be any of {', '.join(found[:5])}{' ...' if found[5:] else ''}"
    elif may_be_of_id(word):
        doubt = f"no object's id begins or ends with {word!r}; see: gpubroker objects"
    else:
        doubt = f"of an id at least {SHOWN_ID_LENGTH} characters are needed, and {word!r} has fewer"
    say(f"gpubroker: {doubt}; nothing was deleted")
    raise typer.Exit(EXIT_REFUSED)


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel="Models")(upload)
    app.add_typer(objects, name="objects", rich_help_panel="Models")
