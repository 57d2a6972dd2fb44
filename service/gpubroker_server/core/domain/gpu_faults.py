"""Decide which signs say that a GPU needs a reset or a repair, and when these signs are gone."""

from typing import Final, NamedTuple

from msgspec import Struct

from gpubroker_server.core.domain.device import GpuHealth
from gpubroker_server.core.domain.units import DeviceKey, Instant

FAILURES: Final = "failures"
OPERATOR: Final = "operator"
"""FAILURES and OPERATOR are the causes of a closure that no driver reports."""

FATAL_XIDS: Final = {
    46: "the GPU stopped processing",
    48: "uncorrectable memory error (double bit ECC)",
    54: "auxiliary power is not connected",
    62: "an internal microcontroller halted",
    64: "a bad memory row could not be recorded for remapping",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    95: "uncontained memory error",
    109: "a context switch timed out",
    110: "security fault",
    119: "the GPU's system processor (GSP) does not answer",
    120: "error of the GPU's system processor (GSP)",
    136: "an event of the link training failed",
    140: "unrecovered ECC error",
    143: "the GPU could not be initialized",
}
"""XIDs after which NVIDIA's catalogue asks for a reset of the GPU, a reboot or a look at the hardware. XIDs
that applications cause (13, 31, 43, 45, 94 and others) are left out, because the next process can use the
GPU."""


class GpuFault(NamedTuple):
    cause: str
    """`xid`, `ecc`, `remap` or `recovery`."""
    detail: str
    """The number or words that tell this fault from other faults of the same cause."""
    words: str


def fault_of(health: GpuHealth) -> GpuFault | None:
    """Return the gravest sign that a GPU needs a reset or a repair; None if there is none."""
    if health.fatal_xid is not None:
        number = health.fatal_xid
        return GpuFault("xid", str(number), f"XID {number}: {FATAL_XIDS.get(number, 'see the catalogue')}")
    if health.recovery:
        return GpuFault("recovery", health.recovery, f"the driver asks for: {health.recovery}")
    if health.ecc_errors:
        return GpuFault("ecc", "", f"{health.ecc_errors} uncorrectable memory errors since the last reset")
    if health.remap_pending:
        return GpuFault("remap", "", "bad memory waits for a reset to be replaced (row remap pending)")
    return None


def is_mended(cause: str, health: GpuHealth) -> bool:
    """Return True if the driver says that the cause is gone; False also if the driver cannot tell. The driver
    reports an XID only once, so the end of an XID is known only from a driver that names the recovery
    action."""
    match cause:
        case "xid":
            return health.fatal_xid is None and health.recovery == ""
        case "recovery":
            return health.recovery == ""
        case "ecc":
            return health.ecc_errors == 0
        case "remap":
            return health.remap_pending is False
        case _:
            return False


class FailingGpu(Struct, frozen=True):
    """A device on which runs fail quickly, one after the other, while they work on other devices."""

    device: DeviceKey
    times: int
    names: tuple[str, ...]
    """The names of the failed tasks, the last one first."""
    first_at: Instant
    last_at: Instant
