"""Memory that counts as used because nobody can confirm that its holder is gone. See `tasks.task`."""

from dataclasses import dataclass, field
from datetime import datetime

from gpubroker.transport.decoding import Raw, each, filled


@dataclass(frozen=True, slots=True)
class QuarantinedDevice:
    uuid: str
    index: int = 0
    gpu_mb: int = 0
    measured_mb: int = 0
    """Used by its processes, when that was last measured."""
    raw: Raw = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Quarantined:
    """One run of a task, or an external lease. `id` and `name` are empty for what another tenant's token may
    not know."""

    id: str
    name: str
    kind: str
    """run, gang_member or external."""
    tenant: str
    attempt: int = 0
    rank: int = 0
    node: str = ""
    node_ready: bool = True
    gpu_mb: int = 0
    devices: tuple[QuarantinedDevice, ...] = ()
    quarantined_at: datetime | None = None
    awaits: tuple[str, ...] = ()
    """Any of these proofs ends it; the likeliest first."""
    message: str = ""
    """The same in words."""
    raw: Raw = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, raw: Raw) -> "Quarantined":
        return filled(cls, raw, devices=each(QuarantinedDevice, raw.get("devices")))


@dataclass(frozen=True, slots=True)
class Detection:
    """Whether silent nodes are given up. While it is paused, `nodes` are not."""

    state: str
    """watching or paused."""
    message: str = ""
    nodes: tuple[str, ...] = ()
    runs: int = 0
    of_runs: int = 0
    raw: Raw = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Released:
    """What was stated to be gone, and what of it is still in quarantine."""

    id: str
    gpu_mb: int = 0
    devices: tuple[str, ...] = ()
    """UUIDs."""
    quarantine: tuple[Quarantined, ...] = ()
    raw: Raw = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, raw: Raw) -> "Released":
        return filled(cls, raw, quarantine=each(Quarantined, raw.get("quarantine")))
