"""`gpubroker tenants`, `stats`, `policy`, `profiles` and `estimates`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import Struct
from msgspec.structs import asdict
from rich.console import Group, RenderableType
from rich.text import Text

from gpubroker.cli.lookup import connect
from gpubroker.cli.parsing import seconds as parsed_seconds
from gpubroker.cli.printing import Format, Output, emit, emit_all
from gpubroker.cli.tables import Column, PlainTable, details, duration, executor_in_words, gib, size

if TYPE_CHECKING:
    from gpubroker.wire.fleet import AutoscalingDemand, Capacity
    from gpubroker.wire.forecasts import Estimate, ForecastsKept
    from gpubroker.wire.policy import Policy, Profile, Tenant
    from gpubroker.wire.queues import Paused
    from gpubroker.wire.stats import Fragmentation, ModelServer, Stats, TaskCounts


def tenants(output: Output = Format.TABLE) -> None:
    """List tenants: held, guaranteed, borrowed and used memory, and fair share.

    USED is in GiB-hours and decays. LEVEL is usage relative to the fair share:
    the lowest goes first.
    """
    with connect() as broker:
        listed = broker.tenants()
        emit_all(output, listed.items, lambda items: Group(_tenants(items), *_overdrawn(listed.raw)))


def stats(output: Output = Format.TABLE) -> None:
    """Show totals of tasks and memory, and whether tasks can run."""
    with connect() as broker:
        emit(output, broker.stats(), _stats)


def policy(output: Output = Format.TABLE) -> None:
    """Show what the operator has configured: bands, kinds, pools, limits, defaults."""
    with connect() as broker:
        emit(output, broker.policy(), lambda found: details(_policy_rows(found)))


def profiles(output: Output = Format.TABLE) -> None:
    """List the roles that a task may name, and what they give it."""
    with connect() as broker:
        emit_all(output, broker.profiles().items, _profiles)


def demand(
    pool: Annotated[str | None, typer.Option(help="This pool alone; empty: tasks without one.")] = None,
    kind: Annotated[str | None, typer.Option(help="This kind of GPU, and demands that may use it.")] = None,
    waited: Annotated[
        str, typer.Option(help="Count only tasks that have waited at least this long, such as 30s.")
    ] = "0",
    output: Output = Format.TABLE,
) -> None:
    """Show what waiting tasks lack, and idle nodes: for autoscalers."""
    with connect() as broker:
        found = broker.autoscaling_demand(pool=pool, kind=kind, waited_seconds=parsed_seconds(waited))
        emit(output, found, lambda found: details(_demand_rows(found)))


def estimates(
    subject: Annotated[
        str | None, typer.Argument(metavar="SUBJECT", help="Model type, name or entrypoint. Default: all.")
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """Show what past runs used: peak GPU memory, and time."""
    with connect() as broker:
        emit_all(output, broker.estimates(subject).items, _estimates)


_TENANT_COLUMNS = (
    Column("TENANT", wraps=True),
    Column("COHORT", from_width=100, share=0.2),
    Column("HELD"),
    Column("GUARANTEED"),
    Column("BORROWED"),
    Column("USED", from_width=100),
    Column("SHARE"),
    Column("LEVEL"),
    Column("PENDING"),
    Column("ACTIVE"),
)


def _tenants(listed: Sequence[Tenant]) -> RenderableType:
    rows = [
        (
            tenant.name,
            tenant.cohort or "",
            gib(tenant.held_mb),
            "no quota" if tenant.guaranteed_mb is None else gib(tenant.guaranteed_mb),
            gib(tenant.borrowed_mb) if tenant.borrowed_mb else "",
            gib(tenant.usage_mb_seconds / 3600),
            f"{tenant.fair_share:.0%}",
            f"{tenant.level:.2f}",
            f"{tenant.pending} paused" if tenant.paused else str(tenant.pending),
            str(tenant.active),
        )
        for tenant in listed
    ]
    if not rows:
        return Text("no tenants yet")
    return Group(
        PlainTable(_TENANT_COLUMNS, rows), Text("in GiB, USED in GiB-hours; SHARE: fair", style="dim")
    )


def _overdrawn(listed: Mapping[str, Any]) -> Iterator[Text]:
    """Yield the reasons why cohorts hold more than their guarantees."""
    for cohort in listed.get("cohorts", ()):
        if cohort["message"]:
            yield Text(cohort["message"])


def _stats(found: Stats) -> RenderableType:
    gpu, nodes, workers = found.gpu, found.nodes, found.worker_sets
    sizes = {"leased": gpu.leased_mb, "used": gpu.used_mb, "free": gpu.free_mb, "total": gpu.total_mb}
    models = [(state, count) for state, count in asdict(found.models).items() if count]
    rows = [
        ("gpu memory", " · ".join(f"{name} {gib(mb)} GiB" for name, mb in sizes.items())),
        *_fragmentation(found.fragmentation),
        *(("forecasts", _forecasts(kept)) for kept in found.forecasts),
        ("tasks", " · ".join(f"{state} {count}" for state, count in _counts(found.tasks))),
        *(("models", " · ".join(f"{state} {count}" for state, count in models)) for _ in models[:1]),
        ("executor", executor_in_words(found.executor)),
        ("leader", f"{found.leader.holder}, term {found.leader.term}" if found.leader.holder else "! none"),
        *(("model server", _model_server(server)) for server in found.model_servers),
    ]
    if workers.sets:
        rows.append(("workers", f"{workers.running} of {workers.wanted} run, of {workers.sets} worker sets"))
    rows += [("paused", f"! {_pause(pause)}") for pause in found.paused]
    closed = {"cordoned": nodes.cordoned, "draining": nodes.draining}
    if any(closed.values()):
        parts = [f"{nodes.ready} of {nodes.total} ready"]
        parts += [f"{count} {state}" for state, count in closed.items() if count]
        rows.append(("nodes", " · ".join(parts)))
    if found.detection.message:
        rows.append(("nodes", f"! {found.detection.message}"))
    if found.disk_full:
        rows.append(("disk", f"! {found.disk_full}"))
    rows.append(("as of", f"{found.age_seconds:.1f} s ago, event {found.position}"))
    return details(rows)


def _counts(found: TaskCounts) -> Iterator[tuple[str, int]]:
    return ((state, count) for state, count in asdict(found).items() if state != "completed")


def _pause(pause: Paused) -> str:
    kind, _, name = pause.queue.partition(":")
    reason = f" ({pause.reason})" if pause.reason else ""
    return f"{kind} {name} since {pause.since} by {pause.by}{reason}, {pause.waiting} tasks wait"


def _fragmentation(found: Fragmentation) -> Iterator[tuple[str, str]]:
    """Yield the share of free memory that is stranded, for each kind if there are several."""
    if found.share is None:
        return
    kinds = [f"{kind.kind} {kind.share:.0%}" for kind in found.kinds if kind.share is not None]
    more = f" ({' · '.join(kinds)})" if len(kinds) > 1 else ""
    yield "stranded", f"{found.share:.0%} of free memory, {gib(found.stranded_mb)} GiB{more}"
    if scattered := found.scattered:
        sizes = (
            f"{size(scattered.gpu_mb)}"
            if scattered.gpus == 1
            else f"{scattered.gpus} × {size(scattered.gpu_mb)}"
        )
        free = f"{gib(scattered.free_mb)} GiB are free, at most {size(scattered.largest_mb)} in one piece"
        yield "in pieces", f"! {scattered.waiting} tasks wait for {sizes}; {free}"


def _forecasts(kept: ForecastsKept) -> str:
    error = duration(kept.median_error_seconds)
    return f"{kept.basis}: {kept.within_p90:.0%} of {kept.n} started by their p90, median error {error}"


def _model_server(server: ModelServer) -> str:
    """Say whether a model server answers, and if not, why."""
    protocols = {"http": server.http, "grpc": server.grpc}
    faults = [f"! {server.node_fault}"] if server.node_fault else []
    faults += [
        f"! {name} is down: {protocol.fault}"
        for name, protocol in protocols.items()
        if protocol and not protocol.up
    ]
    state = faults or [f"up, {server.requests_in_flight} requests"]
    return " · ".join([server.name, *state])


def _demand_rows(found: AutoscalingDemand) -> Iterator[tuple[str, str]]:
    yield "unmet", _amounts(found.unmet)
    for group in found.groups:
        kinds = ",".join(group.kinds) or "any kind"
        yield "  of it", f"{group.pool or 'no pool'}, {kinds}: {_amounts(group)}"
    yield "used", _amounts(found.used)
    yield "needed", _amounts(found.needed)
    names = ", ".join(node.name for node in found.spare.nodes)
    yield "spare", f"{_amounts(found.spare)} · {names}" if names else "nothing"
    if found.limited_tasks:
        yield "limited", f"{found.limited_tasks} tasks wait for a quota or a limit, which no node would raise"


def _amounts(total: Capacity) -> str:
    sizes = f"{total.gpus} GPUs ({gib(total.gpu_mb)} GiB) · {total.cpu:g} CPUs · {gib(total.memory_mb)} GiB"
    tasks, waiting_seconds = getattr(total, "tasks", 0), getattr(total, "waiting_seconds", 0.0)
    return f"{sizes} · {tasks} tasks, up to {duration(waiting_seconds)}" if tasks else sizes


def _policy_rows(found: Policy) -> Iterator[tuple[str, str]]:
    yield "bands", " · ".join(f"{band.name} {band.lowest} to {band.highest}" for band in found.bands)
    yield "placement", found.placement
    yield "preemption", _fields(found.preemption, "enabled") if found.preemption.enabled else "off"
    yield "defaults", _fields(found.defaults)
    yield "at most", _fields(found.maximum)
    tables: tuple[tuple[str, Sequence[Struct], str], ...] = (
        ("kind", found.kinds, "name"),
        ("pool", found.pools, "name"),
        ("custom", found.custom_limits, "name"),
        ("running", found.max_running, "of"),
        ("model type", found.model_types, "name"),
        ("tenant", found.tenants, "name"),
    )
    for name, rows, key in tables:
        for row in rows:
            yield name, f"{getattr(row, key)}: {_fields(row, key)}"
    yield "streams", _given(found.streams)


def _fields(record: Struct, without: str = "") -> str:
    return _given({name: value for name, value in asdict(record).items() if name != without})


def _given(fields: Mapping[str, Any]) -> str:
    given = (f"{name} {_plain(value)}" for name, value in fields.items() if value not in (None, "", (), {}))
    return " · ".join(given)


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return " ".join(f"{name}={_plain(part)}" for name, part in value.items())
    return ",".join(value) if isinstance(value, tuple) else str(value)


_PROFILE_COLUMNS = (
    Column("PROFILE", share=0.3),
    Column("CPU"),
    Column("GPUS"),
    Column("MEMORY PER GPU"),
    Column("CONCURRENCY"),
    Column("OTHER", share=0.3),
)


def _profiles(listed: Sequence[Profile]) -> RenderableType:
    return PlainTable(_PROFILE_COLUMNS, [_profile(profile) for profile in listed])


def _profile(profile: Profile) -> tuple[str, ...]:
    gpu_mb = profile.gpu_mb
    others = ("memory_mb", "priority", "timeout_seconds", "max_retries")
    return (
        profile.name,
        "" if profile.cpu is None else f"{profile.cpu:g}",
        "" if profile.gpus is None else str(profile.gpus),
        size(gpu_mb) if isinstance(gpu_mb, int) else gpu_mb or "",
        str(profile.max_concurrency or ""),
        _given({name: getattr(profile, name) for name in others}),
    )


_ESTIMATE_COLUMNS = (
    Column("SUBJECT", share=0.4),
    Column("KIND", share=0.3),
    Column("RUNS"),
    Column("MEASURED"),
    Column("MEMORY p50"),
    Column("p95"),
    Column("TIME p50"),
    Column("p90"),
)


def _estimates(listed: Sequence[Estimate]) -> RenderableType:
    rows = [_estimate(estimate) for estimate in listed]
    return PlainTable(_ESTIMATE_COLUMNS, rows) if rows else Text("nothing learned yet: no run has succeeded")


def _estimate(estimate: Estimate) -> tuple[str, ...]:
    memory, time = estimate.gpu_mb, estimate.seconds
    return (
        estimate.subject,
        estimate.kind,
        str(max((known.n for known in (memory, time) if known), default=0)),
        f"{memory.n if memory else 0} of {estimate.needed_runs}" if estimate.kind else "",
        size(memory.p50) if memory else "",
        size(memory.p95) if memory else "",
        duration(time.p50) if time else "",
        duration(time.p90) if time else "",
    )
