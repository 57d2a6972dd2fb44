"""`gpubroker quarantine`, `quarantine release`, `pause` and `resume`: what waits for an operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from gpubroker.cli.lookup import connect
from gpubroker.cli.printing import Format, Output, confirm, emit, emit_all, eprint
from gpubroker.cli.tables import Column, PlainTable, ago, short_id, size
from gpubroker.tasks.naming import begins_as_cut, matches, only

if TYPE_CHECKING:
    from gpubroker.broker import Broker
    from gpubroker.wire.quarantine import Quarantined, Released
    from gpubroker.wire.queues import Queue

quarantine = typer.Typer(help="List memory that counts as used because its holder is not confirmed gone.")

Because = Annotated[
    str, typer.Option(metavar="REASON", help="The checks that you made; recorded with your token's name.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


@quarantine.callback(invoke_without_command=True)
def list_(context: typer.Context, output: Output = Format.TABLE) -> None:
    """List memory that counts as used because its holder is not confirmed gone, and what it waits for."""
    if context.invoked_subcommand is None:
        with connect() as broker:
            emit_all(output, broker.quarantine().items, _quarantined)


@quarantine.command()
def release(
    holder: Annotated[
        str, typer.Argument(metavar="TASK", help="Id, end of an id as listed, or unique name.")
    ],
    because: Because,
    attempt: Annotated[list[int], typer.Option(help="Only this attempt; repeatable.")] = [],  # noqa: B006  # typer copies it
    rank: Annotated[list[int], typer.Option(help="Only this rank of a gang; repeatable.")] = [],  # noqa: B006
    device: Annotated[list[str], typer.Option(help="Only this GPU, by UUID; repeatable.")] = [],  # noqa: B006
    yes: Yes = False,
    output: Output = Format.TABLE,
) -> None:
    """Release quarantined memory: state that the processes of a task or lease are gone.

    Use it if no agent can prove that, as for a machine that does not come back.
    The service does not check the statement.
    """
    with connect() as broker:
        found = _found(broker, holder)
        if not yes:
            _confirm(found, because)
        # Release only what was shown, not what came later.
        attempts = attempt or sorted({run.attempt for run in found})
        released = broker.release_quarantine(
            found[0].id or holder, because, attempts=attempts, ranks=rank, devices=device
        )
        emit(output, released, _released)


Tenant = Annotated[str | None, typer.Option(help="The queue of this tenant.")]
Stream = Annotated[str | None, typer.Option(help="The queue of this work stream.")]
Why = Annotated[
    str | None,
    typer.Option("--because", metavar="REASON", help="The reason; recorded with your token's name."),
]


def pause(
    tenant: Tenant = None,
    stream: Stream = None,
    because: Why = None,
    output: Output = Format.TABLE,
) -> None:
    """Let nothing of a tenant, or of a work stream, start. What runs goes on."""
    if (tenant is None) is (stream is None):
        raise typer.BadParameter("give either --tenant or --stream")
    with connect() as broker:
        emit(output, broker.pause_queue(tenant=tenant, stream=stream, reason=because or ""), _queue)


def resume(
    tenant: Tenant = None,
    stream: Stream = None,
    because: Why = None,
    output: Output = Format.TABLE,
) -> None:
    """End the pause of a tenant or of a work stream; or declare nodes lost that fell silent together.

    Without --tenant and --stream it is about silent nodes, and --because is needed: their tasks start
    elsewhere. The service does not give them up by itself, because the fault may be its own. Runs that are
    still alive there are stopped when their node answers again.
    """
    if tenant is not None and stream is not None:
        raise typer.BadParameter("give either --tenant or --stream")
    if tenant is None and stream is None and because is None:
        raise typer.BadParameter("give --tenant or --stream; or, for silent nodes, --because")
    with connect() as broker:
        if tenant is not None or stream is not None:
            emit(output, broker.resume_queue(tenant=tenant, stream=stream, reason=because or ""), _queue)
            return
        resumed = broker.resume(because or "")
        eprint(f"you have stated that they are lost, because {because!r}")
        emit(output, resumed, lambda shown: f"given up unless they answer first: {', '.join(shown.nodes)}")


def _queue(queue: Queue) -> str:
    paused = queue.paused
    name = queue.queue.replace(":", " ", 1)
    if paused is None:
        return f"{name} is not paused"
    return f"{name} is paused since {paused.since} by {paused.by}; tasks that wait: {paused.waiting}"


def _found(broker: Broker, word: str) -> Sequence[Quarantined]:
    """Return all quarantined runs of the holder that a person means."""
    runs = [run for run in broker.quarantine().items if run.id and _is_meant(run, word)]
    ids = sorted({run.id for run in runs if run.id})
    only(ids, word, f"nothing of {word!r} is in quarantine; see: gpubroker quarantine")
    return runs


def _is_meant(run: Quarantined, word: str) -> bool:
    is_named = run.name == word or begins_as_cut(run.name, word)
    return is_named or (run.id is not None and matches(run.id, word))


def _confirm(runs: Sequence[Quarantined], because: str) -> None:
    eprint(f"You state that these are gone, because {because!r}:")
    for run in runs:
        name = f"{run.id} {run.name}".rstrip()
        eprint(f"  every process of {name}, attempt {_attempt(run)}, on {run.node}: {size(run.gpu_mb)}")
    eprint("The service does not check it. If one is alive, other tasks get memory that it still uses.")
    confirm("Release this memory?")


def _attempt(run: Quarantined) -> str:
    return f"{run.attempt} rank {run.rank}" if run.kind == "gang_member" else str(run.attempt)


_COLUMNS = (
    Column("ID"),
    Column("NAME", share=0.2),
    Column("ATTEMPT"),
    Column("NODE", share=0.2),
    Column("MEMORY"),
    Column("SINCE"),
)


def _quarantined(listed: Sequence[Quarantined]) -> RenderableType:
    rows = [
        (
            run.id or f"(tenant {run.tenant})",
            run.name or "",
            _attempt(run),
            run.node,
            size(run.gpu_mb),
            ago(run.quarantined_at),
        )
        for run in listed
    ]
    if not rows:
        return Text("nothing is in quarantine")
    # Below the table, because a message needs more cells than the other columns leave of 80.
    waits = (Text(f"! {run.name or short_id(run.id)}: {run.message}") for run in listed)
    return Group(PlainTable(_COLUMNS, rows), *waits)


def _released(released: Released) -> RenderableType:
    text = f"released {size(released.gpu_mb)} of {released.id}; it is free after the next measurement"
    remaining_mb = sum(run.gpu_mb for run in released.quarantine)
    return Text(f"{text}; still in quarantine: {size(remaining_mb)}" if released.quarantine else text)
