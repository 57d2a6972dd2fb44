"""Why a task waits, as of now: every blocker, every device, and its place in the queue. Changes nothing."""

from collections.abc import Iterable
from dataclasses import dataclass

from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.ranks import nodes_of
from gpubroker_server.core.domain.reasons import Reason
from gpubroker_server.core.domain.task import MemberState, Task, TaskState
from gpubroker_server.core.domain.units import DeviceKey, Instant, Mib, NodeName, TaskId, in_gib
from gpubroker_server.core.explain.admission import wanted
from gpubroker_server.core.explain.blockers import Blocker, QuotaStanding, called, quota_of, used_by_others
from gpubroker_server.core.explain.diagnosis import Look, RankVerdict, look
from gpubroker_server.core.explain.survey import DeviceFinding, Survey, Verdict, survey
from gpubroker_server.core.explain.what_if import kept_for_forecasts
from gpubroker_server.core.planning.forecasts.reservations import Forecast
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.tenants.fair_share import FairShares
from gpubroker_server.core.world.dependencies import Inherited
from gpubroker_server.core.world.ledger import Holding
from gpubroker_server.core.world.queue import order_key, own_key
from gpubroker_server.core.world.world import World

MOST_NAMED = 3
"""So many tasks are named in a sentence, and the others counted."""


@dataclass(frozen=True, slots=True)
class DeviceVerdict:
    device: DeviceKey
    node: NodeName
    index: int
    kind: str
    verdict: Verdict
    message: str
    """Why not, or that it fits."""
    need_mb: Mib | None
    """None if the device is too small even when empty, or may not be used."""
    free_mb: Mib
    """For this task: its own pledge and those of lower priority count as free."""
    allocatable_mb: Mib
    holders: tuple[Holding, ...]
    """The largest first."""


@dataclass(frozen=True, slots=True)
class Explanation:
    task: TaskId
    state: TaskState
    reason: Reason | None
    """The most structural blocker's; None unless the task is pending."""
    message: str
    evaluated_at: Instant
    position: int | None
    """1 is next; None for a task that is not in the queue: not pending, held, or not due."""
    queue_length: int
    """All pending tasks, held and delayed ones included."""
    inherits: Inherited | None
    """By whose priority it stands in the queue; None if by its own."""
    blockers: tuple[Blocker, ...]
    """Most structural first; never empty for a pending task."""
    devices: tuple[DeviceVerdict, ...]
    """In key order; empty unless the task is pending and asks for GPUs. For a gang, as its first rank without
    room finds them when those before it have their places."""
    ranks: tuple[RankVerdict, ...] = ()
    """Of a gang that is pending, in order."""
    quota: QuotaStanding | None = None
    """Of a pending task for GPUs whose tenant has one."""


def explain(
    world: World, task_id: TaskId, policy: Policy, now: Instant, forecasts: Iterable[Forecast] = ()
) -> Explanation:
    """Say what a task waits for, or what it is doing. Raises KeyError if the World does not know it."""
    task = world.tasks[task_id]
    if task.state is not TaskState.PENDING:
        return Explanation(
            task_id, task.state, None, _statement(world, task, now), now, None, len(world.queue), None, (), ()
        )
    return explain_waiting(look(survey(Draft(world), task, policy, now, forecasts)))


def explain_waiting(found: Look) -> Explanation:
    """The same of a task that waits, or that nobody has submitted."""
    whole, seen = found.whole, found.part
    task, world = whole.task, whole.draft.world
    position = position_of(world, task, whole.policy, whole.now)
    room = [*found.blockers]
    if not room and whole.forecasts and not task.is_inference:
        room = kept_for_forecasts(whole)
    blockers = tuple(_blockers(whole, room, position))
    devices = [_verdict(finding, seen.task) for node in seen.nodes for finding in node.devices]
    return Explanation(
        task.id,
        task.state,
        blockers[0].reason,
        blockers[0].message,
        whole.now,
        position,
        len(world.queue),
        world.awaited.inheritance.of(task),
        blockers,
        tuple(sorted(devices, key=lambda verdict: verdict.device)) if seen.task.demand.gpus else (),
        found.ranks,
        quota_of(whole),
    )


def position_of(
    world: World, task: Task, policy: Policy, now: Instant, shares: FairShares | None = None
) -> int | None:
    """A task's place in the order of the queue, from 1, if no tenant is given anything before its turn; of
    one that nobody has submitted, the place that it would have.

    Costs as much as there are different demands, and devices unless `shares` are given.
    """
    is_new = task.id not in world.tasks
    if task.id not in world.queue and not (is_new and not stands_aside(task)):
        return None
    shares = FairShares(world, policy, now) if shares is None else shares
    own = own_key(world.queue.standing_of(task), task.stream, task.submitted_at, task.id, now, policy)
    key = order_key(own, shares.rank(task.tenant))
    return is_new + world.queue.count_until(key, shares.rank, now, policy)


def stands_aside(task: Task) -> bool:
    """It waits for a person, for its hour or for other tasks, and is not planned before."""
    return task.held or task.awaits or task.not_before is not None


def _blockers(seen: Survey, room: list[Blocker], position: int | None) -> list[Blocker]:
    task, now = seen.task, seen.now
    blockers = list(room)
    if task.held:
        blockers.append(Blocker(Reason.HELD, "held by a person; release it to let it run"))
    if task.not_before is not None and task.not_before > now:
        message = f"not to be started for another {task.not_before - now:.0f} s"
        if task.failures:
            message += f", because it has failed {task.failures} of at most {task.max_retries + 1} times"
        blockers.append(Blocker(Reason.NOT_BEFORE, message))
    if task.awaits:
        blockers.append(Blocker(Reason.DEPENDENCY_PENDING, _awaited(seen.draft.world, task)))
    if not blockers:
        ahead = f" after the {position - 1} ahead of it" if position and position > 1 else ""
        message = f"there is room for it now; the next cycle looks at it{ahead}"
        blockers.append(Blocker(Reason.PENDING_EVALUATION, message))
    return sorted(blockers, key=lambda blocker: blocker.tier)


def _awaited(world: World, task: Task) -> str:
    """Its own tenant's tasks: they may be named."""
    awaited = (
        {it.task for it in task.after} if task.id not in world.tasks else world.awaited.remaining.get(task.id)
    )
    left = sorted(awaited or ())
    names = [f"{name} ({_state_of(world, name)})" for name in left[:MOST_NAMED]]
    more = f" and {len(left) - MOST_NAMED} more" if len(left) > MOST_NAMED else ""
    return f"runs after {', '.join(names)}{more}" if left else "what it waited for has ended; it comes in now"


def _state_of(world: World, name: TaskId) -> str:
    row = world.tasks.get(name)
    return "being looked up" if row is None else str(row.state)


def _statement(world: World, task: Task, now: Instant) -> str:
    """What a task that is not pending is doing."""
    match task.state:
        case TaskState.ADMITTED:
            where = _whereabouts(task)
            return f"admitted to {where}" + ("" if task.members else "; its order is on the way")
        case TaskState.RUNNING:
            more = _overuse(world, task)
            return f"running on {_whereabouts(task)} for {now - (task.started_at or now):.0f} s{more}"
        case TaskState.STOPPING:
            left = (task.stop_deadline_at or now) - now
            whom = f" to make room for {_preemptor(world, task)}" if task.freeing_for else ""
            goes_to = ", and goes on elsewhere, where room is kept for it" if task.is_moving else ""
            return (
                f"asked to stop ({task.stop_reason}){whom}{goes_to}; {max(0.0, left):.0f} s of grace are left"
            )
        case _:
            return ended_message(task.state)


def _whereabouts(task: Task) -> str:
    """Where an active task is, and how its ranks are doing if it is a gang."""
    if task.is_inference:
        return f"model {task.demand.answered_by}"
    nodes = sorted(nodes_of(task))
    names = ", ".join(nodes[:3]) + (f" and {len(nodes) - 3} more" if len(nodes) > 3 else "")
    if not task.members:
        return names
    if task.started_at is None:
        ready = sum(member.state is MemberState.READY for member in task.members)
        return f"{names}, {ready} of its {len(task.members)} ranks ready"
    left = sum(not member.takes_part for member in task.members)
    gave_way = f", {left} more gave way" if left else ""
    return f"{names}, {len(task.members) - left} ranks{gave_way}"


def _overuse(world: World, task: Task) -> str:
    """What to say of a run that used more than it leased."""
    over = [lease for lease in world.leases_of(task) if lease.overused_mb]
    return "".join(
        f"; it used {in_gib(lease.overused_mb)} of {world.books[lease.device].device.label}, "
        f"of which it leased {in_gib(lease.mb)}"
        for lease in over
    )


def ended_message(state: TaskState) -> str:
    """All there is to say of a task that has ended; the World need not know it any more."""
    return f"{state}; it no longer waits for anything"


def _preemptor(world: World, task: Task) -> str:
    other = world.tasks.get(task.freeing_for) if task.freeing_for else None
    return "a task that has ended" if other is None else called(other.id, other.tenant, task)


def _verdict(finding: DeviceFinding, task: Task) -> DeviceVerdict:
    book = finding.book
    device = book.device
    holders = sorted(book.holdings.values(), key=lambda held: (-held.takes_mb, held.lease.holder))
    return DeviceVerdict(
        device.key,
        device.node,
        device.index,
        device.kind,
        finding.verdict,
        _why(finding, task),
        finding.need_mb,
        finding.free_mb,
        device.allocatable_mb,
        tuple(holders),
    )


def _why(finding: DeviceFinding, task: Task) -> str:
    free, size = in_gib(finding.free_mb), in_gib(finding.book.device.allocatable_mb)
    match finding.verdict:
        case Verdict.GONE:
            return "its node no longer has it"
        case Verdict.NOT_WANTED:
            return f"not among what is asked for ({wanted(task.demand)})"
        case Verdict.TOO_SMALL:
            return f"too small: {size} in all"
        case Verdict.NODE_NOT_READY:
            return "its node does not answer"
        case Verdict.CORDONED:
            return "its node is cordoned"
        case Verdict.STALE:
            return "its memory use has not been reported lately"
        case Verdict.FITS:
            return f"fits: {free} are free"
        case Verdict.KEPT_FOR_OTHERS:
            pledges = finding.book.pledges
            names = sorted(called(name, pledges[name].tenant, task) for name in pledges)
            return f"what is free is kept for {', '.join(names)}"
    others = used_by_others(finding.book)
    elsewhere = f", {others}" if others else ""
    if task.demand.takes_whole_devices:
        return f"not empty: {free} of {size} are free{elsewhere}"
    return f"{in_gib(finding.need_mb or 0)} are needed, {free} are free{elsewhere}"
