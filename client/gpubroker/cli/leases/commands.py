"""Commands for GPU memory of what the broker does not start: lease ask, run, list, show, renew, release."""

import os
import shutil
import threading
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from gpubroker.cli import quantities
from gpubroker.cli.leases.child import Leash
from gpubroker.cli.session import (
    UNFINISHED_LEASES,
    Format,
    Output,
    broker_of,
    emit,
    emit_all,
    lease_id,
    say,
)
from gpubroker.cli.tasks.submit import CommandAfterDashes, GpuMb, Gpus, Kinds, Priority
from gpubroker.errors import BrokerError

if TYPE_CHECKING:
    from gpubroker.leases.holding import HeldLease
    from gpubroker.leases.lease import LeaseOptions

lease = typer.Typer(help="External leases: memory for what the broker does not start.", no_args_is_help=True)

_SECONDS = {"parser": quantities.seconds, "metavar": "DURATION"}

LeaseId = Annotated[
    str,
    typer.Argument(
        metavar="LEASE", help="Its id, 8 or more characters of its beginning or end, or its holder."
    ),
]
Holder = Annotated[str | None, typer.Option(help="Who holds it, for people; else this program.")]
Ttl = Annotated[
    Any, typer.Option("--ttl", help="Who is not heard of for so long is asked to leave.", **_SECONDS)
]
Grace = Annotated[
    Any, typer.Option("--grace", help="Time to leave in when a higher priority needs the memory.", **_SECONDS)
]
Pid = Annotated[int | None, typer.Option(help="A process on that node: its use is the lease's.")]
OnNode = Annotated[str | None, typer.Option("--node", help="Only on this node.")]
Devices = Annotated[list[str] | None, typer.Option("--device", help="Only this GPU, by UUID; repeatable.")]
Patience = Annotated[Any, typer.Option("--timeout", help="Wait no longer for the memory.", **_SECONDS)]


@lease.command()
def ask(
    context: typer.Context,
    gpu_mb: GpuMb = None,
    gpus: Gpus = None,
    priority: Priority = None,
    holder: Holder = None,
    ttl_seconds: Ttl = None,
    grace_seconds: Grace = None,
    pid: Pid = None,
    node: OnNode = None,
    devices: Devices = None,
    kinds: Kinds = None,
    output: Output = Format.TABLE,
) -> None:
    """Ask for memory and print the lease's id. Renew it, also while it waits."""
    options = _options(locals())
    with broker_of(context) as broker:
        asked = broker.ask_lease(**options)
        say(f"renew it within {asked.ttl_seconds:g} s: gpubroker lease renew {asked.id}")
        emit(output, asked, lambda lease: lease.id)


@lease.command(cls=CommandAfterDashes)
def run(
    context: typer.Context,
    gpu_mb: GpuMb = None,
    gpus: Gpus = None,
    priority: Priority = None,
    holder: Holder = None,
    ttl_seconds: Ttl = None,
    grace_seconds: Grace = None,
    watched: Annotated[
        bool, typer.Option("--here", help="This machine is the node: what the command uses is the lease's.")
    ] = False,
    node: OnNode = None,
    devices: Devices = None,
    kinds: Kinds = None,
    timeout: Patience = None,
) -> None:
    """Run a command on this machine for as long as it may have the memory; its exit code is ours.

    It finds its GPUs in CUDA_VISIBLE_DEVICES. When the memory is needed elsewhere it gets SIGTERM, and
    SIGKILL when its time to leave is over. Signals to this process go to the command, and it ends with it.

    \b
    gpubroker lease run --gpu-memory 20GiB --here -- vllm serve my/model
    """
    words: list[str] = context.obj or []
    if not words:
        raise typer.BadParameter(
            "name the command behind two dashes: gpubroker lease run --gpus 1 -- COMMAND"
        )
    options = _options(locals())
    if watched:
        options["pid"] = os.getpid()
    if shutil.which(words[0]) is None:
        raise typer.BadParameter(f"there is no program {words[0]!r} that could be started")
    options.setdefault("holder", " ".join(words)[:200])
    leash = Leash()
    code = None
    with leash.held(), broker_of(context) as broker:
        held = broker.lease(timeout_seconds=timeout, **options)
        try:
            with held:
                say(f"holding {held.id}: {', '.join(held.device_uuids)} on {held.node}")
                leash.start(words, held.environment)
                threading.Thread(target=_mind, args=(leash, held), daemon=True).start()
                code = leash.wait()
        except (BrokerError, SystemExit) as fault:
            if code is None:
                raise
            _tell_what_is_left(held, fault)
    raise typer.Exit(code)


@lease.command("list")
def list_(
    context: typer.Context,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Those that have ended, too.")] = False,
    output: Output = Format.TABLE,
) -> None:
    """Leases, newest first: those that wait, are held, or were not given back."""
    from gpubroker.cli.leases import draw as draw_leases

    with broker_of(context) as broker:
        found = broker.leases(state=None if everything else UNFINISHED_LEASES)
        emit_all(output, list(found), draw_leases.leases)


@lease.command()
def show(context: typer.Context, lease: LeaseId, output: Output = Format.TABLE) -> None:
    """One lease: what it has, until when, and whether its holder is asked to leave."""
    from gpubroker.cli.leases import draw as draw_leases

    with broker_of(context) as broker:
        emit(output, broker.get_lease(lease_id(broker, lease)), draw_leases.lease)


@lease.command()
def renew(
    context: typer.Context, lease: LeaseId, ttl_seconds: Ttl = None, output: Output = Format.TABLE
) -> None:
    """Say that a lease is still needed."""
    from gpubroker.cli.leases import draw as draw_leases

    with broker_of(context) as broker:
        emit(output, broker.renew_lease(lease_id(broker, lease), ttl_seconds), draw_leases.lease)


@lease.command()
def release(context: typer.Context, lease: LeaseId, output: Output = Format.TABLE) -> None:
    """Say that a lease's memory is free, or that it is no longer wanted."""
    from gpubroker.cli.leases import draw as draw_leases

    with broker_of(context) as broker:
        emit(output, broker.release_lease(lease_id(broker, lease)), draw_leases.lease)


def _options(given: dict[str, Any]) -> "LeaseOptions":
    """Those of the command's parameters that the SDK takes under the same name."""
    from gpubroker.leases.lease import LeaseOptions as Known

    options = {name: given[name] for name in Known.__annotations__ if given.get(name) not in (None, [])}
    return cast("LeaseOptions", options)


def _mind(leash: Leash, held: "HeldLease") -> None:
    """Ask the command to leave when its lease has to be given back."""
    held.wait_for_notice()
    if held.notice is not None and not leash.is_over.is_set():
        why = f": {held.fault.detail}" if held.fault else ""
        say(f"the lease has to be given back ({held.notice.reason}{why}); ending the command")
        leash.end(held.lease.grace_seconds * 0.8)


def _tell_what_is_left(held: "HeldLease", fault: BrokerError | SystemExit) -> None:
    why = "interrupted" if isinstance(fault, SystemExit) else fault
    say(f"gpubroker: the command has ended, but its lease could not be given back: {why}")
    if held.lease.pid is None:
        say(f"its memory counts as used until you do: gpubroker lease release {held.id}")
    else:
        say("it ends by itself once the service sees that this process is gone")


def add_to(app: typer.Typer) -> None:
    app.add_typer(lease, name="lease", rich_help_panel="Tasks")
