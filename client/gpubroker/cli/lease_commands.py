"""The commands `gpubroker lease ask`, `run`, `list`, `show`, `renew` and `release`."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import RenderableType
from rich.text import Text

from gpubroker.cli import SHOWN_ID_LENGTH, parsing
from gpubroker.cli.child_process import ChildProcess
from gpubroker.cli.lookup import UNFINISHED_LEASES, connect, lease_id
from gpubroker.cli.printing import Format, Output, emit, emit_all, eprint
from gpubroker.cli.tables import Column, PlainTable, ago, details, short_id, size, timestamp, with_short_ids
from gpubroker.cli.tasks.submit import CommandAfterDashes, GpuMb, Gpus, Kinds, Priority
from gpubroker.errors import BrokerError

if TYPE_CHECKING:
    from gpubroker.leases.held_lease import HeldLease
    from gpubroker.leases.lease import LeaseOptions
    from gpubroker.wire.leases import Lease

lease = typer.Typer(
    help="Lease GPU memory for programs that the broker does not start.", no_args_is_help=True
)

_SECONDS = {"parser": parsing.seconds, "metavar": "DURATION"}

LeaseId = Annotated[
    str,
    typer.Argument(
        metavar="LEASE",
        help=f"Id, {SHOWN_ID_LENGTH} or more characters from the start or end of an id, or a holder's name.",
    ),
]
Holder = Annotated[str | None, typer.Option(help="Name of the holder. Default: this program.")]
Ttl = Annotated[
    Any,
    typer.Option("--ttl", help="The holder is asked to leave unless it renews within this time.", **_SECONDS),
]
Grace = Annotated[
    Any, typer.Option("--grace", help="Time that the holder has to leave after a notice.", **_SECONDS)
]
Pid = Annotated[
    int | None, typer.Option(help="Id of a process on the node; the memory it uses counts as the lease's.")
]
OnNode = Annotated[str | None, typer.Option("--node", help="Only on this node.")]
Devices = Annotated[list[str] | None, typer.Option("--device", help="Only this GPU, by UUID; repeatable.")]
Timeout = Annotated[Any, typer.Option("--timeout", help="Longest time to wait for the memory.", **_SECONDS)]


@lease.command()
def ask(
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
    """Ask for a lease and print its id. The lease must be renewed, also while it is pending."""
    options = _options(locals())
    with connect() as broker:
        asked = broker.ask_lease(**options)
        eprint(f"renew the lease within {asked.ttl_seconds:g} s: gpubroker lease renew {asked.id}")
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
    here: Annotated[
        bool,
        typer.Option(
            "--here", help="The node is this machine: memory that the command uses counts as the lease's."
        ),
    ] = False,
    node: OnNode = None,
    devices: Devices = None,
    kinds: Kinds = None,
    timeout: Timeout = None,
) -> None:
    """Run a command on this machine while it holds a lease, and exit with its exit code.

    The command finds its GPUs in CUDA_VISIBLE_DEVICES. Before its memory is
    given to others, the command gets SIGTERM, and SIGKILL after its grace period.
    Signals that this process gets are passed on to the command.

    \b
    gpubroker lease run --gpu-memory 20GiB --here -- vllm serve my/model
    """
    words: list[str] = context.obj or []
    if not words:
        raise typer.BadParameter("no command; write it after --: gpubroker lease run --gpus 1 -- COMMAND")
    if shutil.which(words[0]) is None:
        raise typer.BadParameter(f"no program {words[0]!r} on this machine")
    options = _options(locals())
    if here:
        options["pid"] = os.getpid()
    options.setdefault("holder", " ".join(words)[:200])
    child = ChildProcess()
    code = None
    with child.signals_passed_on(), connect() as broker:
        held = broker.lease(timeout_seconds=timeout, **options)
        try:
            with held:
                eprint(f"holding {held.id}: {', '.join(held.device_uuids)} on {held.node}")
                child.start(words, held.environment)
                threading.Thread(target=_end_on_notice, args=(child, held), daemon=True).start()
                code = child.wait()
        except (BrokerError, SystemExit) as fault:
            if code is None:
                raise
            _warn_not_released(held, fault)
    raise typer.Exit(code)


@lease.command("list")
def list_(
    everything: Annotated[bool, typer.Option("--all", "-a", help="Include ended leases.")] = False,
    sort: Annotated[
        str | None, typer.Option(help="submitted or priority; -priority: the highest first.")
    ] = None,
    all_tenants: Annotated[
        bool, typer.Option("--all-tenants", help="All tenants' leases; for admins.")
    ] = False,
    output: Output = Format.TABLE,
) -> None:
    """List leases that have not ended, newest first."""
    with connect() as broker:
        tenant = "*" if all_tenants else None
        found = broker.leases(state=None if everything else UNFINISHED_LEASES, sort=sort, tenant=tenant)
        emit_all(output, list(found), lambda listed: _leases(listed, has_tenants=all_tenants))


@lease.command()
def show(lease: LeaseId, output: Output = Format.TABLE) -> None:
    """Show one lease: its memory, when to renew it, and whether its holder is asked to leave."""
    with connect() as broker:
        emit(output, broker.get_lease(lease_id(broker, lease)), _lease)


@lease.command()
def renew(lease: LeaseId, ttl_seconds: Ttl = None, output: Output = Format.TABLE) -> None:
    """Renew a lease for another TTL."""
    with connect() as broker:
        emit(output, broker.renew_lease(lease_id(broker, lease), ttl_seconds), _lease)


@lease.command()
def release(lease: LeaseId, output: Output = Format.TABLE) -> None:
    """Release a lease, which frees its memory, or withdraw one that is pending."""
    with connect() as broker:
        emit(output, broker.release_lease(lease_id(broker, lease)), _lease)


def _options(given: dict[str, Any]) -> LeaseOptions:
    """Return the given parameters of a command that the SDK takes under the same name."""
    from gpubroker.leases.lease import LeaseOptions as SdkOptions

    names = SdkOptions.__annotations__
    return cast("LeaseOptions", {name: given[name] for name in names if given.get(name) not in (None, [])})


def _end_on_notice(child: ChildProcess, held: HeldLease) -> None:
    held.wait_for_notice()
    if held.notice is not None and not child.has_ended.is_set():
        why = f": {held.fault.detail}" if held.fault else ""
        eprint(
            f"the lease must be released ({held.notice.cause or held.notice.reason}{why}); ending the command"
        )
        child.end(held.lease.grace_seconds * 0.8)


def _warn_not_released(held: HeldLease, fault: BrokerError | SystemExit) -> None:
    cause = "interrupted" if isinstance(fault, SystemExit) else fault
    eprint(f"gpubroker: the command has ended, but its lease was not released: {cause}")
    if held.lease.pid is None:
        eprint(
            f"the memory of the lease counts as used until you release it: gpubroker lease release {held.id}"
        )
    else:
        eprint("the lease ends by itself when the service sees that this process is gone")


_COLUMNS = (
    Column("LEASE"),
    Column("HOLDER", share=0.3),
    Column("STATE"),
    Column("PRIORITY", from_width=90),
    Column("MEMORY"),
    Column("NODE", from_width=70),
    Column("SINCE", from_width=90),
    Column("NOTE", wraps=True),
)
_STYLES = {
    "pending": "yellow",
    "held": "green",
    "stopping": "magenta",
    "quarantined": "bold red",
}


def _leases(listed: Sequence[Lease], *, has_tenants: bool = False) -> RenderableType:
    columns = (_COLUMNS[0], Column("TENANT"), *_COLUMNS[1:]) if has_tenants else _COLUMNS
    rows: list[Sequence[str | Text]] = [
        (
            short_id(lease.id),
            *([lease.tenant] if has_tenants else []),
            lease.holder,
            _state(lease),
            f"{lease.priority} {lease.band}",
            _memory(lease),
            lease.node or "",
            ago(lease.held_at or lease.requested_at),
            _note(lease),
        )
        for lease in listed
    ]
    return PlainTable(columns, rows) if rows else Text("no leases")


def _lease(shown: Lease) -> RenderableType:
    rows: dict[str, object] = {
        "id": shown.id,
        "holder": shown.holder,
        "state": _state(shown),
        "why": _note(shown),
        "priority": f"{shown.priority} {shown.band}",
        "memory": _memory(shown),
        "node": shown.node,
        "GPUs": ", ".join(f"{device.uuid} {size(device.gpu_mb)}" for device in shown.devices),
        "process": shown.pid,
        "held": timestamp(shown.held_at),
        "ended": timestamp(shown.ended_at),
    }
    if shown.state in ("pending", "held"):
        rows["renew by"] = timestamp(shown.deadline_at)
    return details(rows.items())


def _state(lease: Lease) -> Text:
    return Text(str(lease.raw.get("state", "")), style=_STYLES.get(lease.state, ""))


def _memory(lease: Lease) -> str:
    memory = size(lease.gpu_mb) if lease.gpu_mb else "whole"
    return f"{lease.gpus} × {memory}" if lease.gpus > 1 else memory


def _note(lease: Lease) -> str:
    if lease.notice:
        why = lease.notice.cause or lease.notice.reason
        return f"must be released ({why}) by {timestamp(lease.notice.deadline_at)}"
    if lease.error:
        return lease.error.message
    return with_short_ids(lease.pending.message) if lease.pending else ""
