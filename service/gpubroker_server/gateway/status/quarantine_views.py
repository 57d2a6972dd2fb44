"""Memory whose holders nobody can confirm to be gone, as the API answers it."""

from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

Time = Annotated[str, Field(json_schema_extra={"format": "date-time"}, examples=["2026-11-21T10:02:11.412Z"])]
"""RFC 3339 in UTC, with Z."""


class AwaitedView(TypedDict):
    """What ends the quarantine of memory whose holder nobody can confirm to be gone."""

    quarantined_at: Time
    awaits: Annotated[
        list[str],
        Field(
            description="Any of these proofs: process_absent, agent_restarted, boot_changed, device_removed, "
            "released (by whoever holds it) or statement (of an operator); the likeliest first."
        ),
    ]
    message: str


class QuarantinedDevice(TypedDict):
    uuid: str
    index: int
    gpu_mb: int
    measured_mb: Annotated[int, Field(description="Used by its processes, when that was last measured.")]


class QuarantinedView(AwaitedView):
    """A run, or another holder, that counts as there. `id` and `name` are null for those of other tenants,
    unless an operator or an admin asks."""

    id: str | None
    name: str | None
    kind: Annotated[str, Field(description="run, gang_member or external.")]
    tenant: str
    attempt: int
    rank: int
    node: str
    node_ready: Annotated[bool, Field(description="Its agent answers.")]
    gpu_mb: int
    devices: list[QuarantinedDevice]
