"""Memory in quarantine, as the API answers it: its holder, and which proofs end its quarantine."""

from gpubroker.wire.answered import Time
from gpubroker.wire.quarantine import Awaited, QuarantinedDevice
from gpubroker.wire.quarantine import Quarantined as ShownQuarantined

from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.core.lifecycle.quarantine import Quarantined, quarantined
from gpubroker_server.core.world.world import World


def quarantined_view(world: World, one: Quarantined, *, named: bool = True) -> ShownQuarantined:
    """Return memory in quarantine; without the holder's names for tokens that may not see its tenant."""
    task = world.tasks.get(TaskId(one.holder))
    holdings = [world.ledgers[lease.device].holdings[lease.key] for lease in one.leases]
    devices = [(world.ledgers[held.lease.device].device, held) for held in holdings]
    return ShownQuarantined(
        quarantined_at=Time.at(one.since),
        awaits=one.awaits,
        message=one.message,
        id=one.holder if named else None,
        name=task.name if task is not None and named else None,
        kind=one.kind,
        tenant=one.tenant,
        attempt=one.attempt,
        rank=one.rank,
        node=one.node,
        node_ready=one.node in world.nodes and world.nodes[one.node].ready,
        gpu_mb=sum(lease.mb for lease in one.leases),
        devices=tuple(
            QuarantinedDevice(device.uuid, device.index, held.lease.mb, held.measured_mb)
            for device, held in devices
        ),
    )


def awaited_by_lease(world: World) -> dict[str, Awaited]:
    """Return what ends the quarantine of each lease, by the lease's key."""
    return {
        lease.key: Awaited(Time.at(one.since), one.awaits, one.message)
        for one in quarantined(world)
        for lease in one.leases
    }
