"""`gpubroker idle-template create`, `list` and `delete`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from gpubroker.cli.lookup import connect, listed_name
from gpubroker.cli.printing import Format, Output, emit_all, eprint
from gpubroker.cli.tables import Column, PlainTable

if TYPE_CHECKING:
    from gpubroker.wire.fleet import IdleTemplate

idle_template = typer.Typer(
    help="Create, list and delete templates of tasks that fill idle GPUs.", no_args_is_help=True
)

_COLUMNS = (
    Column("NAME", share=0.3),
    Column("WEIGHT"),
    Column("RUNNING"),
    Column("WAITING"),
    Column("MADE BY", from_width=80),
    Column("STATE", wraps=True),
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the template.")]


@idle_template.command()
def create(
    name: Name,
    file: Annotated[
        str,
        typer.Argument(metavar="FILE", help="A task as JSON, as POST /tasks takes it; - is standard input."),
    ],
    max_running: Annotated[int, typer.Option(min=1, help="The most of its tasks that run at once.")],
    weight: Annotated[int, typer.Option(min=1, help="Templates share what is idle in proportion to it.")] = 1,
) -> None:
    """Have such tasks submitted as long as GPUs are idle, one for each, at the lowest priority.

    It needs the scope cluster:write, and stops with the token that made it.
    """
    task = _task_in(file)
    with connect() as broker:
        broker.create_idle_template(name, task, max_running=max_running, weight=weight)
        eprint(f"idle template {name} is made; its tasks are named idle/{name}")


@idle_template.command("list")
def list_(output: Output = Format.TABLE) -> None:
    """List your tenant's idle templates, and how many of their tasks run."""
    with connect() as broker:
        emit_all(output, broker.idle_templates(), _table)


@idle_template.command()
def delete(name: Name) -> None:
    """Delete an idle template. Its tasks that run go on."""
    with connect() as broker:
        known = listed_name(name, lambda: (one.name for one in broker.idle_templates()), "idle template")
        broker.delete_idle_template(known)
        eprint(f"idle template {known} is deleted")


def _task_in(file: str) -> dict[str, Any]:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        task = json.loads(text)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"cannot read a task from {file}: {error}") from None
    if not isinstance(task, dict):
        raise typer.BadParameter(f'{file} has no task; write {{"run": {{"entrypoint": "module:function"}}}}')
    return task


def _table(listed: Sequence[IdleTemplate]) -> RenderableType:
    rows = [
        (
            template.name,
            str(template.weight),
            f"{template.running} of {template.max_running}",
            str(template.waiting),
            template.made_by,
            f"stopped: {template.stopped}" if template.stopped else "active",
        )
        for template in listed
    ]
    return (
        PlainTable(_COLUMNS, rows)
        if rows
        else "no idle templates; see: gpubroker idle-template create --help"
    )
