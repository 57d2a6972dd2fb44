"""Models that a server has loaded without a lease, by hand or at its start, and models of removed servers.

A pending model gets leases where it is loaded, if they fit: no run is preempted for it. It also takes over
the leases in doubt that an earlier holder of the model left on the server.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from gpubroker_server.core.domain.decisions import AuditNote, Decision, Outcome, write_move
from gpubroker_server.core.domain.demand import context_mb, may_use_node, need_mb
from gpubroker_server.core.domain.device import Device
from gpubroker_server.core.domain.lease import (
    HolderKind,
    Lease,
    LeaseState,
    Proof,
    holder_kind_of,
    quarantine,
    release,
)
from gpubroker_server.core.domain.models import ModelKey
from gpubroker_server.core.domain.orders import Ending, Failure
from gpubroker_server.core.domain.task import Move, Task, TaskState, model_of
from gpubroker_server.core.domain.units import Fence, Instant, Mib
from gpubroker_server.core.lifecycle.stopping import withdraw_pledges
from gpubroker_server.core.lifecycle.task_update import TaskUpdate
from gpubroker_server.core.world.ledger import DeviceLedger
from gpubroker_server.core.world.world import World


def adopt(world: World, task: Task, priority: int, now: Instant) -> Decision | None:
    """Return the decision that gives a pending model leases where it is loaded; None while they would not
    fit, so that its use counts as foreign. `task` has the address and the process of the server on which the
    model was seen."""
    fence = world.next_fence(task)
    kind = holder_kind_of(task.holder)
    left = list(_left_there(world, task))
    mb_left = {device: Mib(0) for device in sorted({lease.device for lease in left})}
    for lease in left:
        mb_left[lease.device] = max(mb_left[lease.device], lease.mb)
    leases = [
        _lease(task, fence, kind, world.ledgers[key].device, mb_left[key], priority, now) for key in mb_left
    ]
    for ledger, mb in _rooms(world, task) if task.demand.gpus and not leases else ():
        lease = _lease(task, fence, kind, ledger.device, mb, priority, now)
        if len(leases) < task.demand.gpus and _fits(ledger, lease, task):
            leases.append(lease)
    nodes = [world.ledgers[lease.device].device.node for lease in leases]
    if not task.demand.gpus:
        nodes = [node.name for node in world.nodes.values() if may_use_node(task.demand, node)]
    if (len(leases) < task.demand.gpus and not left) or not nodes:
        return None
    begun: dict[str, Any] = {"node": min(nodes), "admitted_at": now, "started_at": now, "not_before": None}
    begun["holder"] = task.holder
    if task.held and task.expires_at is not None:
        begun["expires_at"] = now  # no request wants the model, so it is not loaded again once it leaves
    write = write_move(task, Move.STARTED, fence=fence, priority=priority, held=False, **begun)
    pledges = withdraw_pledges(world, task)
    given_back = (release(lease, Proof.HELD_ANEW) for lease in left)
    return Decision(task.id, "adopted", tasks=(write,), leases=(*given_back, *leases), pledges=pledges)


def _left_there(world: World, task: Task) -> Iterator[Lease]:
    """Yield the unconfirmed leases of earlier claims on the model at this server. The index says that the
    memory is still in use, and it must count only once."""
    terms = model_of(task)
    for other in world.models.on(terms.server, terms.address, terms.process):
        if model_of(other).model != terms.model:
            continue
        for fence in sorted(world.unconfirmed.claims_of(other.id)):
            claim = world.leases.get((other.id, fence), {})
            yield from (claim[key] for key in sorted(claim) if claim[key].device in world.ledgers)


def _rooms(world: World, task: Task) -> list[tuple[DeviceLedger, Mib]]:
    """Return the devices that the model may be on, with the MiB to lease there, the likeliest device first.
    Without a lease the model's memory counts as foreign, so the device with the most foreign use is the
    likeliest."""
    rooms = [
        (ledger, mb)
        for ledger in world.ledgers.values()
        if ledger.sample is not None
        and may_use_node(task.demand, world.nodes[ledger.device.node])
        and (mb := need_mb(task.demand, ledger.device)) is not None
    ]
    return sorted(rooms, key=lambda room: (-room[0].foreign_mb, room[0].device.key))


def _lease(
    task: Task, fence: Fence, kind: HolderKind, device: Device, mb: Mib, priority: int, now: Instant
) -> Lease:
    return Lease(
        kind,
        task.id,
        fence,
        device.key,
        mb,
        task.tenant,
        priority,
        since=now,
        state=LeaseState.HELD,
        context_mb=context_mb(task.demand, device),
    )


def _fits(ledger: DeviceLedger, lease: Lease, task: Task) -> bool:
    """Return True if the lease fits once its use no longer counts as foreign, without taking what is pledged
    to others."""
    after = ledger.copy()
    after.put(lease)
    return after.free_mb(task=task.id) >= 0 and after.leased_mb() <= ledger.device.allocatable_mb


def follow_settings(world: World, servers: Mapping[str, str], now: Instant) -> list[Decision]:
    """Return the decisions for servers that were renamed in the settings or removed from them. `servers` maps
    a name to an address.

    A server is identified by its address, so a renamed server keeps its models. The models of a removed
    server may still be in memory. They count until the process of the server is gone, an operator says that
    the models are gone, or the server is back in the settings and its index says so.
    """
    names, decisions = {address: name for name, address in servers.items() if address}, []
    for task in world.models.live():
        terms = model_of(task)
        if terms.server in servers and terms.is_at(terms.server, servers[terms.server], ""):
            continue
        name = names.get(terms.address)
        if name is not None and world.models.of(ModelKey(name, terms.model)) is None:
            write = write_move(task, Move.CHANGED, holder=replace(terms, server=name))
            decisions.append(Decision(task.id, "server_renamed", tasks=(write,)))
        elif task.state is TaskState.STOPPING:
            continue
        elif not terms.model and task.is_active:
            decisions.append(base_released(world, task, Move.SUCCEEDED, now))
        else:
            decisions.append(_given_up(world, task, terms.server, now))
    return decisions


def left_processes(world: World) -> frozenset[str]:
    """Return the processes of servers with models in quarantine."""
    models = (task for task in world.models.known() if task.id in world.unconfirmed.quarantined)
    return frozenset(process for task in models if (process := model_of(task).process))


def server_gone(world: World, process: str) -> list[Decision]:
    """Return the decisions that release what the models of a server process left in quarantine, once the
    process is gone. A new sample shows whether that memory is free."""
    decisions = []
    for task in world.models.known():
        leases = world.unconfirmed.quarantined.get(task.id, {})
        if leases and model_of(task).process == process:
            left = tuple(release(leases[key], Proof.PROCESS_ABSENT) for key in sorted(leases))
            decisions.append(Decision(task.id, "server_gone", leases=left))
    return decisions


def step_covered(world: World, step: Task, now: Instant) -> Decision | None:
    """Return the decision that ends the holder of a loaded model of which a loaded ensemble is made: the
    ensemble's leases cover the memory, which must count only once, and the model stays in memory as long as
    the ensemble does. Return None for a pinned model, and if no ensemble has leases on all its devices."""
    terms = model_of(step)
    devices = {lease.device for lease in world.leases_of(step)}
    is_covered = any(
        terms.model in model_of(other).steps and devices <= {lease.device for lease in world.leases_of(other)}
        for other in world.models.on(terms.server, terms.address, terms.process)
        if other.state is TaskState.RUNNING
    )
    if terms.pinned or not is_covered:
        return None
    update = TaskUpdate(world, step.id, now)
    update.release_leases(step.fence, 0, Proof.HELD_ANEW)
    update.move(Move.SUCCEEDED, "covered", finished_at=now)
    return update.decision()


def base_released(world: World, task: Task, move: Move, now: Instant) -> Decision:
    """Return the decision that ends a server's base cost, which the settings no longer name. The audit log
    says so, and only a new sample makes that memory free."""
    update = TaskUpdate(world, task.id, now)
    update.release_leases(task.fence, 0, Proof.STATEMENT)
    update.move(move, "released", finished_at=now, freeing_for=None)
    decision = update.decision()
    assert decision is not None, "it has just ended"
    message = f"the settings name no base_mb for server {model_of(task).server}"
    note = AuditNote(now, task.tenant, "settings", "base_mb.release", task.id, message)
    return replace(decision, audit=(note,))


def _given_up(world: World, task: Task, server: str, now: Instant) -> Decision:
    message = (
        f"its server {server} is no longer in triton.servers at that address; what it has in memory counts "
        "as used until its process is seen to be gone, the server is back in the settings, or an operator "
        "says that it is gone (gpubroker quarantine)"
    )
    held = [lease for lease in world.leases_of(task) if lease.state is not LeaseState.QUARANTINED]
    return Decision(
        task.id,
        "server_removed",
        tasks=(write_move(task, Move.FAILED, finished_at=now),),
        leases=tuple(quarantine(lease, now) for lease in held if task.is_active),
        pledges=withdraw_pledges(world, task),
        outcome=Outcome(task.id, task.fence, Ending.LOST, now, failure=Failure("server_removed", message)),
    )
