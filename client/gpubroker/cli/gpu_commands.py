"""`gpubroker gpus`, each GPU's memory as a bar with its holders; `close-gpu` and `reopen-gpu`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from gpubroker.cli.lookup import connect, stats_if_known
from gpubroker.cli.printing import Format, Output, Watch, emit, emit_all, watch
from gpubroker.cli.tables import duration, executor_in_words, gib, short_id, size
from gpubroker.cli.watching import Changes

if TYPE_CHECKING:
    from gpubroker.broker import Broker
    from gpubroker.wire.devices import Gpu, Holder

Which = Annotated[
    str, typer.Argument(metavar="GPU", help="Its UUID, or its node and number such as n1/gpu0.")
]
Because = Annotated[
    str, typer.Option(metavar="REASON", help="Shown with the GPU, and recorded with your token's name.")
]

_LEGEND = (
    "█ leased and used  ▒ leased, not yet used  ▓ freed and kept for a waiting task  ░ free  ! not leased"
)
_NAME_CELLS = 24
_WIDE = 100
"""The width from which a terminal shows all facts of a GPU on one line; a narrower one has a line for
each."""


def gpus(
    watching: Watch = False,
    idle: Annotated[bool, typer.Option("--idle", help="Only GPUs that have nothing to do.")] = False,
    output: Output = Format.TABLE,
) -> None:
    """Show GPU memory: leased, used, free, and used without a lease."""
    with connect() as broker:

        def found() -> Sequence[Gpu]:
            return broker.gpus(idle=idle or None).items

        def drawn(listed: Sequence[Gpu]) -> RenderableType:
            return GpuTable(listed) if listed else "no GPU is idle" if idle else _why_none(broker)

        if watching:
            changes = Changes(broker, ("lease.*", "pledge.*", "device.*", "node.*", "gpu.*"))
            watch(output, found, drawn, changes.wait)
        else:
            emit_all(output, found(), drawn)


def close_gpu(gpu: Which, because: Because = "", output: Output = Format.TABLE) -> None:
    """Start nothing new on a GPU. What runs there goes on."""
    with connect() as broker:
        emit(output, broker.close_gpu(gpu, because), _alone)


def reopen_gpu(gpu: Which, because: Because = "", output: Output = Format.TABLE) -> None:
    """Let tasks start on a GPU again, whoever has closed it.

    A fault that is still there closes it no more; another one does.
    """
    with connect() as broker:
        emit(output, broker.reopen_gpu(gpu, because), _alone)


def _alone(gpu: Gpu) -> GpuTable:
    return GpuTable([gpu])


def _why_none(broker: Broker) -> str:
    stats = stats_if_known(broker)
    if stats and stats.executor.state != "connected":
        return f"no GPUs yet: {executor_in_words(stats.executor)}"
    return "no GPUs; to try the service without one, set simulated_devices in its settings"


@dataclass(frozen=True, slots=True)
class GpuTable:
    """A table with one line per GPU below its node, and a bar of its memory."""

    listed: Sequence[Gpu]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        cells = min(24, max(8, options.max_width // 5))
        for node, group in groupby(self.listed, key=lambda gpu: gpu.node):
            devices = list(group)
            yield Text.assemble((node, "bold"), f"  {_totals(devices)}")
            table = Table.grid(padding=(0, 1, 0, 0))
            for fits in (True, True, False):
                table.add_column(no_wrap=fits, overflow="ellipsis" if fits else "fold")
            indexes = {gpu.uuid: gpu.index for gpu in devices}
            for gpu in devices:
                label = f"{gpu.index:>3} {gpu.kind:<10}"
                parent = f"instance of {indexes.get(gpu.parent, gpu.parent)}   " if gpu.parent else ""
                facts = "\n".join(_facts(gpu)) if options.max_width < _WIDE else "   ".join(_facts(gpu))
                table.add_row(label, Text(bar(gpu, cells), style="green"), Text(f"{parent}{facts}"))
            yield table
        yield Text(_LEGEND, style="dim")


def _totals(devices: Sequence[Gpu]) -> str:
    whole = [gpu for gpu in devices if not gpu.split]
    count = "1 GPU" if len(whole) == 1 else f"{len(whole)} GPUs"
    simulated = " (simulated)" if all(gpu.simulated for gpu in whole) else ""
    leased, used = gib(sum(gpu.leased_mb for gpu in whole)), gib(sum(gpu.used_mb or 0 for gpu in whole))
    physical = gib(sum(gpu.physical_mb for gpu in whole))
    return f"{count}{simulated}   leased {leased} · used {used} of {physical} GiB"


def _facts(gpu: Gpu) -> list[str]:
    if gpu.split:
        return ["split: its instances are leased"]
    stranded = f", {size(gpu.stranded_mb)} stranded" if gpu.stranded_mb else ""
    foreign = gpu.foreign_mb + gpu.unaccounted_mb
    facts = (
        f"{size(gpu.free_mb)} free of {gib(gpu.physical_mb)}{stranded}",
        " · ".join(map(_holder, gpu.holders)),
        " · ".join(
            f"{size(pledge.arrived_mb)} of {size(pledge.gpu_mb)} freed for {short_id(pledge.task or '')}"
            for pledge in gpu.pledges
        ),
        f"! {size(foreign)} used but not leased" if foreign else "",
        _use(gpu),
        " · ".join(_errors(gpu)),
        "" if gpu.present else "not in its machine",
        f"! closed: {gpu.closed.reason.removeprefix('closed ')}" if gpu.closed else "",
        f"! {gpu.fault}" if gpu.fault else "no recent measurement" if gpu.stale else "",
    )
    return [fact for fact in facts if fact]


def _use(gpu: Gpu) -> str:
    health = gpu.health
    watts, celsius = (health.power_watts, health.temperature_celsius) if health else (None, None)
    parts = (
        "" if gpu.utilization is None else f"{gpu.utilization:.0%} busy",
        "" if gpu.idle_seconds is None else f"idle for {duration(gpu.idle_seconds)}",
        "" if watts is None else f"{watts:.0f} W",
        "" if celsius is None else f"{celsius:.0f} °C",
    )
    return " · ".join(part for part in parts if part)


def _errors(gpu: Gpu) -> Iterator[str]:
    if gpu.health and gpu.health.ecc_errors:
        yield f"! {gpu.health.ecc_errors} ECC errors"
    if gpu.health and gpu.health.xid:
        yield f"! XID {gpu.health.xid}"


def _holder(holder: Holder) -> str:
    name = holder.name or short_id(holder.id or "")
    name = name if len(name) <= _NAME_CELLS else f"{name[: _NAME_CELLS - 1]}…"
    notes = (
        " (stopping)" if holder.stopping else " (ending)" if holder.state == "releasing" else "",
        f" (! in quarantine: {holder.quarantine.message})" if holder.quarantine else "",
        f" (! used {size(holder.overused_mb)})" if holder.overused_mb else "",
    )
    return f"{name} {size(holder.gpu_mb)}{''.join(notes)}"


@dataclass(frozen=True, slots=True)
class Parts:
    """MiB of one device, in parts that add up to the whole."""

    used: int
    reserved: int
    pledged: int
    foreign: int
    free: int


def parts_of(gpu: Gpu) -> Parts:
    """Return the parts of a device's memory. The foreign part is what processes without a lease use, and what
    nothing explains."""
    foreign = min(gpu.foreign_mb + gpu.unaccounted_mb, gpu.physical_mb)
    leased = min(gpu.leased_mb, gpu.physical_mb - foreign)
    used = min(leased, max(0, (gpu.used_mb or 0) - foreign))
    pledged = min(sum(pledge.arrived_mb for pledge in gpu.pledges), gpu.physical_mb - foreign - leased)
    free = gpu.physical_mb - foreign - leased - pledged
    return Parts(used, leased - used, pledged, foreign, free)


def bar(gpu: Gpu, width: int = 24) -> str:
    """Return a bar of the device's memory, `width` characters long, with free memory before the foreign part.

    Each part that is not zero has at least one character, taken from the longest part.
    """
    parts = parts_of(gpu)
    whole = max(1, gpu.physical_mb)
    signs = {"█": parts.used, "▒": parts.reserved, "▓": parts.pledged, "░": parts.free, "!": parts.foreign}
    cells = {sign: max(mb > 0, round(mb * width / whole)) for sign, mb in signs.items()}
    while (surplus := sum(cells.values()) - width) != 0:
        longest = max(cells, key=lambda sign: cells[sign])
        cells[longest] -= 1 if surplus > 0 else -1
    return "".join(sign * count for sign, count in cells.items())
