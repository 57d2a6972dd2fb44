"""Memory in quarantine: its holder, and the proofs that end the quarantine."""

from typing import Annotated

from msgspec import Meta

from gpubroker.wire.answered import Answered, Time


class Awaited(Answered, frozen=True):
    """The proofs that end the quarantine of memory whose holder is not confirmed to be gone."""

    quarantined_at: Time
    awaits: Annotated[
        tuple[str, ...],
        Meta(
            description="Any of these proofs ends it, the likeliest first: process_absent, agent_restarted, "
            "boot_changed, device_removed, released (by its holder) or statement (of an operator)."
        ),
    ]
    message: str


class QuarantinedDevice(Answered, frozen=True):
    uuid: str
    index: int
    gpu_mb: int
    measured_mb: Annotated[int, Meta(description="The memory that its processes used when last measured.")]


class Quarantined(Awaited, frozen=True):
    """A run, or another holder, that counts as present.

    `id` and `name` are null for other tenants' holders, unless the token may release them or is an admin's.
    """

    id: str | None
    name: str | None
    kind: Annotated[str, Meta(description="One of run, gang_member and external.")]
    tenant: str
    attempt: int
    rank: int
    node: str
    node_ready: Annotated[bool, Meta(description="True if the node's agent answers.")]
    gpu_mb: int
    devices: tuple[QuarantinedDevice, ...]


class Released(Answered, frozen=True):
    """A holder that an operator has stated to be gone."""

    id: str
    gpu_mb: Annotated[int, Meta(description="The memory of all its devices together.")]
    devices: Annotated[tuple[str, ...], Meta(description="The UUIDs of these devices.")]
    quarantine: Annotated[
        tuple[Quarantined, ...], Meta(description="The part of it that is still in quarantine.")
    ]


class HeldBack(Answered, frozen=True):
    """Silent nodes that the leader does not give up."""

    message: Annotated[str, Meta(description="The reason why it is paused; otherwise empty.")]
    nodes: Annotated[tuple[str, ...], Meta(description="The nodes that are silent, and not given up.")]
    runs: Annotated[
        int,
        Meta(description="The number of runs on these nodes, and on those that were given up just before."),
    ]
    of_runs: int


class Detection(HeldBack, frozen=True):
    """The state of the leader's detection of lost nodes."""

    state: Annotated[str, Meta(description="One of watching and paused.")]
    since: Annotated[Time | None, Meta(description="The time of the pause, while it is paused.")]
