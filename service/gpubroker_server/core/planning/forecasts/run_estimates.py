"""What is to be expected of a task, going by what runs like it took."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import ceil, inf

from gpubroker_server.core.domain.device import Device
from gpubroker_server.core.domain.estimates import Sketch, Topic, What
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, Mib, Seconds, in_gib

Sketches = Mapping[Topic, Sketch]


@dataclass(frozen=True, slots=True)
class Size:
    """What a task that leaves its size to be learned is given, and why."""

    gpu_mb: Mib | None
    """MiB per device; None is a whole device, because too few runs are known."""
    p95_mb: Mib | None
    """As measured: with what a process costs of itself."""
    n: int
    """How many runs are known."""
    kind: str
    """Of the device that the runs had."""
    message: str


def learned_size(
    sketches: Sketches, tenant: str, subject: str, devices: Iterable[Device], policy: Policy
) -> Size:
    """What 95 of 100 runs of this subject stayed below, and a margin.

    `devices`: those that the task may use. Of several kinds the one counts on which runs took most, since it
    may come to any of them. What a process costs of itself was measured with the rest and is leased apart, so
    it is taken off. Never more than the largest device of that kind can give: there the runs had room, too.
    """
    offers: dict[str, int] = {}
    costs: dict[str, int] = {}
    for device in devices:
        costs[device.kind] = device.context_mb
        offers[device.kind] = max(device.allocatable_mb - device.context_mb, offers.get(device.kind, 0))
    known = {kind: sketches.get(Topic(tenant, subject, kind, What.GPU_MB), Sketch()) for kind in offers}
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


def _whole(subject: str, n: int, policy: Policy) -> Size:
    if not subject:
        message = "nothing is learned of a task without model type, name and entrypoint: it gets whole GPUs"
    else:
        message = (
            f"{n} runs of {subject} have been measured, and it takes {policy.learned_least_runs} to know its "
            "size: it gets whole GPUs"
        )
    return Size(None, None, n, "", message)


def size_of_ranks(sizes: Mapping[str, Size]) -> Size | None:
    """Of a gang, from the sizes of its ranks by how people call them: the largest, and what to say of all.

    None if no rank asked for one.
    """
    if len(set(sizes.values())) < 2:
        return next(iter(sizes.values()), None)
    largest = max(sizes.values(), key=lambda size: inf if size.gpu_mb is None else size.gpu_mb)
    return replace(largest, message="; ".join(f"{who}: {size.message}" for who, size in sizes.items()))


@dataclass(frozen=True, slots=True)
class Remaining:
    """How much longer a run is expected to take: one in two takes no longer than the first, nine in ten no
    longer than the second."""

    p50_seconds: Seconds
    p90_seconds: Seconds
    n: int
    """Of how many runs this speaks: those that took longer than this one has taken already. 0: it is what the
    task's submitter said."""


def remaining_seconds(task: Task, sketches: Sketches, now: Instant, *, kind: str = "") -> Remaining | None:
    """As its submitter said, else going by runs like it. `kind`: of the device that the run has.

    None if it does not run, or has outlasted what was said and all that are known.
    """
    if task.started_at is None or not task.is_active:
        return None
    elapsed = max(0.0, now - task.started_at)
    if task.expected_seconds is not None and task.expected_seconds > elapsed:
        stated = Seconds(task.expected_seconds - elapsed)
        return Remaining(stated, stated, 0)
    known = sketches.get(Topic(task.tenant, task.subject, kind, What.SECONDS))
    if known is None:
        return None
    longer = known.above(elapsed)
    p50, p90 = longer.quantile(0.5), longer.quantile(0.9)
    if p50 is None or p90 is None:
        return None
    return Remaining(Seconds(max(0.0, p50 - elapsed)), Seconds(max(0.0, p90 - elapsed)), longer.n)


def run_seconds(task: Task, sketches: Sketches, policy: Policy, *, kind: str = "") -> Remaining | None:
    """How long a run takes that begins now: as its submitter said, else going by enough runs like it.

    One that goes on from a checkpoint may be done earlier. None if nobody knows.
    """
    if task.expected_seconds is not None:
        return Remaining(task.expected_seconds, task.expected_seconds, 0)
    known = sketches.get(Topic(task.tenant, task.subject, kind, What.SECONDS))
    if known is None or known.n < max(1, policy.learned_least_runs):
        return None
    p50, p90 = known.quantile(0.5), known.quantile(0.9)
    return Remaining(Seconds(p50 or 0.0), Seconds(p90 or 0.0), known.n)


def whole_run_seconds(
    task: Task, sketches: Sketches, policy: Policy, kinds: Iterable[str]
) -> tuple[Seconds, Seconds]:
    """(p50, p90) of a run that begins now, on whichever of these kinds it takes longest, at most up to its
    time limit; infinite if nobody knows."""
    limit = inf if task.timeout_seconds is None else task.timeout_seconds + task.grace_seconds
    p50 = p90 = 0.0
    for kind in kinds:
        known = run_seconds(task, sketches, policy, kind=kind)
        if known is None:
            return Seconds(limit), Seconds(limit)
        p50, p90 = max(p50, known.p50_seconds), max(p90, known.p90_seconds)
    return Seconds(min(limit, p50)), Seconds(min(limit, p90))
