"""Commands for administrators: token create, list and revoke."""

from typing import Annotated

import typer

from gpubroker.cli import quantities
from gpubroker.cli.session import Format, Output, broker_of, emit, emit_all, say

token = typer.Typer(help="Who may do what.", no_args_is_help=True)


@token.command()
def create(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Under which it is listed and revoked.")],
    scope: Annotated[
        list[str],
        typer.Option(
            "--scope",
            "-s",
            help="tasks:read, tasks:write, tasks:code, tasks:command, cluster:read, cluster:write, "
            "metrics:read, models:infer, models:manage, admin, *; repeatable.",
        ),
    ],
    tenant: Annotated[str | None, typer.Option(help="Whose tasks it sees and submits.")] = None,
    max_priority: Annotated[int | None, typer.Option(help="Highest priority it may ask for.")] = None,
    expires: Annotated[
        float | None,
        typer.Option(parser=quantities.seconds, metavar="DURATION", help="How long it is good for."),
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """Make a token and print its secret, which is shown this once."""
    with broker_of(context) as broker:
        made = broker.create_token(
            name, scopes=scope, tenant=tenant, max_priority=max_priority, expires_in_seconds=expires
        )
        emit(output, made, lambda token: token.token or "")
        say(f"keep it safe: it is not shown again; revoke it with: gpubroker token revoke {name}")


@token.command("list")
def list_(context: typer.Context, output: Output = Format.TABLE) -> None:
    """All tokens, without their secrets."""
    from gpubroker.cli import draw

    with broker_of(context) as broker:
        emit_all(output, broker.tokens(), draw.tokens)


@token.command()
def revoke(context: typer.Context, name: str) -> None:
    """Make a token worthless at once."""
    with broker_of(context) as broker:
        broker.revoke_token(name)
        say(f"token {name} is revoked")


def add_to(app: typer.Typer) -> None:
    app.add_typer(token, name="token", rich_help_panel="Administration")
