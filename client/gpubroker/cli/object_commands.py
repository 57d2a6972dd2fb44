"""`gpubroker upload`, `objects`, `objects download` and `objects delete`: data for tasks and inferences."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import copyfileobj
from tempfile import NamedTemporaryFile, TemporaryFile
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from gpubroker.cli import SHOWN_ID_LENGTH
from gpubroker.cli.lookup import change_each, connect
from gpubroker.cli.printing import Format, Output, emit, emit_all, eprint
from gpubroker.cli.tables import Column, PlainTable, ago, size_of_bytes, timestamp
from gpubroker.errors import Refused
from gpubroker.tasks.naming import is_part_of_id, matches, only

if TYPE_CHECKING:
    from gpubroker.broker import Broker
    from gpubroker.models.stored_object import StoredObject

objects = typer.Typer(help="List the objects that your tenant has uploaded.")

_WHOLE_ID = re.compile("[0-9a-f]{64}")
_COLUMNS = (Column("ID", share=0.45), Column("SIZE"), Column("CREATED"), Column("KEPT UNTIL"))


@objects.callback(invoke_without_command=True)
def list_(
    context: typer.Context,
    sort: Annotated[str, typer.Option(help="id, created or size; -size: the largest first.")] = "-created",
    output: Output = Format.TABLE,
) -> None:
    """List the objects that your tenant has uploaded, newest first, and their total size."""
    if context.invoked_subcommand is not None:
        return
    with connect() as broker:
        emit_all(output, list(broker.objects(sort=sort)), _objects)
        if output is Format.TABLE:
            usage = broker.object_usage()
            used, limit = size_of_bytes(usage.counted_bytes or 0), size_of_bytes(usage.most_bytes)
            eprint(f"your tenant uses {used} of {limit}")


@objects.command()
def delete(
    ids: Annotated[
        list[str],
        typer.Argument(
            metavar="ID",
            help=f"For each object: id, or {SHOWN_ID_LENGTH} or more characters from its start or end.",
        ),
    ],
) -> None:
    """Delete objects. Inferences that are queued keep their values; tasks that wait for one fail."""
    with connect() as broker:

        def delete_one(id: str) -> None:
            broker.delete_object(id)
            eprint(f"deleted {id}")

        try:
            found = _found(broker, ids)
        except Refused:
            eprint("nothing was deleted")
            raise
        change_each(found, delete_one)


@objects.command()
def download(
    id: Annotated[
        str,
        typer.Argument(
            metavar="ID", help=f"Id, or {SHOWN_ID_LENGTH} or more characters from its start or end."
        ),
    ],
    file: Annotated[
        Path, typer.Argument(metavar="FILE", allow_dash=True, help="File to write; `-` is standard output.")
    ],
) -> None:
    """Write the bytes of an object to a file, which is there once they are complete."""
    with connect() as broker:
        [whole_id] = _found(broker, [id])
        parts = broker.download(whole_id)
        if str(file) == "-":
            sys.stdout.buffer.writelines(parts)
            return
        with NamedTemporaryFile(dir=file.parent, prefix=".download-", delete=False) as new:
            try:
                new.writelines(parts)
                Path(new.name).replace(file)
            except BaseException:
                Path(new.name).unlink()
                raise
        eprint(f"{size_of_bytes(file.stat().st_size)} in {file}")


def upload(
    file: Annotated[
        typer.FileBinaryRead, typer.Argument(metavar="FILE", help="File to upload; `-` is standard input.")
    ],
    output: Output = Format.TABLE,
) -> None:
    """Upload a file as an object for tasks and queued inferences, and print its id."""
    with connect() as broker, TemporaryFile() as copy:
        if not file.seekable():  # a pipe, which a retry could not read again
            copyfileobj(file, copy)
        stored = broker.upload(file if file.seekable() else copy)
        emit(output, stored, lambda stored: stored.id)
        until = timestamp(stored.expires_at)
        eprint(f"{size_of_bytes(stored.size_bytes)}, kept until {until}; each use extends that")


def _found(broker: Broker, words: Sequence[str]) -> Sequence[str]:
    """Return the ids of all objects that a person means, before any object is deleted. Exit with 6 if a word
    is ambiguous."""
    if all(map(_WHOLE_ID.fullmatch, words)):
        return list(dict.fromkeys(words))
    known = [stored.id for stored in broker.objects()]
    return list(dict.fromkeys(_only(known, word) for word in words))


def _only(known: Sequence[str], word: str) -> str:
    if _WHOLE_ID.fullmatch(word):
        return word
    if is_part_of_id(word):
        if_none = f"no object's id begins or ends with {word!r}; see: gpubroker objects"
    else:
        if_none = f"{word!r} is too short: an id needs at least {SHOWN_ID_LENGTH} characters"
    return only([id for id in known if matches(id, word)], word, if_none)


def _objects(listed: Sequence[StoredObject]) -> RenderableType:
    rows = [
        (stored.id, size_of_bytes(stored.size_bytes), ago(stored.created_at), timestamp(stored.expires_at))
        for stored in listed
    ]
    return PlainTable(_COLUMNS, rows) if rows else Text("no objects")
