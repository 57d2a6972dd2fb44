"""`gpubroker token create`, `list` and `revoke`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from gpubroker.cli import parsing
from gpubroker.cli.lookup import connect, listed_name
from gpubroker.cli.printing import Format, Output, emit, emit_all, eprint
from gpubroker.cli.tables import Column, PlainTable, timestamp

token = typer.Typer(help="Create, list and revoke tokens.", no_args_is_help=True)

_COLUMNS = (
    Column("NAME", share=0.3),
    Column("TENANT", share=0.2),
    Column("HIGHEST PRIORITY", from_width=80),
    Column("SCOPES", wraps=True),
    Column("EXPIRES"),
)

if TYPE_CHECKING:
    from gpubroker.wire.administration import Token


@token.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name to list and revoke it by.")],
    scope: Annotated[
        list[str],
        typer.Option(
            "--scope",
            "-s",
            help="tasks:read, tasks:write, tasks:code, tasks:command, cluster:read, cluster:write, "
            "metrics:read, models:infer, models:manage, secrets:use, secrets:write, admin, *; repeatable.",
        ),
    ],
    tenant: Annotated[str | None, typer.Option(help="Tenant whose tasks it reads and submits.")] = None,
    new_tenant: Annotated[
        bool, typer.Option("--new-tenant", help="Nobody has named that tenant yet.")
    ] = False,
    max_priority: Annotated[
        Any,
        typer.Option(
            help="Highest priority it may ask for: 0 to 100, or the name of a band.",
            metavar="PRIORITY",
            parser=parsing.priority,
        ),
    ] = None,
    expires: Annotated[
        float | None,
        typer.Option(parser=parsing.seconds, metavar="DURATION", help="Time for which the token is valid."),
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """Create a token and print its secret, which is shown only once."""
    with connect() as broker:
        created = broker.create_token(
            name,
            scopes=scope,
            tenant=tenant,
            new_tenant=new_tenant,
            max_priority=max_priority,
            expires_in_seconds=expires,
        )
        emit(output, created, lambda token: token.token or "")
        eprint(f"store it: it is not shown again; to revoke it: gpubroker token revoke {name}")


@token.command("list")
def list_(output: Output = Format.TABLE) -> None:
    """List all tokens, without their secrets."""
    with connect() as broker:
        emit_all(output, broker.tokens(), _tokens)


@token.command()
def revoke(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the token.")],
) -> None:
    """Make a token invalid at once."""
    with connect() as broker:
        known = listed_name(name, lambda: (token.name for token in broker.tokens()), "token")
        broker.revoke_token(known)
        eprint(f"token {known} is revoked")


def _tokens(listed: Sequence[Token]) -> RenderableType:
    rows = [
        (
            token.name,
            token.tenant,
            str(token.max_priority),
            " ".join(token.scopes),
            timestamp(token.expires_at) or "never",
        )
        for token in listed
    ]
    return PlainTable(_COLUMNS, rows)
