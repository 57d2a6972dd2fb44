"""From what clients say to what the store keeps, and back. Pure."""

import json
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from pydantic_core import to_json

from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.lease import Lease
from gpubroker_server.core.domain.policy import band_of
from gpubroker_server.core.domain.submission import INFERENCE_KIND as INFERENCE
from gpubroker_server.core.domain.task import Dependency, Member, MemberState, Task
from gpubroker_server.core.domain.units import Instant, Seconds, TaskId
from gpubroker_server.core.planning.backfill import Basis
from gpubroker_server.core.planning.expected_start import Start
from gpubroker_server.core.planning.run_estimates import Remaining, Size
from gpubroker_server.core.world.events import Event
from gpubroker_server.gateway.http.faults import refused
from gpubroker_server.gateway.http.problems import Fault
from gpubroker_server.gateway.parts import Defaults
from gpubroker_server.gateway.status.quarantine_views import QuarantinedView
from gpubroker_server.gateway.status.views import (
    ErrorView,
    EventView,
    ExpectedView,
    PendingView,
    ProgressView,
    RunView,
    TaskView,
)
from gpubroker_server.gateway.submission.demand import NO_TYPE, resources_view, subject_of
from gpubroker_server.gateway.submission.demand_views import DeviceShare, RankView
from gpubroker_server.gateway.submission.roles import ROLES_VARIABLE
from gpubroker_server.gateway.submission.task_body import Command, Entrypoint, Function, SubmitTask
from gpubroker_server.gateway.submission.timing import timing_of
from gpubroker_server.gateway.tasks.estimates import SizingView
from gpubroker_server.ports.store import Progress, RunSpec, TaskRecord

SHARED_BELOW_CPU = 1.0
"""An entrypoint that asks for less than one CPU, and for no GPU and no env, may share a warm process."""
_NO_ARGUMENTS = b'{"args":[],"kwargs":{}}'
_STRICT_JSON = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def task_of(
    body: SubmitTask,
    demand: Demand,
    tenant: str,
    defaults: Defaults,
    *,
    id: TaskId,
    now: Instant,
    after: tuple[Dependency, ...] = (),
) -> Task:
    usual = defaults.model_types.get(body.model_type, NO_TYPE)
    grace = defaults.grace_seconds if body.grace_seconds is None else body.grace_seconds
    timeout = _first(body.timeout_seconds, usual.timeout_seconds, defaults.timeout_seconds)
    timing = timing_of(body, now)
    shares = isinstance(body.run, Entrypoint) and demand.gpus == 0 and demand.cpu < SHARED_BELOW_CPU
    shares = shares and not demand.bundles
    return Task(
        id=id,
        tenant=tenant,
        name=body.name,
        priority=priority_of(body, defaults),
        demand=demand,
        submitted_at=now,
        max_retries=_first(body.max_retries, usual.max_retries, defaults.max_retries),
        timeout_seconds=None if timeout is None else Seconds(timeout),
        grace_seconds=Seconds(grace),
        shareable=shares and not _env_of(body),
        not_before=timing.not_before,
        after=after,
        awaits=bool(after),
        queue_ttl_seconds=timing.queue_ttl_seconds,
        expires_at=timing.expires_at,
        deadline_at=timing.deadline_at,
        expected_seconds=timing.expected_seconds,
        stream=body.stream,
        subject=subject_of(body),
    )


def priority_of(body: SubmitTask, defaults: Defaults) -> int:
    """As it says, else as is usual for its model type, else as for everybody."""
    usual = defaults.model_types.get(body.model_type, NO_TYPE)
    priority: int = _first(body.priority, usual.priority, defaults.priority)
    return priority


def _first(*values: Any) -> Any:
    """The first that somebody gave; None if nobody did."""
    for value in values:
        if value is not None:
            return value
    return None


def arguments_of(run: Entrypoint | Command | Function) -> bytes:
    """What the process is handed. Raises Problem where JSON arguments hold NaN or an infinity."""
    match run:
        case Entrypoint() if not run.args and not run.kwargs:
            return _NO_ARGUMENTS
        case Entrypoint():
            text = to_json({"args": run.args, "kwargs": run.kwargs}, inf_nan_mode="constants")
            if b"NaN" not in text and b"Infinity" not in text:
                return text
            try:  # it may be in a string
                return _STRICT_JSON.encode({"args": run.args, "kwargs": run.kwargs}).encode()
            except ValueError:
                detail = (
                    "arguments must be JSON values; NaN, Infinity and numbers beyond 64-bit floats are none"
                )
                raise refused([Fault(pointer="/run", detail=detail, code="finite-number")]) from None
        case Function():
            return run.function
        case Command():
            return b""


def spec_of(
    body: SubmitTask,
    run: Entrypoint | Command | Function,
    arguments: bytes,
    digest: str | None,
    learned: Size | None = None,
) -> RunSpec:
    """Of this task, or of one that differs from it in its run alone. `digest` names the blob that holds the
    arguments; then they stay out of the row."""
    return RunSpec(
        kind=run.tag,
        entrypoint=run.entrypoint if isinstance(run, Entrypoint) else "",
        command=tuple(run.command) if isinstance(run, Command) else (),
        arguments=arguments if digest is None else b"",
        arguments_digest=digest,
        python=run.python if isinstance(run, Function) else "",
        env=_env_of(body),
        result_format=body.result_format,
        labels=body.labels,
        model_type=body.model_type,
        working_directory=(run.working_directory or "") if isinstance(run, Command) else "",
        sizing=None if learned is None else asdict(learned),
    )


def _env_of(body: SubmitTask) -> Mapping[str, str]:
    roles = body.resources.roles
    return {**body.env, ROLES_VARIABLE: ",".join(sorted(roles))} if roles else body.env


def rfc3339(at: Instant) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


def rfc3339_or_none(at: Instant | None) -> str | None:
    return None if at is None else rfc3339(at)


@dataclass(frozen=True, slots=True)
class Live:
    """What is known of a task beside its row."""

    leases: list[Lease]
    uuids: Mapping[str, str]
    """Device key -> UUID."""
    progress: Progress | None = None
    pending: PendingView | None = None
    eta: ExpectedView | None = None
    quarantine: list[QuarantinedView] = field(default_factory=list)


NOTHING_LIVE = Live([], {})


def task_view(record: TaskRecord, live: Live = NOTHING_LIVE) -> TaskView:
    task, spec = record.task, record.spec
    url = f"/tasks/{task.id}"
    return {
        "id": task.id,
        "name": task.name,
        "tenant": task.tenant,
        "state": task.state.value,
        "priority": task.priority,
        "band": band_of(task.priority)[0],
        "run": _run_view(spec),
        "resources": {
            **resources_view(task.demand),
            "roles": spec.env[ROLES_VARIABLE].split(",") if ROLES_VARIABLE in spec.env else [],
        },
        "sizing": sizing_view(spec.sizing),
        "placement": task.demand.placement,
        "max_retries": task.max_retries,
        "timeout_seconds": task.timeout_seconds,
        "grace_seconds": task.grace_seconds,
        "expected_seconds": task.expected_seconds,
        "queue_ttl_seconds": task.queue_ttl_seconds,
        "after": [{"task": it.task, "on_failure": it.on_failure.value} for it in task.after],
        "failed_by": task.failed_by,
        "labels": dict(spec.labels),
        "model_type": spec.model_type,
        "stream": task.stream,
        "result_format": spec.result_format,
        "held": task.held,
        "attempt": task.fence,
        "failures": task.failures,
        "preemptions": task.preemptions,
        "node": task.node,
        "devices": shares(live),
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
        "progress": None if live.progress is None else _progress_view(live.progress),
        "pending": live.pending,
        "eta": live.eta,
        "error": error_view(record.failure),
        "quarantine": live.quarantine,
        "urls": {
            "self": url,
            "result": f"{url}/result",
            "events": f"{url}/events",
            "explain": f"{url}/explain",
            "cancel": f"{url}/cancel",
        },
    }


def sizing_view(sizing: Mapping[str, Any] | None) -> SizingView | None:
    if sizing is None:
        return None
    return {
        "gpu_mb": sizing["gpu_mb"],
        "p95_mb": sizing["p95_mb"],
        "n": sizing["n"],
        "kind": sizing["kind"] or None,
        "message": sizing["message"],
    }


def sizing_of(learned: Size | None) -> SizingView | None:
    return sizing_view(None if learned is None else asdict(learned))


def expected_view(expected: Remaining | Start, now: Instant) -> ExpectedView:
    if isinstance(expected, Remaining):
        p50_at, p90_at = Instant(now + expected.p50_seconds), Instant(now + expected.p90_seconds)
        expected = Start(p50_at, p90_at, expected.n, Basis.LEARNED if expected.n else Basis.STATED)
    return {
        "p50_at": rfc3339(expected.p50_at),
        "p90_at": rfc3339(expected.p90_at),
        "p50_seconds": round(expected.p50_at - now, 3),
        "p90_seconds": round(expected.p90_at - now, 3),
        "n": expected.n,
        "basis": expected.basis.value,
    }


def _run_view(spec: RunSpec) -> RunView:
    return {
        "kind": spec.kind,
        "entrypoint": None if spec.kind == INFERENCE else spec.entrypoint or None,
        "command": list(spec.command) or None,
        "model": spec.entrypoint if spec.kind == INFERENCE else None,
    }


def _rank_view(task: Task, member: Member, live: Live) -> RankView:
    begun = member.state is MemberState.READY and task.started_at is not None
    held = [lease for lease in live.leases if lease.rank == member.rank]
    return {
        "rank": member.rank,
        "node": member.node,
        "state": "running" if begun else member.state.value,
        "devices": [_share(lease, live.uuids) for lease in held],
    }


def shares(live: Live) -> list[DeviceShare]:
    return [_share(lease, live.uuids) for lease in live.leases]


def _share(lease: Lease, uuids: Mapping[str, str]) -> DeviceShare:
    return {
        "uuid": uuids.get(lease.device, lease.device),
        "gpu_mb": lease.mb,
        "context_mb": lease.context_mb,
        "state": lease.state.value,
        "overused_mb": lease.overused_mb or None,
    }


def _progress_view(progress: Progress) -> ProgressView:
    return {"fraction": progress.fraction, "message": progress.message, "at": rfc3339(progress.at)}


def error_view(failure: Mapping[str, Any] | None) -> ErrorView | None:
    if failure is None:
        return None
    return {
        "kind": str(failure.get("kind", "")),
        "message": str(failure.get("message", "")),
        "traceback": str(failure.get("traceback", "")),
    }


def event_view(event: Event, strangers: Container[str] = ()) -> EventView:
    """`strangers` are tasks that whoever reads this may not know by name; null stands for each."""
    return {
        "position": event.position,
        "at": rfc3339(event.at),
        "kind": event.kind,
        "key": event.key,
        "version": event.version,
        "fields": {
            name: None if name == "freeing_for" and value in strangers else _readable(name, value)
            for name, value in event.fields.items()
        },
    }


def _readable(name: str, value: Any) -> Any:
    """Rows keep instants as seconds; people and clients get RFC 3339 everywhere. Of a rank there is no word
    of whom it gave way to: that may be a stranger's task."""
    if name == "members":
        return [row[:5] for row in value]
    is_instant = name.endswith("_at") or name in {"since", "not_before"}
    return rfc3339(Instant(value)) if is_instant and isinstance(value, int | float) else value
