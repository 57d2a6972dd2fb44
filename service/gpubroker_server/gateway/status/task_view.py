"""Pure functions that make the view of a task from its row and from facts of the World."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import groupby
from operator import attrgetter
from typing import Any

from gpubroker.wire.answered import Time
from gpubroker.wire.forecasts import Expected, ForecastsKept
from gpubroker.wire.quarantine import Quarantined
from gpubroker.wire.tasks import Demand as ShownDemand
from gpubroker.wire.tasks import (
    Dependency,
    Failure,
    Pending,
    Phases,
    RankDemand,
    RetryCause,
    Run,
    TaskDevice,
    TaskRank,
    TaskResources,
    TaskUrls,
)
from gpubroker.wire.tasks import Progress as ShownProgress
from gpubroker.wire.tasks import Task as Shown
from gpubroker.wire.tasks import TaskState as ShownState
from msgspec import Struct

from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.holders import Gang, Member, MemberState
from gpubroker_server.core.domain.lease import Lease
from gpubroker_server.core.domain.policy import band_of
from gpubroker_server.core.domain.progress import Progress
from gpubroker_server.core.domain.submission import INFERENCE_KIND as INFERENCE
from gpubroker_server.core.domain.submission import RunSpec
from gpubroker_server.core.domain.task import RetryOn, Task, TaskState
from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.core.planning.forecasts.forecast_rounds import ExpectedStart, forecast_accuracies
from gpubroker_server.core.planning.forecasts.reservations import Basis
from gpubroker_server.core.planning.forecasts.run_estimates import Remaining
from gpubroker_server.core.world.phases import Phase
from gpubroker_server.core.world.world import World
from gpubroker_server.http.proxies import current_prefix
from gpubroker_server.ports.store import TaskRecord


class Live(Struct, frozen=True):
    """Facts about a task that its row does not have."""

    leases: list[Lease]
    uuids: Mapping[str, str]
    """Device key -> UUID."""
    phases: Phases | None = None
    progress: Progress | None = None
    pending: Pending | None = None
    eta: Expected | None = None
    quarantine: tuple[Quarantined, ...] = ()
    notice: str = ""


def task_view(record: TaskRecord, live: Live) -> Shown:
    """Return a task as answers show it."""
    task, spec, ranks = record.task, record.spec, None
    match task.holder:
        case Gang(members) if members:
            ranks = tuple(_rank(task, member, live) for member in members)
        case _:
            pass
    url = f"{current_prefix.get()}/tasks/{task.id}"
    return Shown(
        **dict(zip(_SAME_IN_TASK, _same_of_task(task), strict=True)),
        **dict(zip(_SAME_IN_SPEC, _same_of_spec(spec), strict=True)),
        **_times(task),
        state=_SHOWN_STATES[task.state],
        band=band_of(task.priority)[0],
        run=Run(
            spec.kind,
            None if spec.kind == INFERENCE else spec.entrypoint or None,
            spec.command or None,
            spec.entrypoint if spec.kind == INFERENCE else None,
        ),
        resources=_resources(task.demand, spec.roles),
        placement=task.demand.placement,
        retry_on=_values_of(task.retry_on),
        after=tuple(Dependency(dependency.task, dependency.on_failure.value) for dependency in task.after)
        if task.after
        else (),
        attempt=task.fence,
        devices=device_shares(live.leases, live) if live.leases else (),
        ranks=ranks,
        phases=live.phases,
        progress=None if live.progress is None else _progress(live.progress),
        pending=live.pending,
        eta=live.eta,
        error=failure_of(record.failure),
        quarantine=live.quarantine,
        notice=live.notice,
        urls=TaskUrls(url, f"{url}/result", f"{url}/events", f"{url}/explain", f"{url}/cancel"),
    )


_TIMES = (
    "submitted_at",
    "admitted_at",
    "started_at",
    "checkpoint_at",
    "not_before",
    "expires_at",
    "deadline_at",
    "finished_at",
    "stop_deadline_at",
)
_times_of = attrgetter(*_TIMES)
_TRANSFORMED = frozenset({*_TIMES, "state", "retry_on", "after"})
_SAME_IN_TASK = tuple(
    name for name in Shown.__struct_fields__ if name in Task.__struct_fields__ and name not in _TRANSFORMED
)
_SAME_IN_SPEC = tuple(name for name in Shown.__struct_fields__ if name in RunSpec.__struct_fields__)
"""The fields that answers take over unchanged from the specification; `_SAME_IN_TASK` lists those of the
task. A field is included if both types have its name."""
_same_of_task, _same_of_spec = attrgetter(*_SAME_IN_TASK), attrgetter(*_SAME_IN_SPEC)
_NO_TIMES = dict.fromkeys(_TIMES)
_SHOWN_STATES = {state: ShownState(state) for state in TaskState}


def _times(task: Task) -> dict[str, Any]:
    """Return the times of a task as answers show them."""
    times = zip(_TIMES, _times_of(task), strict=True)
    return {**_NO_TIMES, **{name: Time.at(seconds) for name, seconds in times if seconds is not None}}


@lru_cache
def _values_of(causes: tuple[RetryOn, ...]) -> tuple[RetryCause, ...]:
    return tuple(cause.value for cause in causes)


@lru_cache(4096)
def _resources(demand: Demand, roles: tuple[str, ...]) -> TaskResources:
    """Return the resources of a demand. The result is cached, because many tasks have few different
    demands."""
    return TaskResources(**_amounts(demand), **_wishes(demand), roles=roles)


def phases_view(seconds: Mapping[Phase, Seconds]) -> Phases:
    return Phases(*(round(seconds[phase], 3) for phase in Phase))


def demand_view(demand: Demand) -> ShownDemand:
    return ShownDemand(**_amounts(demand), **_wishes(demand))


def _amounts(demand: Demand) -> dict[str, Any]:
    """Return the amounts of a demand, and the kinds and nodes that it may use, by field."""
    return {
        "gpus": demand.gpus,
        "gpu_mb": demand.gpu_mb,
        "gpu_fraction": demand.gpu_fraction,
        "exclusive": demand.exclusive,
        "cpu": demand.cpu,
        "memory_mb": demand.memory_mb,
        "custom": dict(demand.custom),
        "kinds": demand.where.kinds,
        "nodes": dict(demand.where.nodes),
    }


def _wishes(demand: Demand) -> dict[str, Any]:
    """Return the remaining fields of a demand: preferences, lower limits, pool and ranks."""
    where, is_gang = demand.where, bool(demand.bundles)
    ranks = [(bundle, len(list(equal))) for bundle, equal in groupby(demand.bundles)]
    return {
        "min_power": where.min_power,
        "min_device_mb": where.min_device_mb,
        "prefer_kinds": where.prefer_kinds,
        "prefer_nodes": dict(where.prefer_nodes),
        "pool": demand.pool,
        "bundles": tuple(RankDemand(**_amounts(bundle), count=count) for bundle, count in ranks) or None,
        "strategy": demand.strategy if is_gang else None,
        "min_ranks": demand.least_ranks if is_gang else None,
    }


def expected_view(expected: Remaining | ExpectedStart, now: Instant) -> Expected:
    if isinstance(expected, Remaining):
        p50_at, p90_at = Instant(now + expected.p50_seconds), Instant(now + expected.p90_seconds)
        expected = ExpectedStart(p50_at, p90_at, expected.n, Basis.LEARNED if expected.n else Basis.STATED)
    return Expected(
        p50_at=Time.at(expected.p50_at),
        p90_at=Time.at(expected.p90_at),
        p50_seconds=round(expected.p50_at - now, 3),
        p90_seconds=round(expected.p90_at - now, 3),
        n=expected.n,
        basis=expected.basis,
    )


def forecasts_views(world: World) -> tuple[ForecastsKept, ...]:
    """Return how accurate past forecasts were, for each basis of forecasts."""
    return tuple(
        ForecastsKept(
            accuracy.basis, accuracy.n, round(accuracy.median_error_seconds, 3), round(accuracy.within_p90, 3)
        )
        for accuracy in forecast_accuracies(world)
    )


def priority_now(world: World, lease: Lease) -> int:
    """Return the present priority of a lease's holder. The lease itself has the priority of its admission."""
    holder = world.holder(lease.holder, lease.fence)
    return lease.priority if holder is None else holder.priority


def device_shares(leases: Iterable[Lease], live: Live) -> tuple[TaskDevice, ...]:
    return tuple(
        TaskDevice(
            uuid=live.uuids.get(lease.device, lease.device),
            gpu_mb=lease.mb,
            context_mb=lease.context_mb,
            state=lease.state,
            overused_mb=lease.overused_mb or None,
        )
        for lease in leases
    )


def failure_of(failure: Mapping[str, Any] | None) -> Failure | None:
    """Return why a run failed, from the failure in its row."""
    if failure is None:
        return None
    return Failure(*(str(failure.get(name, "")) for name in ("kind", "message", "traceback")))


def _rank(task: Task, member: Member, live: Live) -> TaskRank:
    is_running = member.state is MemberState.READY and task.started_at is not None
    held = (lease for lease in live.leases if lease.rank == member.rank)
    state = "running" if is_running else member.state
    return TaskRank(member.rank, member.node, state, device_shares(held, live))


def _progress(progress: Progress) -> ShownProgress:
    reported_at, eta_at = Time.at(progress.at), Time.at_or_none(progress.eta_at)
    return ShownProgress(progress.fraction, progress.message, reported_at, progress.rate_per_second, eta_at)
