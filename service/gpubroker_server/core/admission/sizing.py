"""Learn the size of a task from the memory that earlier runs like it used."""

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
    """Return the 95th percentile of the memory that runs of this subject used, plus a margin.

    `devices` are those that the task may use. Of their kinds, the one with the largest runs counts. The
    `context_mb` of the process is leased separately, so it is subtracted. The size is at most what the
    largest device of that kind offers.
    """
    offers: dict[str, int] = {}
    contexts: dict[str, int] = {}
    for device in devices:
        contexts[device.kind] = device.context_mb
        offers[device.kind] = max(device.allocatable_mb - device.context_mb, offers.get(device.kind, 0))
    sketch_of = {
        kind: sketches.get(SketchKey(tenant, subject, kind, What.GPU_MB), Sketch()) for kind in offers
    }
    p95_of = {
        kind: sketch.quantile(0.95) or 0.0
        for kind, sketch in sketch_of.items()
        if sketch.n >= policy.learned_least_runs
    }
    if not p95_of:
        return _whole(subject, max((sketch.n for sketch in sketch_of.values()), default=0), policy)
    kind = max(sorted(p95_of), key=lambda kind: p95_of[kind])
    p95_mb, n = ceil(p95_of[kind]), sketch_of[kind].n
    with_margin = ceil(p95_of[kind] * (1 + policy.learned_margin)) - contexts[kind]
    gpu_mb = max(1, min(with_margin, offers[kind]))
    context_text = f" beside {in_gib(contexts[kind])} for each process" if contexts[kind] else ""
    message = (
        f"95 of 100 runs of {subject} used at most {in_gib(p95_mb)} of a GPU ({n} runs on {kind}); "
        f"with a margin of {policy.learned_margin:.0%} that makes {in_gib(gpu_mb)}{context_text}"
    )
    return Sizing(gpu_mb, p95_mb, n, kind, message)


def unstated_size(demand: Demand) -> Sizing | None:
    """Return the size of a task that neither states a size nor learns it; None for all other tasks."""
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
    """Return the largest size of a gang's ranks, with the messages of all sizes; None if there are no sizes.
    `sizes` is keyed by the text that names the ranks."""
    if len(set(sizes.values())) < 2:
        return next(iter(sizes.values()), None)
    largest = max(sizes.values(), key=lambda size: inf if size.gpu_mb is None else size.gpu_mb)
    return replace(largest, message="; ".join(f"{rank}: {size.message}" for rank, size in sizes.items()))
