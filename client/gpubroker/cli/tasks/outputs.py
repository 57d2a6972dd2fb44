"""`gpubroker outputs`: the files that a task's runs have left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from gpubroker.cli.lookup import TaskWord, WorkerId, connect, task_id
from gpubroker.cli.printing import Format, Output, emit, eprint, show
from gpubroker.cli.tables import Column, PlainTable, size_of_bytes, timestamp

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gpubroker.wire.outputs import Outputs

_COLUMNS = (
    Column("ATTEMPT"),
    Column("RANK"),
    Column("FILES"),
    Column("SIZE"),
    Column("COLLECTED"),
    Column("NOTE"),
)


def outputs(
    task: TaskWord,
    directory: Annotated[
        Path | None, typer.Option("--directory", "-d", metavar="DIR", help="Write the files below it.")
    ] = None,
    attempt: Annotated[int | None, typer.Option(help="Of this attempt. Default: the last one.")] = None,
    worker: WorkerId = None,
    output: Output = Format.TABLE,
) -> None:
    """List what was collected of the files of a task (submit --outputs), or download them with -d.

    \b
    gpubroker submit --upload --outputs 'runs/**' --wait -- python train.py
    gpubroker outputs last -d results"""
    with connect() as broker:
        found = task_id(broker, task)
        if directory is None:
            emit(output, broker.task_outputs(found, worker=worker), _table)
            return
        for path in broker.download_outputs(found, directory, attempt=attempt, worker=worker):
            show(str(path))
        eprint(f"the files are in {directory}")


def _table(seen: Outputs) -> RenderableType:
    rows = [
        (
            str(one.attempt),
            str(one.rank),
            str(one.files),
            size_of_bytes(one.size_bytes),
            timestamp(one.collected_at) if one.collected_at else one.state,
            one.message,
        )
        for one in seen.items
    ]
    if not rows:
        return Text(_nothing(seen.patterns))
    return PlainTable(_COLUMNS, rows)


def _nothing(patterns: Sequence[str]) -> str:
    if not patterns:
        return "the task collects no files; name some at the submit, such as --outputs 'runs/**'"
    return f"no files of a run that has ended match {', '.join(patterns)}"
