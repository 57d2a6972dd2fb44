"""Memory in quarantine, as the API answers it: its holder, and which proofs end its quarantine."""

from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.core.lifecycle.quarantine import Quarantined, quarantined
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.http.times import Time, rfc3339


class AwaitedView(TypedDict):
    """What ends the quarantine of memory that has a holder which is not confirmed to be gone."""

    quarantined_at: Time
    awaits: Annotated[
        list[str],
        Field(
            description="Any of these proofs ends it, the likeliest first: process_absent, agent_restarted, "
            "boot_changed, device_removed, released (by its holder) or statement (of an operator)."
        ),
    ]
    message: str


class QuarantinedDevice(TypedDict):
    uuid: str
    index: int
    gpu_mb: int
    measured_mb: Annotated[int, Field(description="What its processes used when last measured.")]


class QuarantinedView(AwaitedView):
    """A run, or another holder, that counts as present. `id` and `name` are null for other tenants' holders,
    unless the token may release them or is an admin's."""

    id: str | None
    name: str | None
    kind: Annotated[str, Field(description="run, gang_member or external.")]
    tenant: str
    attempt: int
    rank: int
    node: str
    node_ready: Annotated[bool, Field(description="The node's agent answers.")]
    gpu_mb: int
    devices: list[QuarantinedDevice]


def quarantined_view(world: World, one: Quarantined, *, named: bool = True) -> QuarantinedView:
    task = world.tasks.get(TaskId(one.holder))
    holdings = [world.ledgers[lease.device].holdings[lease.key] for lease in one.leases]
    return {
        "id": one.holder if named else None,
        "name": task.name if task is not None and named else None,
        "kind": one.kind.value,
        "tenant": one.tenant,
        "attempt": one.attempt,
        "rank": one.rank,
        "node": one.node,
        "node_ready": one.node in world.nodes and world.nodes[one.node].ready,
        "gpu_mb": sum(lease.mb for lease in one.leases),
        "devices": [
            {
                "uuid": world.ledgers[held.lease.device].device.uuid,
                "index": world.ledgers[held.lease.device].device.index,
                "gpu_mb": held.lease.mb,
                "measured_mb": held.measured_mb,
            }
            for held in holdings
        ],
        **_awaited_view(one),
    }


def awaited_by_lease(world: World) -> dict[str, AwaitedView]:
    """Of each lease in quarantine, by its key."""
    return {lease.key: _awaited_view(one) for one in quarantined(world) for lease in one.leases}


def _awaited_view(one: Quarantined) -> AwaitedView:
    return {
        "quarantined_at": rfc3339(one.since),
        "awaits": [proof.value for proof in one.awaits],
        "message": one.message,
    }
