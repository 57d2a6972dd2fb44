"""The size of a task that leaves it to be learned, from what past runs like it used."""

from collections.abc import Iterable, Mapping
from math import ceil, inf

from gpubroker.wire.forecasts import Sizing
from msgspec.structs import replace

from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.device import Device
from gpubroker_server.core.domain.estimates import Sketch, SketchKey, What
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import in_gib

Sketches = Mapping[SketchKey, Sketch]


UNKNOWN_SIZE = Sizing(None, None, 0, None, "")


def learned_size(
    sketches: Sketches, tenant: str, subject: str, devices: Iterable[Device], policy: Policy
) -> Sizing:
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
    context_text = f" beside {in_gib(costs[kind])} for each process" if costs[kind] else ""
    message = (
        f"95 of 100 runs of {subject} used at most {in_gib(p95_mb)} of a GPU ({n} runs on {kind}); "
        f"with a margin of {policy.learned_margin:.0%} that makes {in_gib(gpu_mb)}{context_text}"
    )
    return Sizing(gpu_mb, p95_mb, n, kind, message)


def unstated_size(demand: Demand) -> Sizing | None:
    """Return the size of a task that neither states nor learns one; None for all other tasks."""
    if not any(part.states_no_size for part in (demand, *demand.bundles)):
        return None
    message = (
        "it takes whole GPUs, because it states no size; state gpu_mb, or learned: what earlier runs used"
    )
    return Sizing(None, None, 0, None, message)


def _whole(subject: str, n: int, policy: Policy) -> Sizing:
    if not subject:
        message = "it gets whole GPUs: nothing is learned of a task without model type, name and entrypoint"
    else:
        message = (
            f"it gets whole GPUs: {n} runs of {subject} have been measured, and it takes "
            f"{policy.learned_least_runs} to know its size"
        )
    return Sizing(None, None, n, None, message)


def size_of_ranks(sizes: Mapping[str, Sizing]) -> Sizing | None:
    """Return the largest size of a gang's ranks, by rank name, with all their messages. None without any."""
    if len(set(sizes.values())) < 2:
        return next(iter(sizes.values()), None)
    largest = max(sizes.values(), key=lambda size: inf if size.gpu_mb is None else size.gpu_mb)
    return replace(largest, message="; ".join(f"{rank}: {size.message}" for rank, size in sizes.items()))
