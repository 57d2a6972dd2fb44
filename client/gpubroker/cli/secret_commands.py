"""`gpubroker secrets set`, `list` and `delete`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from gpubroker.cli.lookup import connect
from gpubroker.cli.printing import Format, Output, emit_all, eprint
from gpubroker.cli.tables import Column, PlainTable

if TYPE_CHECKING:
    from gpubroker.wire.administration import Secret

secrets = typer.Typer(
    help="Set, list and delete secrets, which tasks name in their env: NAME=secret:NAME.",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the secret.")]


@secrets.command("set")
def set_(name: Name) -> None:
    """Set a secret of your tenant, from standard input, or as you type it without an echo.

    Its text is never an argument: others could read it in the list of processes.
    """
    text = _typed(name) if sys.stdin.isatty() else sys.stdin.read().removesuffix("\n")
    with connect() as broker:
        broker.set_secret(name, text)
        eprint(f"secret {name} is set; a task gets it with: gpubroker submit --env {name}=secret:{name} ...")


@secrets.command("list")
def list_(output: Output = Format.TABLE) -> None:
    """List the names of your tenant's secrets."""
    with connect() as broker:
        emit_all(output, broker.secrets(), _names)


@secrets.command()
def delete(name: Name) -> None:
    """Delete a secret. Tasks that name it and have not started fail at their start."""
    with connect() as broker:
        broker.delete_secret(name)
        eprint(f"secret {name} is deleted")


def _typed(name: str) -> str:
    text: str = typer.prompt(f"text of {name}", hide_input=True, err=True)
    return text


def _names(listed: Sequence[Secret]) -> RenderableType:
    return PlainTable((Column("NAME"),), [(secret.name,) for secret in listed])
