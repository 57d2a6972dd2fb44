"""The view of memory in quarantine: its holder, and which proofs end the quarantine."""

from gpubroker.wire.answered import Time
from gpubroker.wire.quarantine import Awaited, QuarantinedDevice
from gpubroker.wire.quarantine import Quarantined as ShownQuarantined

from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.core.lifecycle.quarantine import Quarantined, quarantined
from gpubroker_server.core.world.world import World


def quarantined_view(world: World, run: Quarantined, *, named: bool = True) -> ShownQuarantined:
    """Return the view of memory in quarantine. `named` is False for a token that may not see the holder's
    tenant: the id and the name of the holder are then left out."""
    task = world.tasks.get(TaskId(run.holder))
    holdings = [world.ledgers[lease.device].holdings[lease.key] for lease in run.leases]
    devices = [(world.ledgers[held.lease.device].device, held) for held in holdings]
    return ShownQuarantined(
        quarantined_at=Time.at(run.since),
        awaits=run.awaits,
        message=run.message,
        id=run.holder if named else None,
        name=task.name if task is not None and named else None,
        kind=run.kind,
        tenant=run.tenant,
        attempt=run.attempt,
        rank=run.rank,
        node=run.node,
        node_ready=run.node in world.nodes and world.nodes[run.node].ready,
        gpu_mb=sum(lease.mb for lease in run.leases),
        devices=tuple(
            QuarantinedDevice(device.uuid, device.index, held.lease.mb, held.measured_mb)
            for device, held in devices
        ),
    )


def awaited_by_lease(world: World) -> dict[str, Awaited]:
    """Return what ends the quarantine of each lease, by the lease's key."""
    return {
        lease.key: Awaited(Time.at(run.since), run.awaits, run.message)
        for run in quarantined(world)
        for lease in run.leases
    }
