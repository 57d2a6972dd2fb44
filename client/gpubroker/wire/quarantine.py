"""Memory in quarantine: its holder, and which proofs end it."""

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
    measured_mb: Annotated[int, Meta(description="What its processes used when last measured.")]


class Quarantined(Awaited, frozen=True):
    """A run, or another holder, that counts as present.

    `id` and `name` are null for other tenants' holders, unless the token may release them or is an admin's.
    """

    id: str | None
    name: str | None
    kind: Annotated[str, Meta(description="run, gang_member or external.")]
    tenant: str
    attempt: int
    rank: int
    node: str
    node_ready: Annotated[bool, Meta(description="The node's agent answers.")]
    gpu_mb: int
    devices: tuple[QuarantinedDevice, ...]


class Released(Answered, frozen=True):
    """A holder that an operator has stated to be gone."""

    id: str
    gpu_mb: Annotated[int, Meta(description="Of all its devices together.")]
    devices: Annotated[tuple[str, ...], Meta(description="Their UUIDs.")]
    quarantine: Annotated[tuple[Quarantined, ...], Meta(description="What of it is still in quarantine.")]


class HeldBack(Answered, frozen=True):
    """Silent nodes that the leader does not give up."""

    message: Annotated[str, Meta(description="Why it is paused; otherwise empty.")]
    nodes: Annotated[tuple[str, ...], Meta(description="Silent, and not given up.")]
    runs: Annotated[int, Meta(description="On these nodes, and on those that were given up just before.")]
    of_runs: int


class Detection(HeldBack, frozen=True):
    """The state of the leader's detection of lost nodes."""

    state: Annotated[str, Meta(description="watching, or paused.")]
    since: Annotated[Time | None, Meta(description="While paused.")]
