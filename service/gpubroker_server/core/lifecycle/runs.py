"""Changes of tasks and leases by the reports of agents."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, assert_never

from msgspec.structs import replace

from gpubroker_server.core.domain.decisions import Decision, Outcome, PledgeWrite
from gpubroker_server.core.domain.device import DiskReport, Node, NodeSample
from gpubroker_server.core.domain.holders import External, Gang, Inference, Model, Run, WorkerSeat
from gpubroker_server.core.domain.lease import HOLDERS_WITH_RUNS, LeaseState, PledgeEnd, Proof
from gpubroker_server.core.domain.model_orders import ModelsInUse, ServerGone, ServerIndex
from gpubroker_server.core.domain.orders import (
    Checkpointed,
    Ended,
    Ending,
    EnvironmentReported,
    Failure,
    Gone,
    Heartbeat,
    ItemsReported,
    Loaded,
    Logged,
    NodeLost,
    NodeReport,
    NodesListed,
    Progressed,
    Ready,
    Report,
    Sampled,
    Stacked,
    Started,
)
from gpubroker_server.core.domain.policy import Policy, next_retry_at
from gpubroker_server.core.domain.submission import WITHDRAWN
from gpubroker_server.core.domain.task import Move, Task, TaskState
from gpubroker_server.core.domain.units import DeviceKey, Instant, NodeName, TaskId, node_key
from gpubroker_server.core.lifecycle import array_items, external_leases, gang_runs, model_lifecycle
from gpubroker_server.core.lifecycle.stopping import (
    forget_order,
    overuse_failure,
    requeued_fields,
    timeout_failure,
)
from gpubroker_server.core.lifecycle.task_update import TaskUpdate, TaskUpdates
from gpubroker_server.core.world.world import World

_NODE_PROOFS = frozenset({Proof.BOOT_CHANGED, Proof.AGENT_RESTARTED})
"""The proofs that a run was lost with its node or its agent. Such a loss uses up no retry."""

_KILLED = Failure(
    "killed", "the process ended without a report: it was killed or it crashed; its log may say why"
)
_STOPPED_UNASKED = Failure(
    "stopped_unasked", "the run reports that a stop notice ended it, but none was given"
)

INFERENCE_REFUSED = "inference_refused"
"""The failure kind of an inference that its model refuses. It is not retried, since a retry would be refused
too."""

LOST_RETRIES = 3
"""The least number of retries of an inference whose server breaks off, since the request is rarely at fault.
The number is finite, so that a request which brings its server down each time ends."""

AGE_SHARE = 0.25
"""The share of its age after which an inference that its server could not take is sent again."""

AGAIN_MOST_SECONDS = 30.0
"""The longest pause, in seconds, before an inference that its server could not take is sent again."""


_NO_ARRAYS: Mapping[TaskId, array_items.ArrayWork] = MappingProxyType({})


def apply_reports(
    world: World,
    reports: Iterable[Report],
    now: Instant,
    policy: Policy,
    arrays: Mapping[TaskId, array_items.ArrayWork] = _NO_ARRAYS,
) -> list[Decision]:
    """Return at most one decision per task, in order of its first report, then one per lost node. `arrays`
    maps the id of an array to its work, which reports change."""
    updates = TaskUpdates(world, now)
    nodes: dict[NodeName, Decision] = {}
    for report in reports:
        match report:
            case Started():
                _started(updates[report.task], report, now)
            case Ready():
                _ready(updates[report.task], world, report, now)
            case Checkpointed():
                _checkpointed(updates[report.task], report, now)
            case ItemsReported():
                limit_bytes = policy.array_result_bytes
                array_items.reported(updates[report.task], world, arrays, report, now, limit_bytes)
            case Ended():
                _ended(updates[report.task], world, report, now, policy)
            case Gone():
                _gone(updates[report.task], world, report, now, policy)
            case NodeLost():
                nodes |= _give_up_node(world, report, updates, now, policy)
            case (
                NodeReport()
                | ServerIndex()
                | ServerGone()
                | ModelsInUse()
                | NodesListed()
                | EnvironmentReported()
                | Heartbeat()
                | Sampled()
                | DiskReport()
                | NodeSample()
                | Progressed()
                | Loaded()
                | Stacked()
                | Logged()
            ):
                pass
            case _:
                assert_never(report)
    decisions = updates.decisions()
    moved = {decision.subject for decision in decisions if decision.tasks}
    spare = array_items.without_spare_workers(world, arrays.values(), moved, now)
    return [*decisions, *spare, *nodes.values()]


def _started(update: TaskUpdate, report: Started, now: Instant) -> None:
    """Record that the process of a run has started. A gang starts only once all its ranks are ready."""
    task = update.live(report.fence, report.rank)
    if task is None:
        return
    ordered: dict[str, Any] = {}
    if task.state is TaskState.ADMITTED and report.ordered_at is not None:
        ordered_at = _credible(report.ordered_at, task, now)
        ordered["ordered_at"] = max(ordered_at, task.ordered_at or ordered_at)
    if task.state is TaskState.ADMITTED and not isinstance(task.holder, Gang):
        update.move(Move.STARTED, "started", started_at=_credible(report.at, task, now), **ordered)
    elif ordered:
        update.move(Move.CHANGED, "rank_started", **ordered)
    update.move_leases(report.fence, report.rank, LeaseState.HELD)


def _ready(update: TaskUpdate, world: World, report: Ready, now: Instant) -> None:
    task = update.live(report.fence, report.rank)
    if task is not None and isinstance(task.holder, Gang):
        update.move_leases(report.fence, report.rank, LeaseState.HELD)
        gang_runs.ready(update, world, task, report, _credible(report.at, task, now))


def _checkpointed(update: TaskUpdate, report: Checkpointed, now: Instant) -> None:
    """Keep the newest checkpoint. Of a gang, only rank 0's checkpoints count."""
    task = update.live(report.fence)
    if (
        report.rank
        or task is None
        or (update.checkpoint is not None and update.checkpoint.sequence >= report.sequence)
    ):
        return
    update.checkpoint = report
    update.move(Move.CHANGED, "checkpoint", checkpoint_at=_credible(report.at, task, now))


def _ended(update: TaskUpdate, world: World, report: Ended, now: Instant, policy: Policy) -> None:
    task = update.live(report.fence, report.rank)
    if task is None:
        return
    match task.holder:
        case Model():
            model_lifecycle.ended(update, task, report, now, policy)
        case Inference():
            _inference_ended(update, task, report, now, policy)
        case Run() | WorkerSeat() | Gang() | External():
            _run_ended(update, world, task, report, now, policy)
        case _:
            assert_never(task.holder)


def _run_ended(
    update: TaskUpdate, world: World, task: Task, report: Ended, now: Instant, policy: Policy
) -> None:
    # Agents and runs of earlier releases take exit code 0 for success, also of a command that handled the
    # stop notice and gave up its work (ADR 126).
    if report.is_unproven and task.state is TaskState.STOPPING:
        report = replace(report, ending=Ending.STOPPED, result=None)
    forget = forget_order(world, task, report.rank)
    at = _credible(report.at, task, now)
    if isinstance(task.holder, Gang):
        failure = None if report.ending is Ending.SUCCEEDED else _failure_of(report)
        gang_runs.ended(update, world, report, _outcome(report, at, failure), now, policy)
    # Before the check for STOPPING: a result that arrives before the run is confirmed gone is accepted.
    elif report.ending is Ending.SUCCEEDED:
        update.outcome = _outcome(report, at, None)
        update.move(Move.SUCCEEDED, "ended", finished_at=at)
    elif task.state is TaskState.STOPPING:
        _ended_by_stop(update, world, task, report, at)
    elif report.ending is Ending.NEVER_STARTED:
        # No retry is used up. The pause keeps an agent that refuses all starts from being asked every cycle.
        _requeue(update, "never_started", not_before=next_retry_at(1, now, policy))
    else:
        update.outcome = _outcome(report, at, _failure_of(report))
        update.failed(_with_retries(task, report), at, policy)
    update.move_leases(report.fence, report.rank, LeaseState.RELEASING)
    update.orders.append(forget)


def _ended_by_stop(update: TaskUpdate, world: World, task: Task, report: Ended, at: Instant) -> None:
    """Keep the outcome of a run that ended after its stop notice. The task moves on once its process is
    proven to be gone."""
    if report.ending is Ending.NEVER_STARTED:
        return
    stop_reason = task.stop_reason
    failure = (
        timeout_failure(task, stop_reason)
        or overuse_failure(stop_reason, world.leases_of(task))
        or report.failure
    )
    update.outcome = _outcome(report, at, failure)
    update.move(Move.CHANGED, "ended")


def _gone(update: TaskUpdate, world: World, report: Gone, now: Instant, policy: Policy) -> None:
    match update.task:
        case Task(holder=External()):
            external_leases.gone(update, world, report, now)
        case Task(holder=Inference()):
            _never_sent(update, report, now, policy)
        case _:
            _run_gone(update, world, report, now, policy)


def _run_gone(update: TaskUpdate, world: World, report: Gone, now: Instant, policy: Policy) -> None:
    # Release first, whatever the task's state: an earlier claim, or that of a task that has ended, may still
    # hold leases.
    update.release_leases(report.fence, report.rank, report.proof)
    task = update.live(report.fence, report.rank)
    if task is None:
        update.clear_freeing_for(report.fence)
        return
    forget = forget_order(world, task, report.rank)
    if isinstance(task.holder, Gang):
        gang_runs.gone(update, world, report, _KILLED, now, policy)
    elif task.state is TaskState.STOPPING:
        update.stopped("stopped", policy)
    elif report.proof == Proof.NEVER_STARTED:
        _requeue(update, "never_started", not_before=next_retry_at(1, now, policy))
    elif report.proof in _NODE_PROOFS:
        _requeue(update, "node_lost")
    else:
        update.outcome = Outcome(task.id, task.fence, Ending.LOST, now, failure=_KILLED)
        update.failed(task, now, policy)
    update.orders.append(forget)


def _requeue(update: TaskUpdate, reason: str, **changes: Any) -> None:
    update.move(Move.REQUEUED, reason, **requeued_fields(update.known, **changes))


def _give_up_node(
    world: World, report: NodeLost, updates: TaskUpdates, now: Instant, policy: Policy
) -> dict[NodeName, Decision]:
    """Give up the runs of a lost node, and return the decision that closes it, by node. If another
    incarnation of the node was lost, return nothing."""
    node = world.nodes.get(report.node)
    if node is None or node.incarnation != report.incarnation:
        return {}
    _give_up_runs(world, node, updates, now, policy)
    return _close(world, node)


def _give_up_runs(world: World, node: Node, updates: TaskUpdates, now: Instant, policy: Policy) -> None:
    """Give up the runs of a lost node. Their processes may still run, so every lease on the node goes into
    quarantine until its holder is proven to be gone.

    External holders release their leases themselves, and a model server's index says what it still holds.
    """
    for key in world.by_node.get(node.name, ()):
        for holding in world.ledgers[key].holdings.values():
            lease = holding.lease
            if lease.holder_kind not in HOLDERS_WITH_RUNS:
                continue
            updates[TaskId(lease.holder)].move_leases(lease.fence, lease.rank, LeaseState.QUARANTINED)
    for name in sorted(world.runs.get(node.name, ())):
        update = updates[name]
        task = update.task
        if task is None or not task.is_active:
            continue
        match task.holder:
            case Gang():
                gang_runs.node_lost(update, world, node.name, now, policy)
            case Run() | WorkerSeat() if task.state is TaskState.STOPPING:
                update.stopped("node_lost", policy)
            case Run() | WorkerSeat():
                _requeue(update, "node_lost")
            case External() | Model() | Inference():
                pass  # no agent runs these
            case _:
                assert_never(task.holder)


def _close(world: World, node: Node) -> dict[NodeName, Decision]:
    """Return the decision that closes the node to new work and dissolves the pledges on it, if there is
    anything to change."""
    pledges = dissolved_pledges(world, (node_key(node.name), *world.by_node.get(node.name, ())))
    if not node.ready and not pledges:
        return {}
    closed = replace(node, ready=False, version=node.version + 1)
    return {node.name: Decision(node.name, "node_lost", nodes=(closed,), pledges=pledges)}


def dissolved_pledges(world: World, devices: Iterable[DeviceKey]) -> tuple[PledgeWrite, ...]:
    """Return the end of all pledges of every task that waits for room on these devices. A node is given as
    its `node_key`."""
    lost = frozenset(devices)
    waiting = [preemptor for preemptor, pledges in world.pledges.items() if lost & pledges.keys()]
    return tuple(
        PledgeWrite(pledge, PledgeEnd.DISSOLVED)
        for preemptor in sorted(waiting)
        for pledge in world.pledges[preemptor].values()
    )


def _outcome(report: Ended, at: Instant, failure: Failure | None) -> Outcome:
    return Outcome(
        task=report.task,
        fence=report.fence,
        ending=report.ending,
        at=at,
        result=report.result if report.ending is Ending.SUCCEEDED else None,
        result_format=report.result_format,
        failure=failure,
        log_tail=report.log_tail,
    )


def _failure_of(report: Ended) -> Failure:
    if report.failure is not None:
        return report.failure
    return _STOPPED_UNASKED if report.ending is Ending.STOPPED else _KILLED


def _credible(at: Instant, task: Task, now: Instant) -> Instant:
    """Return a time that an agent reported, limited to the time between start or admission and now, because
    the agent's clock may be wrong."""
    earliest = task.started_at or task.admitted_at or now
    return Instant(min(max(at, earliest), now))


def _inference_ended(update: TaskUpdate, task: Task, report: Ended, now: Instant, policy: Policy) -> None:
    if report.ending is Ending.SUCCEEDED:
        update.outcome = _outcome(report, now, None)
        update.move(Move.SUCCEEDED, "ended", finished_at=now)
    elif task.state is TaskState.STOPPING:
        update.stopped("stopped", policy)
    elif report.ending is Ending.NEVER_STARTED:
        _requeue(update, "not_taken", not_before=_again_at(task, now, policy))
    else:
        update.outcome = _outcome(report, now, report.failure)
        update.failed(_with_retries(task, report), now, policy)


def _never_sent(update: TaskUpdate, report: Gone, now: Instant, policy: Policy) -> None:
    task = update.live(report.fence)
    if task is not None:
        at = report.at
        _inference_ended(update, task, Ended(task.id, task.fence, at, Ending.NEVER_STARTED), now, policy)


def _with_retries(task: Task, report: Ended) -> Task:
    if report.ending is Ending.LOST and isinstance(task.holder, Inference):
        return replace(task, max_retries=max(task.max_retries, LOST_RETRIES))
    if report.failure is not None and report.failure.kind in {INFERENCE_REFUSED, *WITHDRAWN}:
        return replace(task, max_retries=0)
    return task


def _again_at(task: Task, now: Instant, policy: Policy) -> Instant:
    """Return the time of the next try. The pause grows with the age of the inference."""
    pause = min(AGAIN_MOST_SECONDS, AGE_SHARE * (now - task.submitted_at))
    return Instant(now + max(policy.retry_first_seconds, pause))
