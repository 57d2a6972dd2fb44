"""Ranks that join running gangs, for the naive planner: after all tasks, where nothing is reserved."""

from collections.abc import Iterator, Sequence
from typing import Any

from gpubroker_server.core.domain.holders import Gang, Member, MemberState
from gpubroker_server.core.domain.lease import HolderKind, Lease
from gpubroker_server.core.domain.task import Task, TaskState, members_of
from gpubroker_server.core.domain.units import Instant, NodeName
from msgspec.structs import replace

from tests.core import naive_backfill as backfill
from tests.core.naive_gangs import Places, most_of, places, with_ranks


def growth_steps(naive: Any) -> Iterator[tuple[Any, ...]]:
    gangs = [task for task in naive.tasks.values() if missing(task)]
    for gang in sorted(gangs, key=lambda gang: (-gang.priority, gang.submitted_at, gang.id)):
        yield from growth_step(naive, gang)


def missing(task: Task) -> list[int]:
    """Bundles that no rank has, of a gang that may get more ranks."""
    done = (MemberState.SUCCEEDED, MemberState.ENDED)
    late = [member for member in members_of(task) if member.bundle is not None]
    if task.state is not TaskState.RUNNING or any(member.state in done for member in members_of(task)):
        return []
    if any(member.state is MemberState.PLACED for member in late) or task.demand.min_ranks is None:
        return []
    if sum(m.state is MemberState.LEFT and m.stop_deadline_at is None for m in late) >= 3:
        return []
    has = [
        m.rank if m.bundle is None else m.bundle for m in members_of(task) if m.state is not MemberState.LEFT
    ]
    lacks = [number for number in range(len(task.demand.bundles)) if number not in has]
    return lacks[: 256 - len(members_of(task))]


def growth_step(naive: Any, gang: Task) -> Iterator[tuple[Any, ...]]:
    """The places that were taken, if no more ranks could have them."""
    lacks = missing(gang)
    bundles = tuple(gang.demand.bundles[number] for number in lacks)
    first = bundles[0]
    demand = replace(gang.demand, bundles=bundles, min_ranks=1, custom=first.custom, slots=first.slots)
    wanted = replace(gang, demand=demand, holder=Gang(), state=TaskState.PENDING, priority=-1)
    reserved = {name for forecast in backfill.keepers(naive) for name in backfill.nodes_of(forecast)}
    here = {m.node for m in members_of(gang) if m.state is MemberState.READY}
    nodes = [node for node in naive.nodes if node.name not in reserved]
    if gang.demand.strategy.startswith("strict"):
        nodes = [node for node in nodes if (node.name in here) is (gang.demand.strategy == "strict_pack")]
    counts = [
        count
        for count in range(1, len(bundles) + 1)
        if not naive.over_quota(wanted, count)
        and naive.custom_is_there(with_ranks(replace(wanted, priority=gang.priority), count))
    ]
    able = most_of(naive, wanted, counts, lambda _: True, nodes)
    if not able:
        return
    what, _, names, devices, *_ = naive.taken.get(gang.id, ("", "", (), ()))
    begin = len(members_of(gang))
    taken = tuple(
        (node, tuple(d[1:] for d in devices if d[0] == rank)) for rank, node in enumerate(names, start=begin)
    )
    if what != "grow" or len(taken) != able or taken not in places(naive, wanted, able, nodes):
        yield ("grow", gang.id, f"{able} ranks", taken)
        return
    yield grow(naive, gang, lacks, taken)


def grow(naive: Any, gang: Task, bundles: Sequence[int], where: Places) -> tuple[Any, ...]:
    begin = len(members_of(gang))
    ready_by = Instant(naive.now + naive.policy.gang_start_seconds)
    joining = [
        Member(rank, NodeName(node), stop_deadline_at=ready_by, bundle=bundle)
        for rank, (bundle, (node, _)) in enumerate(zip(bundles, where, strict=False), start=begin)
    ]
    naive.tasks[gang.id] = replace(gang, holder=Gang((*members_of(gang), *joining)))
    devices = tuple((rank, key, mb) for rank, (_, some) in enumerate(where, start=begin) for key, mb in some)
    for rank, key, mb in devices:
        holder: tuple[Any, Any, Any, Any, Any] = (HolderKind.GANG_MEMBER, gang.id, gang.fence, key, mb)
        naive.leases.append(Lease(*holder, gang.tenant, gang.priority, since=naive.now, rank=rank))
    return ("grow", gang.id, tuple(node for node, _ in where), devices)
