"""Types for numbers and ids, so that MiB and bytes, or a fence and a version, are not confused."""

import re
from typing import NewType

MIB_BYTES = 2**20
DAY_SECONDS = 86_400

Mib = NewType("Mib", int)
Seconds = NewType("Seconds", float)
Instant = NewType("Instant", float)
"""Seconds since 1970-01-01T00:00:00Z by the database's clock."""

MonotonicSeconds = NewType("MonotonicSeconds", float)
"""Seconds by one machine's CLOCK_BOOTTIME: it never jumps and runs while the machine sleeps."""

TaskId = NewType("TaskId", str)
NodeName = NewType("NodeName", str)
DeviceKey = NewType("DeviceKey", str)
"""`cluster/node/uuid`. The key stays the same when Ray node ids change, a driver restarts or GPUs are
renumbered."""

Fence = NewType("Fence", int)
"""The number of a claim on a holder. It rises with each claim and is never reset; 0 if the holder was never
claimed."""

Term = NewType("Term", int)

Lineage = NewType("Lineage", int)
"""The number of one unbroken history of a database: 0 from the first migration on, later the seconds from
2025-01-01 to the beginning of the history. A database that has lost commits gets a new lineage, above all
earlier ones."""

Position = NewType("Position", int)
"""The place of an event in the log. Places are gap-free and in commit order; 0 is before the first event."""


def device_key(cluster: str, node: str, uuid: str) -> DeviceKey:
    return DeviceKey(f"{cluster}/{node}/{uuid}")


def node_key(node: NodeName) -> DeviceKey:
    """Return the key that stands in a pledge for the node itself: its CPU, host memory, run slots and custom
    resources."""
    return device_key("", node, "")


def node_of(device: DeviceKey) -> NodeName:
    """Return the node of a device, or of a `node_key`."""
    return NodeName(device.split("/", 2)[1])


def mark_of(holder: str, fence: Fence, rank: int) -> str:
    """Return the name of one process group in samples and on its node. Rank 0 is left out, since most holders
    have no other rank."""
    return f"{holder}:{fence}:{rank}" if rank else f"{holder}:{fence}"


def release_numbers(release: str) -> tuple[int, ...]:
    """Return the numbers by which releases are compared: '0.3.0.dev0' -> (0, 3, 0). An unknown release, an
    empty text, is before all others."""
    return tuple(map(int, re.findall(r"\d+", release)[:3]))


def in_gib(mb: float, *beside: float) -> str:
    """Return the text for a number of MiB, as GiB with one decimal: 18432 -> '18.0 GiB'. `beside` has sizes
    in MiB with which the reader compares it. If a different one of them would have the same text, the number
    stays in MiB."""
    text = f"{mb / 1024:.1f} GiB"
    looks_equal = any(other != mb and f"{other / 1024:.1f} GiB" == text for other in beside)
    return f"{mb:.0f} MiB" if looks_equal else text


def in_time(seconds: float) -> str:
    """Return the text for a number of seconds, in the unit that leaves a few digits: 36680 -> '10 h'."""
    for limit, size, unit in ((120.0, 1, "s"), (7_200.0, 60, "min"), (172_800.0, 3_600, "h")):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / DAY_SECONDS:.0f} d"
