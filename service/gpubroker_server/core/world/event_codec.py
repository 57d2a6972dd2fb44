"""Rows as plain JSON values and back: one encoding for the event log, snapshots and followers."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from dataclasses import fields as dataclass_fields
from enum import StrEnum
from operator import attrgetter
from typing import Any, get_args

from gpubroker_server.core.domain.decisions import Fields, QueuePause, Request, StreamState, TaskWrite
from gpubroker_server.core.domain.demand import NO_CONSTRAINTS, Demand, PlacementConstraints, interned
from gpubroker_server.core.domain.device import Device, Node
from gpubroker_server.core.domain.lease import (
    HolderKind,
    Lease,
    LeaseState,
    Pledge,
    mark_overused,
    moved_lease,
)
from gpubroker_server.core.domain.models import ModelTerms, ModelUsage
from gpubroker_server.core.domain.task import (
    Dependency,
    ExternalTerms,
    Member,
    MemberState,
    OnFailure,
    StopReason,
    Task,
    TaskState,
)
from gpubroker_server.core.domain.units import NodeName, TaskId
from gpubroker_server.core.domain.values import changed

_DEMAND_NAMES = tuple(f.name for f in dataclass_fields(Demand))
_demand_values = attrgetter(*_DEMAND_NAMES)
_DEMAND_DEFAULTS = _demand_values(Demand())
_WHERE_NAMES = tuple(f.name for f in dataclass_fields(PlacementConstraints))
_TASK_NAMES = tuple(f.name for f in dataclass_fields(Task))
_TASK_DEFAULTS = tuple(f.default for f in dataclass_fields(Task))
"""MISSING, which equals no value, for a field without a default."""
_task_values = attrgetter(*_TASK_NAMES)
_CORDON_NAMES = ("cordon_reason", "draining_since", "drain_deadline_at")
"""Fields of a node with an event of their own, which release 0.2.0 passes over."""
_HAVE_EVENTS = {Node: _CORDON_NAMES, Lease: ("quarantined_at", "proof")}
"""Not in the event of the row: they have events of their own."""

Row = Device | Lease | Node | Pledge | QueuePause | Request | StreamState
_ROW_NAMES = {
    kind: tuple(f.name for f in dataclass_fields(kind) if f.init and f.name not in _HAVE_EVENTS.get(kind, ()))
    for kind in get_args(Row)
}

_TASK_FIELDS = frozenset(_TASK_NAMES)
_MODEL_FIELDS = frozenset(field.name for field in dataclass_fields(ModelTerms))


def demand_fields(demand: Demand) -> dict[str, Any]:
    """Only what differs from the default."""
    row: dict[str, Any] = {
        name: value
        for name, value, default in zip(_DEMAND_NAMES, _demand_values(demand), _DEMAND_DEFAULTS, strict=True)
        if value is not default and value != default  # identity is the cheaper test, and mostly true
    }
    for name in row.keys() & {"custom", "slots"}:
        row[name] = _as_json(row[name])
    if "where" in row:
        where = demand.where
        row["where"] = _row(
            where, [n for n in _WHERE_NAMES if getattr(where, n) != getattr(NO_CONSTRAINTS, n)]
        )
    if "bundles" in row:
        row["bundles"] = [demand_fields(bundle) for bundle in demand.bundles]
    return row


def demand_from(fields: Fields) -> Demand:
    row = dict(fields)
    for name in ("custom", "slots"):
        if name in row:
            row[name] = tuple(sorted((str(what), float(amount)) for what, amount in row[name]))
    if "where" in row:
        where = {name: _as_tuples(value) for name, value in row["where"].items()}
        row["where"] = PlacementConstraints(**where)
    if "bundles" in row:
        row["bundles"] = tuple(demand_from(bundle) for bundle in row["bundles"])
    return interned(Demand(**row))


def row_fields(row: Row) -> dict[str, Any]:
    return _row(row, _ROW_NAMES[type(row)])


def _row(value: Any, names: Iterable[str]) -> dict[str, Any]:
    return {name: _as_json(getattr(value, name)) for name in names}


def _as_json(value: Any) -> Any:
    """Nothing in the result is shared with another event."""
    if isinstance(value, tuple):
        return [_as_json(part) for part in value]
    if isinstance(value, Mapping):
        return dict(value)
    return value.value if isinstance(value, StrEnum) else value


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(part) for part in value) if isinstance(value, list | tuple) else value


def task_fields(task: Task) -> dict[str, Any]:
    """The state, and what differs from a task's defaults, for its first event."""
    row = {
        name: value
        for name, value, default in zip(_TASK_NAMES, _task_values(task), _TASK_DEFAULTS, strict=True)
        if value is not default and value != default  # identity is the cheaper test, and mostly true
    }
    row["state"] = task.state.value
    row["demand"] = demand_fields(task.demand)
    if task.after:
        row["after"] = after_fields(task.after)
    if task.external is not None:
        row["external"] = external_fields(task.external)
    if task.model is not None:
        row["model"] = model_fields(task.model)
    if task.stop_reason is not None:
        row["stop_reason"] = task.stop_reason.value
    return row


def after_fields(after: Iterable[Dependency]) -> list[list[str]]:
    return [[dependency.task, dependency.on_failure.value] for dependency in after]


def after_from(pairs: Iterable[Sequence[str]]) -> tuple[Dependency, ...]:
    return tuple(Dependency(TaskId(task), OnFailure(on_failure)) for task, on_failure in pairs)


def external_fields(external: ExternalTerms) -> dict[str, Any]:
    return asdict(external)


def external_from(fields: Fields | None) -> ExternalTerms | None:
    return None if fields is None else ExternalTerms(**fields)


def model_fields(model: ModelTerms) -> dict[str, Any]:
    usage = {"at": model.usage.at, "counts": list(model.usage.counts)}
    return {**asdict(model), "usage": usage, "steps": list(model.steps), "versions": list(model.versions)}


def _known(fields: Fields, names: Collection[str]) -> dict[str, Any]:
    """A field that a later release has added is left out: `NewEvent.reader` says what may not be."""
    return {name: value for name, value in fields.items() if name in names}


def model_from(fields: Fields) -> ModelTerms:
    usage = ModelUsage(fields["usage"]["at"], tuple(fields["usage"]["counts"]))
    lists = {name: tuple(fields.get(name, ())) for name in ("steps", "versions")}
    return ModelTerms(**{**_known(fields, _MODEL_FIELDS), "usage": usage, **lists})


def task_from(fields: Fields) -> Task:
    row = dict(fields)
    row["demand"] = demand_from(row["demand"])
    row["after"] = after_from(row.get("after", ()))
    row["external"] = external_from(row.get("external"))
    return Task(**_typed(_known(row, _TASK_FIELDS)))


def task_changes(write: TaskWrite) -> dict[str, Any]:
    """The state and the changed hot fields, for every later event."""
    row: dict[str, Any] = {"state": write.task.state.value}
    for name in write.changed:
        row[name] = _as_json(getattr(write.task, name))
    if "members" in row:
        row["members"] = members_fields(write.task.members)
    if write.task.model is not None and "model" in row:
        row["model"] = model_fields(write.task.model)
    return row


def changed_task(task: Task, version: int, fields: Fields) -> Task:
    return changed(task, version=version, **_typed(_known(fields, _TASK_FIELDS)))


def _typed(row: dict[str, Any]) -> dict[str, Any]:
    row["state"] = TaskState(row["state"])
    if row.get("stop_reason") is not None:
        row["stop_reason"] = StopReason(row["stop_reason"])
    if "members" in row:
        row["members"] = members_from(row["members"])
    if row.get("model") is not None:
        row["model"] = model_from(row["model"])
    return row


def members_fields(members: Iterable[Member]) -> list[list[Any]]:
    """Five values, and two more for a member that was asked to leave; eight for one that was added late."""
    rows = []
    for m in members:
        row = [m.rank, m.node, m.state.value, m.gone, m.address]
        if m.is_late or not m.takes_part:
            row += [m.freeing_for, m.stop_deadline_at]
        rows.append([*row, m.bundle] if m.is_late else row)
    return rows


def members_from(rows: Iterable[Sequence[Any]]) -> tuple[Member, ...]:
    return tuple(
        Member(rank, NodeName(node), MemberState(state), gone, address, *notice)
        for rank, node, state, gone, address, *notice in rows
    )


def lease_change(lease: Lease) -> tuple[str, dict[str, Any]]:
    """What happened to a lease, and the fields of its event: all of a new one, else what changed."""
    if lease.version == 1:
        return lease.state.value, row_fields(lease)
    changed = {"state": lease.state.value}
    if lease.state is LeaseState.HELD and lease.overused_mb:  # it is marked only while it is held
        return "overused", {**changed, "mb": lease.mb, "overused_mb": lease.overused_mb}
    if lease.state is LeaseState.QUARANTINED:
        return lease.state.value, {**changed, "quarantined_at": lease.quarantined_at}
    return lease.state.value, {**changed, "proof": lease.proof} if lease.proof else changed


def changed_lease(lease: Lease, fields: Fields) -> Lease:
    if fields.get("overused_mb") is not None:
        return mark_overused(lease, fields["overused_mb"])
    changes = {name: fields[name] for name in ("quarantined_at", "proof") if name in fields}
    return moved_lease(lease, LeaseState(fields["state"]), **changes)


def lease_from(fields: Fields) -> Lease:
    row = dict(fields)
    row["holder_kind"] = HolderKind(row["holder_kind"])
    row["state"] = LeaseState(row["state"])
    return Lease(**row)


def pledge_from(fields: Fields) -> Pledge:
    return Pledge(**{**fields, "ranks": tuple(fields["ranks"])})


def node_from(fields: Fields, known: Node | None = None) -> Node:
    """`known`: the node before, whose cordon it keeps."""
    row = _known(fields, _ROW_NAMES[Node])
    if known is not None:
        row |= cordon_fields(known)
    row["labels"] = tuple((str(name), str(value)) for name, value in row["labels"])
    row["custom"] = tuple((str(name), float(amount)) for name, amount in row["custom"])
    return Node(**row)


def stream_from(fields: Fields) -> StreamState:
    return StreamState(**_known(fields, _ROW_NAMES[StreamState]))


def cordon_fields(node: Node) -> dict[str, Any]:
    return _row(node, _CORDON_NAMES)


def with_cordon(node: Node, fields: Fields) -> Node:
    return replace(node, **{name: fields[name] for name in _CORDON_NAMES})
