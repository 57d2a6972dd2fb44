"""Explain a task as of now: every blocker, every device, and the task's place in the queue. Nothing is
changed."""

from collections.abc import Iterable
from typing import NamedTuple, assert_never

from gpubroker.wire.explanations import Quota
from gpubroker.wire.tasks import Inherited
from msgspec import Struct

from gpubroker_server.core.admission.feasibility import constraints_text
from gpubroker_server.core.domain.decisions import QueuePause
from gpubroker_server.core.domain.holders import (
    External,
    Gang,
    Inference,
    Member,
    MemberState,
    Model,
    Run,
    WorkerSeat,
)
from gpubroker_server.core.domain.node_capacity import BUSY_CPU, SLOW_START_SECONDS
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.ranks import (
    MOST_FAILED_JOINS,
    MOST_RANKS,
    failed_joins,
    nodes_of,
    vacant_bundles,
)
from gpubroker_server.core.domain.reasons import Reason
from gpubroker_server.core.domain.task import Task, TaskState, members_of
from gpubroker_server.core.domain.units import Instant, TaskId, in_gib, in_time
from gpubroker_server.core.explain.blockers import (
    Blocker,
    is_short,
    limit_blockers,
    quota_of,
    quota_text,
    room_blockers,
    task_label,
    used_without_lease,
)
from gpubroker_server.core.explain.diagnosis import Diagnosis, RankVerdict, diagnose
from gpubroker_server.core.explain.survey import DeviceFinding, Survey, Verdict, survey_nodes
from gpubroker_server.core.explain.what_if import reservation_blockers
from gpubroker_server.core.planning.forecasts.reservations import Forecast
from gpubroker_server.core.planning.growth import as_pending
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.tenants.fair_share import FairShares
from gpubroker_server.core.world.ledger import Holding
from gpubroker_server.core.world.queue import order_key
from gpubroker_server.core.world.world import World

MAX_NAMED = 3
"""The most tasks that a message names. Further tasks are counted."""


class DeviceVerdict(NamedTuple):
    finding: DeviceFinding
    message: str

    @property
    def holders(self) -> list[Holding]:
        """The holdings of the device, the largest first."""
        holdings = self.finding.ledger.holdings.values()
        return sorted(holdings, key=lambda holding: (-holding.occupied_mb, holding.lease.holder))


class Explanation(Struct, frozen=True):
    task: TaskId
    state: TaskState
    message: str
    """The message of the most structural blocker, or what the task is doing."""
    queue_length: int
    """The number of all pending tasks, including held and delayed ones."""
    reason: Reason | None = None
    """The reason of the most structural blocker; None unless the task is pending."""
    position: int | None = None
    """The place in the queue, where 1 is next; None for a task that is not in the queue, because it is not
    pending, is held, or is not due."""
    inherits: Inherited | None = None
    """The task whose priority this one has in the queue; None if it has its own."""
    blockers: tuple[Blocker, ...] = ()
    """The blockers, most structural first; never empty for a pending task."""
    devices: tuple[DeviceVerdict, ...] = ()
    """The verdicts on devices, in key order; empty unless the task is pending and asks for GPUs. Those for a
    gang are evaluated for its first rank without room, beside the ranks before it."""
    ranks: tuple[RankVerdict, ...] = ()
    """The verdicts on the ranks of a pending gang, in order."""
    quota: Quota | None = None
    """The quota of the tenant, for a pending task that asks for GPUs; None without one."""


def explain(
    world: World, task_id: TaskId, policy: Policy, now: Instant, forecasts: Iterable[Forecast] = ()
) -> Explanation:
    """Return what a task waits for, or what it is doing. Raises KeyError if the World does not have the
    task."""
    task = world.tasks[task_id]
    if task.state is not TaskState.PENDING:
        doing = _statement(world, task, policy, now)
        return Explanation(task_id, task.state, doing, len(world.queue))
    return explain_pending(diagnose(survey_nodes(Draft(world), task, policy, now, forecasts)))


def explain_pending(diagnosis: Diagnosis) -> Explanation:
    """Return what a task waits for. The task is pending, or has not been submitted yet."""
    survey, device_survey = diagnosis.survey, diagnosis.device_survey
    task, world = survey.task, survey.draft.world
    position = position_of(world, task, survey.policy, survey.now)
    room = list(diagnosis.blockers)
    if not room and survey.forecasts and not isinstance(task.holder, Inference):
        room = reservation_blockers(survey)
    blockers = tuple(_blockers(survey, room, position))
    part = device_survey.task
    devices = [finding for node in device_survey.nodes for finding in node.devices if part.demand.gpus]
    devices.sort(key=lambda finding: finding.ledger.device.key)
    return Explanation(
        task.id,
        task.state,
        blockers[0].message,
        len(world.queue),
        blockers[0].reason,
        position,
        world.awaited.inheritance.of(task),
        blockers,
        tuple(DeviceVerdict(finding, _why(finding, part)) for finding in devices),
        diagnosis.ranks,
        quota_of(survey),
    )


def position_of(
    world: World, task: Task, policy: Policy, now: Instant, shares: FairShares | None = None
) -> int | None:
    """Return the task's place in the queue, from 1, at the present shares of the tenants; for a task that is
    not submitted, the place that it would have. The cost is one step per equivalence class, and one per
    device unless `shares` are given."""
    is_new = task.id not in world.tasks
    if task.id not in world.queue and (not is_new or is_deferred(task, world)):
        return None
    shares = FairShares(world, policy, now) if shares is None else shares
    own_order = world.queue.order_within_tenant(task, now, policy)
    key = order_key(own_order, shares.rank(task.tenant))
    return is_new + world.queue.count_until(key, shares.rank, now, policy)


def is_deferred(task: Task, world: World) -> bool:
    """Return True if the planner leaves the task out, because the task is held, paused, not due yet, or waits
    for other tasks."""
    is_paused = world.queue.pause_of(task) is not None
    return task.held or task.awaits or task.not_before is not None or is_paused


def _blockers(survey: Survey, room: list[Blocker], position: int | None) -> list[Blocker]:
    task, now = survey.task, survey.now
    blockers = list(room)
    if task.held:
        blockers.append(Blocker(Reason.HELD, _held(survey.draft.world, task)))
    if (pause := survey.draft.world.queue.pause_of(task)) is not None:
        blockers.append(Blocker(Reason.QUEUE_PAUSED, _paused(pause, now)))
    if task.not_before is not None and task.not_before > now:
        blockers.append(_not_yet(task, task.not_before - now))
    if task.awaits:
        blockers.append(Blocker(Reason.DEPENDENCY_PENDING, _awaited(survey.draft.world, task)))
    if not blockers:
        tasks = "1 task" if position == 2 else f"{(position or 1) - 1} tasks"
        ahead = f" after the {tasks} ahead of it" if position and position > 1 else ""
        message = f"there is room for it now; the next cycle plans it{ahead}"
        blockers.append(Blocker(Reason.PENDING_EVALUATION, message))
    return sorted(blockers, key=lambda blocker: blocker.reason.tier)


def _held(world: World, task: Task) -> str:
    workers = world.worker_sets.of(task.id)
    if workers is None:
        return "held in the queue; release it to let it run"
    return (
        f"a place of worker set {workers.id}, which wants {workers.count} of {len(workers.workers)} workers "
        "now; scale the set up to have it start"
    )


def _paused(pause: QueuePause, now: Instant) -> str:
    kind, _, name = pause.queue.partition(":")
    queue = f"{'work stream' if kind == 'stream' else kind} {name}"
    reason = f" ({pause.reason})" if pause.reason else ""
    return (
        f"{queue} was paused {in_time(max(0.0, now - pause.at))} ago{reason}; it starts nothing until resumed"
    )


def _not_yet(task: Task, seconds: float) -> Blocker:
    due = in_time(seconds)
    message = f"its start time is in {due}"
    if task.failures:
        message = f"attempt {task.failures} of at most {task.max_retries + 1} failed; the next is in {due}"
    elif isinstance(task.holder, Inference) and task.fence:
        model = task.demand.answered_by
        said = f"its server does not answer or does not have model {model}; it is asked again in {due}"
        return Blocker(Reason.MODEL_LOADING, said)
    return Blocker(Reason.NOT_BEFORE, message)


def _awaited(world: World, task: Task) -> str:
    """Return a text about the tasks that this one runs after. They have the same tenant, so they may be
    named."""
    awaited = (
        {dependency.task for dependency in task.after}
        if task.id not in world.tasks
        else world.awaited.remaining.get(task.id)
    )
    remaining = sorted(awaited or ())
    names = [f"{name} ({_state_of(world, name)})" for name in remaining[:MAX_NAMED]]
    more = f" and {len(remaining) - MAX_NAMED} more" if len(remaining) > MAX_NAMED else ""
    ended = "the tasks that it waited for have ended; it joins the queue now"
    return f"runs after {', '.join(names)}{more}" if remaining else ended


def _state_of(world: World, name: TaskId) -> str:
    if workers := world.awaited.workers.get(name):
        return f"an array, of which {len(workers)} {'worker is' if len(workers) == 1 else 'workers are'} left"
    row = world.tasks.get(name)
    if name in world.worker_sets:
        return "a worker set"
    return "being looked up" if row is None else str(row.state)


def _statement(world: World, task: Task, policy: Policy, now: Instant) -> str:
    match task.state:
        case TaskState.ADMITTED:
            is_gang = isinstance(task.holder, Gang)
            return f"admitted to {_whereabouts(task)}" + ("" if is_gang else _being_started(world, task, now))
        case TaskState.RUNNING:
            more = _overuse(world, task) + _missing_ranks(world, task, policy, now)
            return f"running on {_whereabouts(task)} for {in_time(now - (task.started_at or now))}{more}"
        case TaskState.STOPPING:
            left = in_time(max(0.0, (task.stop_deadline_at or now) - now))
            if task.stop_cause:
                return f"asked to leave for {task.stop_cause}; {left} of grace are left"
            purpose = f" to make room for {_preemptor(world, task)}" if task.freeing_for else ""
            goes_to = ", and continues on another node, where room is pledged to it" if task.is_moving else ""
            return f"asked to stop ({task.stop_reason}){purpose}{goes_to}; {left} of grace are left"
        case _:
            return str(task.state)


def _being_started(world: World, task: Task, now: Instant) -> str:
    others = 0 if task.node is None else world.use[task.node].starting - 1
    beside = (
        "" if others <= 0 else f", and so {'is 1 other' if others == 1 else f'are {others} others'} there"
    )
    return f"; it is being started{beside}{_slowly(world, task, now)}"


def _slowly(world: World, task: Task, now: Instant) -> str:
    """Return a text about a start that takes long; empty if it does not."""
    since = task.ordered_at or task.admitted_at
    if since is None or task.node is None or now - since < SLOW_START_SECONDS:
        return ""
    sample = world.node_samples.get(task.node)
    busy = f", whose CPUs are {sample.cpu:.0%} busy" if sample is not None and sample.cpu >= BUSY_CPU else ""
    return f"; starts are slow on {task.node}{busy}: it has taken {in_time(now - since)} so far"


def _whereabouts(task: Task) -> str:
    nodes = sorted(nodes_of(task))
    names = ", ".join(nodes[:3]) + (f" and {len(nodes) - 3} more" if len(nodes) > 3 else "")
    match task.holder:
        case Run() | WorkerSeat() | External() | Model():
            return names
        case Gang(members):
            return f"{names}, {_ranks(members, has_started=task.started_at is not None)}"
        case Inference():
            return f"model {task.demand.answered_by}"
        case _:
            assert_never(task.holder)


def _ranks(members: tuple[Member, ...], *, has_started: bool) -> str:
    if not has_started:
        ready = sum(member.state is MemberState.READY for member in members)
        return f"{ready} of its {len(members)} ranks ready"
    left_early = sum(not member.takes_part for member in members)
    joining = sum(member.is_joining for member in members)
    stopped_early = f", {left_early} more stopped early" if left_early else ""
    more = f", {joining} more joining" if joining else ""
    ranks = len(members) - left_early - joining
    return f"{ranks} {'rank' if ranks == 1 else 'ranks'}{more}{stopped_early}"


def _missing_ranks(world: World, task: Task, policy: Policy, now: Instant) -> str:
    """Return a text about why a running elastic gang has fewer ranks than it may have; empty while ranks are
    joining, or once one is done."""
    members = members_of(task)
    count, failed = len(task.demand.bundles), failed_joins(members)
    missing = count - sum(not member.has_ended for member in members)
    if missing <= 0 or any(member.is_joining or member.has_finished for member in members):
        return ""
    lack = f"; {missing} of its {count} ranks are missing"
    if bundles := vacant_bundles(task):
        explanation = _why_none_joins(world, task, bundles[0], policy, now)
        return f"{lack} and join when there is room that no waiting task can use; {explanation}"
    used = f"{len(members)} rank numbers are used (at most {MOST_RANKS})"
    return (
        f"{lack} until its next start: {failed} that joined failed (at most {MOST_FAILED_JOINS}), and {used}"
    )


def _why_none_joins(world: World, gang: Task, bundle: int, policy: Policy, now: Instant) -> str:
    if (pause := world.queue.pause_of(gang)) is not None:
        return _paused(pause, now)
    survey = survey_nodes(Draft(world), as_pending(gang, gang.demand.bundles[bundle]), policy, now)
    quota = quota_of(survey)
    if quota is not None and is_short(quota):
        return f"bundle {bundle} {quota_text(quota)}"
    if blockers := limit_blockers(survey) or room_blockers(survey, of_rank=True):
        return f"bundle {bundle}: {blockers[0].message}"
    return "there is some now: it is reserved, forbidden by the strategy, or taken in the next cycle"


def _overuse(world: World, task: Task) -> str:
    overused = [lease for lease in world.leases_of(task) if lease.overused_mb]
    return "".join(
        f"; it used {in_gib(lease.overused_mb, lease.mb)} of {world.ledgers[lease.device].device.label}, "
        f"of which it leased {in_gib(lease.mb, lease.overused_mb)}"
        for lease in overused
    )


def _preemptor(world: World, task: Task) -> str:
    other = world.tasks.get(task.freeing_for) if task.freeing_for else None
    return "a task that has ended" if other is None else task_label(other.id, other.tenant, task)


def _why(finding: DeviceFinding, task: Task) -> str:
    need_mb, free_mb = finding.need_mb or 0, finding.free_mb
    size_mb = finding.ledger.device.allocatable_mb
    match finding.verdict:
        case Verdict.GONE:
            return "its node no longer has it"
        case Verdict.NOT_WANTED:
            return f"does not match the demand ({constraints_text(task.demand)})"
        case Verdict.TOO_SMALL:
            return f"too small: {in_gib(size_mb, task.demand.gpu_mb or 0)} in all"
        case Verdict.NODE_NOT_READY:
            return "its node does not answer"
        case Verdict.CORDONED:
            return "its node is cordoned"
        case Verdict.DISK_FULL:
            return "a disk of its node is too full"
        case Verdict.ENVIRONMENT_PREPARING:
            return "its node does not have the environment of the task ready"
        case Verdict.GPU_CLOSED:
            closure = finding.ledger.device.closure
            return f"it is closed: {closure.reason if closure else ''}"
        case Verdict.HELD_BACK:
            return "background work may take no more of its node now"
        case Verdict.STALE:
            return "its memory use has not been reported lately"
        case Verdict.FITS:
            return f"fits: {in_gib(free_mb)} are free"
        case Verdict.KEPT_FOR_OTHERS:
            pledges = finding.ledger.pledges
            names = sorted(task_label(name, pledges[name].tenant, task) for name in pledges)
            return f"the free memory is pledged to {', '.join(names)}"
    others = used_without_lease(finding.ledger)
    more = f", {others}" if others else ""
    if task.demand.takes_whole_devices:
        return f"not empty: {in_gib(free_mb, size_mb)} of {in_gib(size_mb, free_mb)} are free{more}"
    return f"{in_gib(need_mb, free_mb)} are needed, {in_gib(free_mb, need_mb)} are free{more}"
