"""GPU memory as a bar of characters: who leased what, what is used, and what nobody leased."""

from dataclasses import dataclass

from gpubroker.cluster.fleet import Gpu

LEGEND = (
    "█ leased and used  ▒ leased, not yet used  ▓ freed and kept for a waiting task  ░ free  ! not leased"
)


@dataclass(frozen=True, slots=True)
class Shares:
    """MiB of one device, split so that the parts add up to the whole."""

    used: int
    reserved: int
    pledged: int
    foreign: int
    free: int


def shares(gpu: Gpu) -> Shares:
    """Foreign memory is what processes without a lease use, and what nothing explains."""
    foreign = min(gpu.foreign_mb + gpu.unaccounted_mb, gpu.physical_mb)
    leased = min(gpu.leased_mb, gpu.physical_mb - foreign)
    used = min(leased, max(0, gpu.used_mb - foreign))
    pledged = min(sum(pledge.arrived_mb for pledge in gpu.pledges), gpu.physical_mb - foreign - leased)
    free = gpu.physical_mb - foreign - leased - pledged
    return Shares(used, leased - used, pledged, foreign, free)


def bar(gpu: Gpu, width: int = 24) -> str:
    """The device's memory in `width` characters, in the order of the legend, free space before the rest.

    Whatever is there at all gets at least one character, taken from the longest part.
    """
    part = shares(gpu)
    whole = max(1, gpu.physical_mb)
    signs = {"█": part.used, "▒": part.reserved, "▓": part.pledged, "░": part.free, "!": part.foreign}
    cells = {sign: max(mb > 0, round(mb * width / whole)) for sign, mb in signs.items()}
    while (surplus := sum(cells.values()) - width) != 0:
        longest = max(cells, key=lambda sign: cells[sign])
        cells[longest] -= 1 if surplus > 0 else -1
    return "".join(sign * count for sign, count in cells.items())
