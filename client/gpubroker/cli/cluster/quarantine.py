"""Commands about memory whose holders nobody can confirm to be gone: quarantine, quarantine release."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from gpubroker.cli import EXIT_REFUSED
from gpubroker.cli.layout import size
from gpubroker.cli.session import Format, Output, agree, broker_of, emit, emit_all, is_of_id, say

if TYPE_CHECKING:
    from gpubroker.broker import Broker
    from gpubroker.cluster.quarantine import Quarantined

quarantine = typer.Typer(help="Memory whose holder nobody can confirm to be gone.")


@quarantine.callback(invoke_without_command=True)
def list_(context: typer.Context, output: Output = Format.TABLE) -> None:
    """Memory whose holder nobody can confirm to be gone: since when, and which proof it waits for."""
    from gpubroker.cli.cluster import draw_quarantine

    if context.invoked_subcommand is None:
        with broker_of(context) as broker:
            emit_all(output, broker.quarantine().items, draw_quarantine.quarantined)


@quarantine.command()
def release(
    context: typer.Context,
    holder: Annotated[
        str, typer.Argument(metavar="TASK", help="Id, the end of one as listed, or a unique name.")
    ],
    because: Annotated[
        str, typer.Option(metavar="REASON", help="What you looked at. It is kept with your token's name.")
    ],
    attempt: Annotated[list[int], typer.Option(help="Only this one; repeatable.")] = [],  # noqa: B006  # typer copies it
    rank: Annotated[list[int], typer.Option(help="Only this one of a gang; repeatable.")] = [],  # noqa: B006
    device: Annotated[list[str], typer.Option(help="Only this one, by UUID; repeatable.")] = [],  # noqa: B006
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    output: Output = Format.TABLE,
) -> None:
    """State that the processes of a task, or an external lease, are gone: its memory is given back.

    For what no agent can prove, such as a machine that does not come back. Nobody checks it.
    """
    from gpubroker.cli.cluster import draw_quarantine

    with broker_of(context) as broker:
        found = _meant(broker, holder)
        if not yes:
            _confirm(found, because)
        # What was shown, and nothing that has come since.
        attempts = attempt or sorted({one.attempt for one in found})
        released = broker.release_quarantine(
            found[0].id, because, attempts=attempts, ranks=rank, devices=device
        )
        emit(output, released, draw_quarantine.released)


def _meant(broker: "Broker", word: str) -> Sequence["Quarantined"]:
    """All runs in quarantine of the one holder a person meant."""
    listed = broker.quarantine().items
    found = [one for one in listed if one.id and (is_of_id(one.id, word) or one.name == word)]
    if len({one.id for one in found}) == 1:
        return found
    if found:
        say(f"gpubroker: {word!r} may be any of {', '.join(sorted({one.id for one in found}))}")
    else:
        say(f"gpubroker: nothing of {word!r} is in quarantine; see: gpubroker quarantine")
    raise typer.Exit(EXIT_REFUSED)


def _confirm(found: Sequence["Quarantined"], because: str) -> None:
    say(f"You state that these are gone, because {because!r}:")
    for one in found:
        rank = f" rank {one.rank}" if one.kind == "gang_member" else ""
        who = f"{one.id} {one.name}".rstrip()
        say(f"  every process of {who}, attempt {one.attempt}{rank}, on {one.node}: {size(one.gpu_mb)}")
    say("Nobody checks it. If one of them lives, others are given memory that it still uses.")
    agree("Give this memory back?")


def add_to(app: typer.Typer) -> None:
    app.add_typer(quarantine, name="quarantine", rich_help_panel="Cluster")
