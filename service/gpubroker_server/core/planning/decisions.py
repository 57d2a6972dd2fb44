"""Placements and evictions as decisions: the rows that change together, and the orders that follow.

Each function enters its decision into the draft, so that the next one builds on it.
"""

from collections.abc import Iterator, Sequence
from typing import Any, assert_never

from gpubroker_server.core.domain.decisions import AnyOrder, Decision, PledgeWrite, TaskWrite, write_move
from gpubroker_server.core.domain.demand import context_mb
from gpubroker_server.core.domain.holders import External, Gang, Inference, Member, Model, Run, WorkerSeat
from gpubroker_server.core.domain.lease import (
    HolderKind,
    Lease,
    LeaseState,
    Pledge,
    PledgeEnd,
    holder_kind_of,
)
from gpubroker_server.core.domain.model_orders import load_order
from gpubroker_server.core.domain.orders import StartOrder
from gpubroker_server.core.domain.ranks import demand_of, workers
from gpubroker_server.core.domain.task import Move, Placement, StopReason, Task, members_of
from gpubroker_server.core.domain.units import DeviceKey, Instant, Mib, TaskId, node_key
from gpubroker_server.core.lifecycle import external_leases
from gpubroker_server.core.lifecycle.gang_runs import stop_ranks
from gpubroker_server.core.lifecycle.stopping import orders_to_leave, with_cause
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.preemption.eviction import Eviction

_OF_THE_LAST_ATTEMPT = (
    "not_before", "ordered_at", "started_at", "stop_reason", "stop_deadline_at", "stop_cause", "freeing_for",
)  # fmt: skip
"""The fields that a new claim clears. The checkpoint stays, because the run resumes from it."""


def admit(draft: Draft, task: Task, places: Sequence[Placement], now: Instant) -> Decision:
    """Admit a task or all ranks of a gang. The decision is a new claim with its leases, the end of the task's
    pledges, and orders to start."""
    fence = draft.world.next_fence(task)
    forgotten: dict[str, Any] = {
        name: None for name in _OF_THE_LAST_ATTEMPT if getattr(task, name) is not None
    }
    next_move = Move.ADMITTED
    match task.holder:
        case Gang():
            forgotten["holder"] = Gang(
                tuple(Member(rank, placement.node) for rank, placement in enumerate(places))
            )
        case External() as external:
            next_move, forgotten = Move.STARTED, {**forgotten, **external_leases.begun(external, now)}
        case Run() | WorkerSeat() | Model() | Inference():
            pass
        case _:
            assert_never(task.holder)
    write = write_move(task, next_move, fence=fence, node=places[0].node, admitted_at=now, **forgotten)
    devices = {device for place in places for device, _ in place.devices}
    # The task's own pledges end before its leases enter the draft, which take what was kept for it. Pledges
    # of other tasks end afterwards, when the ledgers show which of them no longer fit.
    taken = devices | {node_key(place.node) for place in places}
    pledges = [_end_own(pledge, taken) for pledge in draft.end_pledges(task.id, _leased_by(task, places))]
    leases = [
        lease for rank, place in enumerate(places) for lease in _leases(draft, write.task, rank, place, now)
    ]
    draft.replace_task(task, write.task)
    for lease in leases:
        draft.put_lease(lease)
    pledges += _overtake(draft, devices)
    return Decision(
        task.id,
        "admit",
        tasks=(write,),
        leases=tuple(leases),
        pledges=tuple(pledges),
        orders=_beginning(draft, write.task, places, leases),
    )


def _leased_by(task: Task, places: Sequence[Placement]) -> dict[DeviceKey, int]:
    """Return what a single task leases, for comparison with its pledges. For a gang, return nothing: its
    ranks may be placed otherwise than was pledged."""
    if task.demand.bundles:
        return {}
    [place] = places
    return {node_key(place.node): 0, **dict(place.devices)}


def _beginning(
    draft: Draft, task: Task, places: Sequence[Placement], leases: list[Lease]
) -> tuple[AnyOrder, ...]:
    match task.holder:
        case External():
            return external_leases.watch_orders(draft.world, task, leases)
        case Model():
            return (load_order(task, places[0].devices),)
        case _:
            return _starts(draft, task, places)


def grow(
    draft: Draft, task: Task, joining: Sequence[tuple[int, Placement]], now: Instant, ready_by: Instant
) -> Decision:
    """Add ranks to a running gang: new members of its claim, with their leases and orders to start.

    `joining` has the bundle and the place of each new rank.
    """
    before = members_of(task)
    # Ranks that have left keep their numbers: an agent starts no (task, fence, rank) twice.
    members = tuple(
        Member(rank, place.node, stop_deadline_at=ready_by, bundle=bundle)
        for rank, (bundle, place) in enumerate(joining, start=len(before))
    )
    write = write_move(task, Move.CHANGED, holder=Gang((*before, *members)))
    places = {member.rank: place for member, (_, place) in zip(members, joining, strict=True)}
    leases = [lease for rank in places for lease in _leases(draft, write.task, rank, places[rank], now)]
    draft.add_ranks(task, write.task)
    for lease in leases:
        draft.put_lease(lease)
    size = len(workers(before)) + len(members)
    starts = tuple(_start(draft, write.task, rank, place, size) for rank, place in places.items())
    return Decision(task.id, "grow", tasks=(write,), leases=tuple(leases), orders=starts)


def _leases(draft: Draft, task: Task, rank: int, place: Placement, now: Instant) -> Iterator[Lease]:
    kind, demand = holder_kind_of(task.holder), demand_of(task, rank)
    state = LeaseState.HELD if kind is HolderKind.EXTERNAL else LeaseState.RESERVED
    for device, mb in place.devices:
        yield Lease(
            kind,
            task.id,
            task.fence,
            device,
            mb,
            task.tenant,
            task.priority,
            since=now,
            state=state,
            rank=rank,
            context_mb=context_mb(demand, draft.ledger(device).device),
        )


def _starts(draft: Draft, task: Task, places: Sequence[Placement]) -> tuple[StartOrder, ...]:
    return tuple(_start(draft, task, rank, place, len(places)) for rank, place in enumerate(places))


def _start(draft: Draft, task: Task, rank: int, place: Placement, world_size: int) -> StartOrder:
    demand = demand_of(task, rank)
    return StartOrder(
        task.id,
        task.fence,
        place.node,
        draft.world.nodes[place.node].incarnation,
        place.devices,
        task.shareable,
        rank,
        task.priority,
        world_size,
        barrier=bool(task.demand.bundles),
        memory_mb=demand.memory_mb,
        shares=_shares(draft, place),
        cpu=demand.cpu,
        custom=demand.custom,
    )


def _shares(draft: Draft, place: Placement) -> tuple[tuple[Mib, float], ...]:
    leased = [(mb, draft.ledger(key).device) for key, mb in place.devices]
    if all(mb >= device.physical_mb for mb, device in leased):
        return ()
    allocatable = (
        (mb if mb >= device.physical_mb else max(1, mb - device.context_mb), device.physical_mb)
        for mb, device in leased
    )
    return tuple((Mib(mb), min(1.0, mb / physical_mb)) for mb, physical_mb in allocatable)


def evict(
    draft: Draft,
    task: Task,
    eviction: Eviction,
    now: Instant,
    reason: StopReason = StopReason.PREEMPT,
    kept_up_to: int = 0,
) -> Decision:
    """Give the victims notice, and pledge what they free to the task, which stays pending.

    Earlier pledges of the task end. No task up to the priority `kept_up_to` may take the room, even if that
    is above the priority of the task itself.
    """
    stops = [_stop(draft, victim, eviction, task.id, now, reason) for victim in eviction.victims]
    made = [PledgeWrite(pledge, PledgeEnd.DISSOLVED) for pledge in draft.end_pledges(task.id)]
    for device, mb in eviction.devices:
        terms = max(task.priority, kept_up_to), task.tenant, now, eviction.deadline_at
        pledge = Pledge(task.id, device, mb, *terms, eviction.ranks.get(device, ()))
        draft.put_pledge(pledge)
        made.append(PledgeWrite(pledge))
    taken = _overtake(draft, {device for device, _ in eviction.devices})
    return Decision(
        task.id,
        reason.value,
        tasks=tuple(write for write, _ in stops),
        pledges=(*made, *taken),
        orders=tuple(order for _, orders in stops for order in orders),
    )


def pledge_destination(
    draft: Draft, run: Task, place: Placement, now: Instant, gone_by: Instant, kept_up_to: int
) -> tuple[PledgeWrite, ...]:
    """Pledge room that is free now to a run that is moving to it. The pledge ends if the run is not confirmed
    gone from its old place by `gone_by`."""
    made = []
    for device, mb in place.devices:
        pledge = Pledge(run.id, device, mb, kept_up_to, run.tenant, now, gone_by)
        draft.put_pledge(pledge)
        made.append(PledgeWrite(pledge))
    return tuple(made)


def withdraw(draft: Draft, preemptor: TaskId) -> Decision:
    """End the pledges of a task that no longer waits for them."""
    ended = draft.end_pledges(preemptor)
    writes = tuple(PledgeWrite(pledge, PledgeEnd.WITHDRAWN) for pledge in ended)
    return Decision(preemptor, "withdraw", pledges=writes)


def _stop(
    draft: Draft, victim: Task, eviction: Eviction, preemptor: TaskId, now: Instant, reason: StopReason
) -> tuple[TaskWrite, tuple[AnyOrder, ...]]:
    ranks = eviction.surplus.get(victim.id)
    if ranks is not None:
        write, orders = stop_ranks(draft.world, victim, ranks, preemptor, now)
        draft.replace_task(victim, write.task)
        return write, orders
    write = write_move(
        victim,
        Move.STOPPING,
        stop_reason=reason,
        stop_deadline_at=Instant(now + victim.grace_seconds),
        freeing_for=preemptor,
        **with_cause(victim, None),
    )
    draft.replace_task(victim, write.task)
    return write, orders_to_leave(draft.world, write.task, victim.grace_seconds)


def _end_own(pledge: Pledge, taken: set[DeviceKey]) -> PledgeWrite:
    """Return the end of a pledge of an admitted task. A pledge for room that the task does not take is
    withdrawn."""
    return PledgeWrite(pledge, PledgeEnd.CONSUMED if pledge.device in taken else PledgeEnd.WITHDRAWN)


def _overtake(draft: Draft, devices: set[DeviceKey]) -> list[PledgeWrite]:
    """End the pledges, lowest priority first, that these devices can no longer honour.

    A placement leaves enough for pledges of its own or higher priority, so such pledges never end here. A
    preemptor that loses one pledge loses all, because the rest would be too little to start.
    """
    taken: list[PledgeWrite] = []
    for device in sorted(devices & draft.world.ledgers.keys()):
        by_rank = sorted(draft.ledger(device).pledges.values(), key=lambda p: (p.priority, p.preemptor))
        for pledge in by_rank:
            if draft.ledger(device).free_after_releases_mb() >= 0:
                break
            taken += (PledgeWrite(p, PledgeEnd.TAKEN) for p in draft.end_pledges(pledge.preemptor))
    return taken
