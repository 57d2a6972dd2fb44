"""The command that lets the leader go on where it has paused: resume."""

from typing import Annotated

import typer

from gpubroker.cli.session import Format, Output, agree, broker_of, emit, say


def resume(
    context: typer.Context,
    because: Annotated[
        str, typer.Option(metavar="REASON", help="What you looked at. It is kept with your token's name.")
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    output: Output = Format.TABLE,
) -> None:
    """State that nodes are lost which fell silent at once, so that their runs start elsewhere."""
    with broker_of(context) as broker:
        found = broker.stats().detection
        if not yes and found.get("state") == "paused":
            say(str(found.get("message")))
            say(f"You state that they are lost, because {because!r}.")
            say("Runs that live there after all are ended when their node is heard of again.")
            agree("Give these nodes up?")
        resumed = broker.resume(because)
        emit(output, resumed, lambda shown: f"given up unless heard of first: {', '.join(shown.nodes)}")


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel="Cluster")(resume)
