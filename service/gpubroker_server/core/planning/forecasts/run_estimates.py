"""Size and run time of a task, estimated from past runs like it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import ceil, inf

from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.device import Device
from gpubroker_server.core.domain.estimates import Sketch, SketchKey, What
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, Mib, Seconds, in_gib

Sketches = Mapping[SketchKey, Sketch]


@dataclass(frozen=True, slots=True)
class Size:
    """The size given to a task that leaves it to be learned, and why."""

    gpu_mb: Mib | None
    """Per device; None: a whole device, because too few runs are known."""
    p95_mb: Mib | None
    """As measured, with the memory that a process itself takes."""
    n: int
    """Known runs."""
    kind: str
    """Kind of device of those runs."""
    message: str


def learned_size(
    sketches: Sketches, tenant: str, subject: str, devices: Iterable[Device], policy: Policy
) -> Size:
    """The 95th percentile of runs of this subject, plus a margin.

    `devices`: those that the task may use; the kind with the largest runs counts. The memory that a process
    itself takes is leased separately, so it is subtracted. At most what the largest device of that kind has.
    """
    offers: dict[str, int] = {}
    costs: dict[str, int] = {}
    for device in devices:
        costs[device.kind] = device.context_mb
        offers[device.kind] = max(device.allocatable_mb - device.context_mb, offers.get(device.kind, 0))
    known = {kind: sketches.get(SketchKey(tenant, subject, kind, What.GPU_MB), Sketch()) for kind in offers}
    enough = {
        kind: sketch.quantile(0.95) or 0.0
        for kind, sketch in known.items()
        if sketch.n >= policy.learned_least_runs
    }
    if not enough:
        return _whole(subject, max((sketch.n for sketch in known.values()), default=0), policy)
    kind = max(sorted(enough), key=lambda kind: enough[kind])
    p95_mb, n = ceil(enough[kind]), known[kind].n
    with_margin = ceil(enough[kind] * (1 + policy.learned_margin)) - costs[kind]
    gpu_mb = max(1, min(with_margin, offers[kind]))
    beside = f" beside {in_gib(costs[kind])} for each process" if costs[kind] else ""
    message = (
        f"95 of 100 runs of {subject} used at most {in_gib(p95_mb)} of a GPU ({n} runs on {kind}); "
        f"with a margin of {policy.learned_margin:.0%} that makes {in_gib(gpu_mb)}{beside}"
    )
    return Size(Mib(gpu_mb), Mib(p95_mb), n, kind, message)


def unstated_size(demand: Demand) -> Size | None:
    """For a task whose size is neither stated nor learned; None for all others."""
    if not any(part.states_no_size for part in (demand, *demand.bundles)):
        return None
    message = (
        "it takes whole GPUs, because it states no size; state gpu_mb, or learned: what earlier runs used"
    )
    return Size(None, None, 0, "", message)


def _whole(subject: str, n: int, policy: Policy) -> Size:
    if not subject:
        message = "it gets whole GPUs: nothing is learned of a task without model type, name and entrypoint"
    else:
        message = (
            f"it gets whole GPUs: {n} runs of {subject} have been measured, and it takes "
            f"{policy.learned_least_runs} to know its size"
        )
    return Size(None, None, n, "", message)


def size_of_ranks(sizes: Mapping[str, Size]) -> Size | None:
    """The largest size of a gang's ranks, by rank name, with all their messages. None without any."""
    if len(set(sizes.values())) < 2:
        return next(iter(sizes.values()), None)
    largest = max(sizes.values(), key=lambda size: inf if size.gpu_mb is None else size.gpu_mb)
    return replace(largest, message="; ".join(f"{rank}: {size.message}" for rank, size in sizes.items()))


@dataclass(frozen=True, slots=True)
class Remaining:
    """How much longer a run is expected to take: median and 90th percentile."""

    p50_seconds: Seconds
    p90_seconds: Seconds
    n: int
    """Past runs that took longer than this one so far. 0: stated at submission."""


def remaining_seconds(task: Task, sketches: Sketches, now: Instant, *, kind: str = "") -> Remaining | None:
    """As stated at submission, else from runs like it; None if it does not run, or has outlasted every
    estimate. `kind`: of the run's device."""
    if task.started_at is None or not task.is_active:
        return None
    elapsed = max(0.0, now - task.started_at)
    if task.expected_seconds is not None and task.expected_seconds > elapsed:
        stated = Seconds(task.expected_seconds - elapsed)
        return Remaining(stated, stated, 0)
    known = sketches.get(SketchKey(task.tenant, task.subject, kind, What.SECONDS))
    if known is None:
        return None
    longer = known.above(elapsed)
    p50, p90 = longer.quantile(0.5), longer.quantile(0.9)
    if p50 is None or p90 is None:
        return None
    return Remaining(Seconds(max(0.0, p50 - elapsed)), Seconds(max(0.0, p90 - elapsed)), longer.n)


def run_seconds(task: Task, sketches: Sketches, policy: Policy, *, kind: str = "") -> Remaining | None:
    """How long a run that begins now takes: as stated at submission, else from enough runs like it. Ignores
    checkpoints. None if unknown."""
    if task.expected_seconds is not None:
        return Remaining(task.expected_seconds, task.expected_seconds, 0)
    known = sketches.get(SketchKey(task.tenant, task.subject, kind, What.SECONDS))
    if known is None or known.n < max(1, policy.learned_least_runs):
        return None
    p50, p90 = known.quantile(0.5), known.quantile(0.9)
    return Remaining(Seconds(p50 or 0.0), Seconds(p90 or 0.0), known.n)


def whole_run_seconds(
    task: Task, sketches: Sketches, policy: Policy, kinds: Iterable[str]
) -> tuple[Seconds, Seconds]:
    """(p50, p90) of a run that begins now on the slowest of these kinds, up to its time limit; infinite if
    unknown."""
    limit = inf if task.timeout_seconds is None else task.timeout_seconds + task.grace_seconds
    p50 = p90 = 0.0
    for kind in kinds:
        known = run_seconds(task, sketches, policy, kind=kind)
        if known is None:
            return Seconds(limit), Seconds(limit)
        p50, p90 = max(p50, known.p50_seconds), max(p90, known.p90_seconds)
    return Seconds(min(limit, p50)), Seconds(min(limit, p90))
