"""Find work that waits in vain, fails again and again, starts slowly, or is badly spread."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from gpubroker_server.core.control.findings.finding import Finding, Severity, note, warning
from gpubroker_server.core.control.memory_failures import LATELY_SECONDS, MemoryFailures
from gpubroker_server.core.control.waiting_calls import WaitingCalls
from gpubroker_server.core.domain.device import Node, NodeSample
from gpubroker_server.core.domain.holders import Run, WorkerSeat
from gpubroker_server.core.domain.node_capacity import BUSY_CPU, SLOW_START_SECONDS
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Instant, NodeName, in_time
from gpubroker_server.core.world.ledger import DeviceLedger
from gpubroker_server.core.world.world import World

FREE_SHARE = 0.1
"""The free share of a node's GPU memory above which waiting work is not kept out by memory."""
BUSY_NETWORK, BUSY_GPU = 0.9, 0.5
BUSY_CORE_PERCENT = 80.0
"""The CPU use of a worker, in percent of one core, from which it is busy. A Python process computes on about
one core."""
LONELY_SHARE = 0.9
"""The share of the work of all nodes from which one node counts as having all the work."""
FEWEST_HOLDERS = 4
"""The number of holders on one node from which their concentration is no longer chance."""


class StuckTask(NamedTuple):
    """A task that will not start without a change."""

    task: Task
    why: str
    remedy: str


def waits_for_ever(stuck: Iterable[StuckTask]) -> Iterator[Finding]:
    for task, reason, remedy in stuck:
        evidence, since = {"task": task.id}, task.queued_at
        cause = f"{task.name} waits and will not start by itself: {reason}"
        yield Finding(
            "pending-for-ever", task.id, Severity.WARNING, cause, evidence, remedy, since, task.tenant
        )


_MEMORY_KINDS = {
    "cuda": ("GPU memory", "its framework found no room on the GPU", "gpubroker estimates {subject}"),
    "host": ("host memory", "its runs took more than their memory_mb", "gpubroker explain {task}"),
    "node": ("host memory", "Ray killed its runs for lack of memory on the node", "gpubroker nodes"),
}


def repeated_memory_failures(failures: Sequence[MemoryFailures]) -> Iterator[Finding]:
    for failure in failures:
        memory_kind, explanation, remedy = _MEMORY_KINDS[failure.memory]
        within = in_time(max(1.0, failure.last_at - failure.first_at))
        yield Finding(
            f"out-of-memory-{failure.memory}",
            failure.name,
            Severity.WARNING,
            f"{failure.name} ran out of {memory_kind} {failure.times} times within {within}: {explanation}.",
            {"task": failure.task, "failures": failure.times},
            remedy.format(subject=failure.name, task=failure.task),
            failure.first_at,
            failure.tenant,
        )


def all_on_one_node(world: World) -> Iterator[Finding]:
    """Yield a finding if one of several open nodes has all the work while tasks wait. Work is leased GPU
    memory, or CPUs where no GPU is leased."""
    open_nodes = [node.name for node in world.nodes.values() if node.ready and not node.cordoned]
    work_of = {name: _leased(world, name) for name in open_nodes if world.by_node.get(name)}
    if not any(amount for amount, _ in work_of.values()):
        work_of = {name: (world.use[name].cpu, world.use[name].runs) for name in open_nodes}
    total = sum(amount for amount, _ in work_of.values())
    if len(work_of) < 2 or not total or not world.queue.groups:
        return
    fullest = max(work_of, key=lambda name: (work_of[name], name))
    amount, holders = work_of[fullest]
    others = [name for name in work_of if name != fullest]
    if amount < LONELY_SHARE * total or holders < FEWEST_HOLDERS:
        return
    waiting = sum(map(len, world.queue.groups.values()))
    cause = f"{fullest} has all the work and tasks wait, although {len(others)} other nodes take tasks."
    remedy = "gpubroker ps --state pending, then gpubroker explain TASK: what keeps it from the other nodes?"
    evidence = {"share": round(amount / total, 3), "nodes": len(work_of), "waiting": waiting}
    yield warning("all-on-one-node", fullest, cause, remedy, evidence)


def _leased(world: World, node: NodeName) -> tuple[float, int]:
    """Return (leased MiB, number of leases) of the node's GPUs."""
    ledgers = [world.ledgers[key] for key in world.by_node[node]]
    return sum(ledger.leased_mb() for ledger in ledgers), sum(len(ledger.holdings) for ledger in ledgers)


def slow_starts(world: World, now: Instant) -> Iterator[Finding]:
    """Yield a finding for each node whose runs took, or are taking, long to begin."""
    slow: dict[NodeName, list[float]] = {}
    for name in world.active:
        task = world.tasks[name]
        seconds = _start_seconds(task, now)
        if task.node is not None and seconds >= SLOW_START_SECONDS:
            slow.setdefault(task.node, []).append(seconds)
    for node, starts in sorted(slow.items()):
        cause = (
            f"Processes of runs take long to start on {node}: {max(starts):.0f} s and less for "
            f"{len(starts)} of its runs."
        )
        remedy = (
            "raise ray.spares (processes kept ready), and look at the node's disk and CPU: gpubroker nodes"
        )
        evidence: dict[str, str | float] = {"runs": len(starts), "longest_seconds": round(max(starts), 1)}
        sample = world.node_samples.get(node)
        if sample is not None and sample.cpu >= BUSY_CPU:
            # Processes that are kept ready would have to start there as well.
            cause += " Its CPUs are busy."
            remedy = (
                f"let fewer runs share the node (lower ray.max_runs or ray.cpu), or gpubroker cordon {node}"
            )
            evidence["cpu"] = round(sample.cpu, 3)
        yield warning("slow-starts", node, cause, remedy, evidence)


def _start_seconds(task: Task, now: Instant) -> float:
    """Return how long the task's process takes, or lately took, to start; 0 if it did not start lately, or if
    no node agent starts a single process for it."""
    ordered_at = task.ordered_at or task.admitted_at
    # A gang starts when the last of its ranks is ready.
    if not isinstance(task.holder, (Run, WorkerSeat)) or ordered_at is None:
        return 0.0
    if task.state is TaskState.ADMITTED:
        return now - ordered_at
    if task.started_at is None or now - task.started_at > LATELY_SECONDS:
        return 0.0
    return task.started_at - ordered_at


def bottlenecks(world: World, policy: Policy, now: Instant) -> Iterator[Finding]:
    """Yield a finding for each resource, other than GPU memory, that keeps work waiting or GPUs idle."""
    for node in world.nodes.values():
        if node.ready:
            yield from _of_node(world, node, policy, now)
    asked = {name for demand in world.queue.classes for name, _ in demand.counted}
    for limit in policy.custom_limits:
        used = world.custom_use.get(limit.name, 0.0)
        if limit.name in asked and not limit.per_node and used >= limit.amount:
            cause = f"Tasks wait because as many run as the limit {limit.name} allows."
            remedy = f"raise {limit.name} in policy, if the licence or machine behind it bears more"
            yield note("limit-used-up", limit.name, cause, remedy, {"used": used, "limit": limit.amount})


def _of_node(world: World, node: Node, policy: Policy, now: Instant) -> Iterator[Finding]:
    ledgers = [world.ledgers[key] for key in world.by_node.get(node.name, ())]
    free_mb = sum(ledger.offered_mb() for ledger in ledgers)
    whole_mb = sum(ledger.device.allocatable_mb for ledger in ledgers)
    use = world.use[node.name]
    if world.queue.groups and free_mb > FREE_SHARE * whole_mb:
        evidence: dict[str, str | float] = {"free_mb": free_mb, "runs": use.runs, "cpu": use.cpu}
        if 0 < node.max_runs <= use.runs:
            cause = f"GPU memory is free on {node.name}, but all its {node.max_runs} run slots are taken."
            remedy = "raise ray.max_runs (GPUBROKER_RAY_MAX_RUNS), then restart the service"
            yield warning("run-slots-used-up", node.name, cause, remedy, evidence)
        elif use.cpu >= node.cpu > 0:
            cause = f"GPU memory is free on {node.name}, but runs were given all its {node.cpu:g} CPUs."
            remedy = "gpubroker submit --cpu: ask for fewer, or gpubroker profiles: lower the default"
            yield warning("cpus-used-up", node.name, cause, remedy, evidence)
    sample, period = world.node_samples.get(node.name), policy.sample_period_seconds
    if sample is None or sample.is_stale(now, period):
        return
    leased = [ledger for ledger in ledgers if _is_worked_on(ledger) and not ledger.is_stale(now, period)]
    used = [
        ledger.sample.utilization
        for ledger in leased
        if ledger.sample and ledger.sample.utilization is not None
    ]
    if used and (mean := sum(used) / len(used)) < BUSY_GPU:
        yield from _slowed_down(node.name, sample, mean)


def _is_worked_on(ledger: DeviceLedger) -> bool:
    """Return True if a run has a lease on the device, or a model there is computing: models that are asked
    nothing wait for no CPU."""
    if any(not holding.is_on_server for holding in ledger.holdings.values()):
        return True
    is_used = ledger.sample is not None and bool(ledger.sample.utilization)
    return is_used and bool(ledger.holdings)


def _slowed_down(node: NodeName, sample: NodeSample, gpu_utilization: float) -> Iterator[Finding]:
    """Yield a finding for each resource for which the node's leased GPUs wait."""
    evidence = {"gpu_utilization": round(gpu_utilization, 3)}
    if sample.cpu >= BUSY_CPU:
        cause = f"The CPUs of {node} are busy and its GPUs wait for them."
        remedy = f"gpubroker cordon {node}, or submit with more CPUs each (--cpu): fewer runs share them"
        yield warning("cpu-bottleneck", node, cause, remedy, {"cpu": round(sample.cpu, 3), **evidence})
    if sample.network is not None and sample.network >= BUSY_NETWORK:
        cause = f"The network of {node} is busy and its GPUs wait for it."
        remedy = (
            f"keep what runs on {node} reads on its own disks; gpubroker cordon {node}: fewer runs share it"
        )
        yield warning(
            "network-bottleneck", node, cause, remedy, {"network": round(sample.network, 3), **evidence}
        )


def calls_wait(sets: Sequence[WaitingCalls]) -> Iterator[Finding]:
    for waiting in sets:
        is_busy = waiting.cpu_percent >= BUSY_CORE_PERCENT
        explanation = (
            "each worker uses up a core"
            if is_busy
            else f"they use little CPU, and a worker answers {waiting.max_concurrency} calls at once"
        )
        more = f"gpubroker workers scale {waiting.workers_of} {2 * waiting.workers}"
        yield Finding(
            "calls-wait",
            waiting.name,
            Severity.WARNING,
            f"As many calls wait for the workers of {waiting.name} as are under way: {explanation}.",
            {
                "set": waiting.workers_of,
                "running": waiting.running,
                "waiting": waiting.waiting,
                "cpu_percent": round(waiting.cpu_percent),
            },
            more if is_busy else f"a set with a higher max_concurrency, or {more}",
            tenant=waiting.tenant,
        )
