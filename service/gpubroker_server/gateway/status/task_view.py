"""Answers about a task, from its row and from what the World knows of it. Pure."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.estimates import What
from gpubroker_server.core.domain.lease import Lease
from gpubroker_server.core.domain.policy import band_of
from gpubroker_server.core.domain.submission import INFERENCE_KIND as INFERENCE
from gpubroker_server.core.domain.task import Member, MemberState, Task
from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.core.planning.forecasts.forecast_rounds import ExpectedStart, accuracy_topic
from gpubroker_server.core.planning.forecasts.reservations import Basis
from gpubroker_server.core.planning.forecasts.run_estimates import Remaining, Size
from gpubroker_server.core.world.phases import Phase
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.http.routing import view_of
from gpubroker_server.gateway.http.times import rfc3339, rfc3339_or_none
from gpubroker_server.gateway.status.quarantine import QuarantinedView
from gpubroker_server.gateway.status.views import (
    AmountsView,
    BundleView,
    DemandView,
    DeviceShare,
    ErrorView,
    ExpectedView,
    ForecastsView,
    PendingView,
    PhasesView,
    ProgressView,
    RankView,
    RunView,
    SizingView,
    TaskUrls,
    TaskView,
)
from gpubroker_server.ports.executor import Progress
from gpubroker_server.ports.store import (
    RunSpec,
    TaskRecord,
)

ROLES_VARIABLE = "GPUBROKER_ROLES"
"""In the environment of the task's process: the names of its roles, separated by commas."""

RETRY_VARIABLE = "GPUBROKER_RETRY_OF"
"""The same of a task that is a retry: the id of the ended one."""

PROFILE_VARIABLE, CONCURRENCY_VARIABLE = "GPUBROKER_PROFILE", "GPUBROKER_MAX_CONCURRENCY"
"""The same of a task that names a profile, or a `max_concurrency` itself."""


@dataclass(frozen=True, slots=True)
class Live:
    """What is known of a task beside its row."""

    leases: list[Lease]
    uuids: Mapping[str, str]
    """Device key -> UUID."""
    phases: Mapping[Phase, Seconds] | None = None
    progress: Progress | None = None
    pending: PendingView | None = None
    eta: ExpectedView | None = None
    quarantine: list[QuarantinedView] = field(default_factory=list)
    notice: str = ""


def task_view(record: TaskRecord, live: Live) -> TaskView:
    task, spec = record.task, record.spec
    return {
        "id": task.id,
        "name": task.name,
        "tenant": task.tenant,
        "state": task.state.value,
        "priority": task.priority,
        "band": band_of(task.priority)[0],
        "run": _run_view(spec),
        "resources": {
            **demand_view(task.demand),
            "roles": spec.env[ROLES_VARIABLE].split(",") if ROLES_VARIABLE in spec.env else [],
        },
        "sizing": None if spec.sizing is None else sizing_view(spec.sizing),
        "placement": task.demand.placement,
        "max_retries": task.max_retries,
        "timeout_seconds": task.timeout_seconds,
        "grace_seconds": task.grace_seconds,
        "expected_seconds": task.expected_seconds,
        "queue_ttl_seconds": task.queue_ttl_seconds,
        "after": [{"task": it.task, "on_failure": it.on_failure.value} for it in task.after],
        "failed_by": task.failed_by,
        "retry_of": spec.env.get(RETRY_VARIABLE),
        "labels": dict(spec.labels),
        "model_type": spec.model_type,
        "profile": spec.env.get(PROFILE_VARIABLE, ""),
        "max_concurrency": int(spec.env[CONCURRENCY_VARIABLE]) if CONCURRENCY_VARIABLE in spec.env else None,
        "stream": task.stream,
        "result_format": spec.result_format,
        "held": task.held,
        "attempt": task.fence,
        "failures": task.failures,
        "preemptions": task.preemptions,
        "node": task.node,
        "devices": device_shares(live.leases, live),
        "ranks": [_rank_view(task, member, live) for member in task.members] or None,
        "submitted_at": rfc3339(task.submitted_at),
        "admitted_at": rfc3339_or_none(task.admitted_at),
        "started_at": rfc3339_or_none(task.started_at),
        "checkpoint_at": rfc3339_or_none(task.checkpoint_at),
        "not_before": rfc3339_or_none(task.not_before),
        "expires_at": rfc3339_or_none(task.expires_at),
        "deadline_at": rfc3339_or_none(task.deadline_at),
        "finished_at": rfc3339_or_none(task.finished_at),
        "stop_reason": None if task.stop_reason is None else task.stop_reason.value,
        "stop_deadline_at": rfc3339_or_none(task.stop_deadline_at),
        "phases": None if live.phases is None else _phases_view(live.phases),
        "progress": None if live.progress is None else _progress_view(live.progress),
        "pending": live.pending,
        "eta": live.eta,
        "error": error_view(record.failure),
        "quarantine": live.quarantine,
        "notice": live.notice,
        "urls": _urls(task),
    }


def _urls(task: Task) -> TaskUrls:
    url = f"/tasks/{task.id}"
    return {
        "self": url,
        "result": f"{url}/result",
        "events": f"{url}/events",
        "explain": f"{url}/explain",
        "cancel": f"{url}/cancel",
    }


def demand_view(demand: Demand) -> DemandView:
    where, is_gang = demand.where, bool(demand.bundles)
    ranks = [(bundle, len(list(equal))) for bundle, equal in groupby(demand.bundles)]
    bundles: list[BundleView] = [{**_amounts_view(bundle), "count": count} for bundle, count in ranks]
    return {
        **_amounts_view(demand),
        "min_power": where.min_power,
        "min_device_mb": where.min_device_mb,
        "prefer_kinds": list(where.prefer_kinds),
        "prefer_nodes": {label: list(values) for label, values in where.prefer_nodes},
        "pool": demand.pool,
        "bundles": bundles or None,
        "strategy": demand.strategy if is_gang else None,
        "min_ranks": demand.least_ranks if is_gang else None,
    }


def _amounts_view(demand: Demand) -> AmountsView:
    where = demand.where
    nodes = {label: list(values) for label, values in where.nodes}
    return view_of(AmountsView, demand, custom=dict(demand.custom), kinds=where.kinds, nodes=nodes)


def sizing_view(sizing: Mapping[str, Any]) -> SizingView:
    """`sizing` has the fields of `Size`."""
    return {
        "gpu_mb": sizing["gpu_mb"],
        "p95_mb": sizing["p95_mb"],
        "n": sizing["n"],
        "kind": sizing["kind"] or None,
        "message": sizing["message"],
    }


def sizing_of(learned: Size | None) -> SizingView | None:
    return None if learned is None else sizing_view(asdict(learned))


def expected_view(expected: Remaining | ExpectedStart, now: Instant) -> ExpectedView:
    if isinstance(expected, Remaining):
        p50_at, p90_at = Instant(now + expected.p50_seconds), Instant(now + expected.p90_seconds)
        expected = ExpectedStart(p50_at, p90_at, expected.n, Basis.LEARNED if expected.n else Basis.STATED)
    p50_seconds, p90_seconds = round(expected.p50_at - now, 3), round(expected.p90_at - now, 3)
    return view_of(ExpectedView, expected, p50_seconds=p50_seconds, p90_seconds=p90_seconds)


def forecasts_views(world: World) -> list[ForecastsView]:
    """One for each basis that forecasts have had."""
    views: list[ForecastsView] = []
    for basis in Basis:
        errors = world.learned.sketch(accuracy_topic(basis, What.START_ERROR))
        within_p90 = world.learned.sketch(accuracy_topic(basis, What.START_SHARE)).share_until(1.0)
        if errors.n and within_p90 is not None:
            views.append(
                {
                    "basis": basis.value,
                    "n": errors.n,
                    "median_error_seconds": round(errors.quantile(0.5) or 0.0, 3),
                    "within_p90": round(within_p90, 3),
                }
            )
    return views


def priority_now(world: World, lease: Lease) -> int:
    """The present priority of the holder. The lease keeps the one of its admission."""
    holder = world.holder(lease.holder, lease.fence)
    return lease.priority if holder is None else holder.priority


def device_shares(leases: list[Lease], live: Live) -> list[DeviceShare]:
    return [
        {
            "uuid": live.uuids.get(lease.device, lease.device),
            "gpu_mb": lease.mb,
            "context_mb": lease.context_mb,
            "state": lease.state.value,
            "overused_mb": lease.overused_mb or None,
        }
        for lease in leases
    ]


def error_view(failure: Mapping[str, Any] | None) -> ErrorView | None:
    if failure is None:
        return None
    return {
        "kind": str(failure.get("kind", "")),
        "message": str(failure.get("message", "")),
        "traceback": str(failure.get("traceback", "")),
    }


def _run_view(spec: RunSpec) -> RunView:
    return {
        "kind": spec.kind,
        "entrypoint": None if spec.kind == INFERENCE else spec.entrypoint or None,
        "command": list(spec.command) or None,
        "model": spec.entrypoint if spec.kind == INFERENCE else None,
    }


def _rank_view(task: Task, member: Member, live: Live) -> RankView:
    is_running = member.state is MemberState.READY and task.started_at is not None
    return {
        "rank": member.rank,
        "node": member.node,
        "state": "running" if is_running else member.state.value,
        "devices": device_shares([lease for lease in live.leases if lease.rank == member.rank], live),
    }


def _phases_view(phases: Mapping[Phase, Seconds]) -> PhasesView:
    queued, admitted, starting, running, stopping = (round(phases[phase], 3) for phase in Phase)
    return {
        "queued_seconds": queued,
        "admitted_seconds": admitted,
        "starting_seconds": starting,
        "running_seconds": running,
        "stopping_seconds": stopping,
    }


def _progress_view(progress: Progress) -> ProgressView:
    return view_of(ProgressView, progress, at=rfc3339(progress.at))
