"""Everything that is read, as functions of one connection. They never wait for the writer."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from pydantic_core import from_json
from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Double,
    Executable,
    Select,
    and_,
    bindparam,
    extract,
    func,
    literal_column,
    or_,
    select,
)

from gpubroker_server.adapters.sql import rows, tables
from gpubroker_server.adapters.sql.object_tables import stored_object
from gpubroker_server.adapters.sql.shared import installation
from gpubroker_server.adapters.sql.statements import EVENT
from gpubroker_server.core.domain.device import Device
from gpubroker_server.core.domain.leader_term import LeaderRow
from gpubroker_server.core.domain.lease import Lease, Pledge
from gpubroker_server.core.domain.submission import EXTERNAL_KIND as EXTERNAL
from gpubroker_server.core.domain.task import TERMINAL, Task, TaskState
from gpubroker_server.core.domain.units import Instant, Position, TaskId, Term
from gpubroker_server.core.world.events import Event
from gpubroker_server.core.world.tenant_accounts import TenantUsage
from gpubroker_server.ports.store import (
    HeldBack,
    KnownKey,
    RunSpec,
    Snapshot,
    Stand,
    StoredCheckpoint,
    StoredResult,
    TaskFilter,
    TaskRecord,
    TokenRow,
)

_task, _spec, _outcome, _label = tables.task, tables.task_spec, tables.outcome, tables.task_label

TASK = tuple(_task.c[field.name] for field in fields(Task))
_LEASE = tuple(tables.lease.c[field.name] for field in fields(Lease) if field.name in tables.lease.c)
_PLEDGE = tuple(tables.pledge.c[field.name] for field in fields(Pledge))
_DEVICE = tuple(tables.device.c[field.name] for field in fields(Device) if field.init)
_lease = tables.lease
_SPEC = tuple(column for column in _spec.c if column.name != "tenant")  # which the task's row has
ESTIMATE = tuple(tables.estimate.c[name] for name in ("tenant", "subject", "kind", "what", "counts"))
_ESTIMATES = select(*ESTIMATE).order_by(tables.estimate.c.learned_at)
_USAGE = select(*(tables.usage.c[name] for name in TenantUsage._fields)).order_by(tables.usage.c.tenant)
_HAS_RESULT = or_(_outcome.c.result.isnot(None), _outcome.c.result_digest.isnot(None)).label("has_result")


_chosen, _other = _task.alias("chosen"), _outcome.alias("other")
_newest = select(func.max(_other.c.fence)).where(_other.c.task == _chosen.c.id).scalar_subquery()

# Fixed statements with parameters: building one anew costs more than running it.
_RECORDS = (
    select(*(_chosen.c[column.name] for column in TASK), *_SPEC, _outcome.c.failure, _HAS_RESULT)
    .join(_spec, _spec.c.task == _chosen.c.id)
    .outerjoin(_outcome, and_(_outcome.c.task == _chosen.c.id, _outcome.c.fence == _newest))
    .order_by(_chosen.c.id.desc())
)
"""Of the chosen tasks, which are named by their ids: a subquery of whole rows leaves hundreds of objects that
refer to each other each time one is made."""
_ONE_RECORD = _RECORDS.where(_chosen.c.id == bindparam("task"))
_NEWEST_OUTCOME = (
    select(_outcome).where(_outcome.c.task == bindparam("task")).order_by(_outcome.c.fence.desc()).limit(1)
)
_CHECKPOINTS = (
    select(*(tables.checkpoint.c[field.name] for field in fields(StoredCheckpoint)))
    .where(tables.checkpoint.c.task == bindparam("task"))
    .order_by(tables.checkpoint.c.fence.desc(), tables.checkpoint.c.sequence.desc())
)
_EVENTS = (
    select(*EVENT)
    .where(tables.event.c.position > bindparam("after"))
    .order_by(tables.event.c.position)
    .limit(bindparam("most"))
)
_EVENTS_OF_TASK = _EVENTS.where(tables.event.c.task == bindparam("task"))
_KNOWN_KEY = select(_task.c.id, _task.c.body_hash).where(
    _task.c.tenant == bindparam("tenant"), _task.c.idem_key == bindparam("idem_key")
)
_BATCH_ANSWER = select(tables.batch.c.answer).where(tables.batch.c.task == bindparam("task"))
_HEAD = select(tables.log_head.c.position)
_OLDEST = select(
    func.coalesce(select(func.min(tables.event.c.position)).scalar_subquery(), tables.log_head.c.position + 1)
)
_HELD_BACK = """
SELECT (
    SELECT coalesce(extract(epoch FROM clock_timestamp() - min(began)), 0)::float8 FROM (
        SELECT xact_start AS began FROM pg_stat_activity
        WHERE backend_xmin IS NOT NULL AND backend_type = 'client backend' AND pid <> pg_backend_pid()
        UNION ALL SELECT prepared FROM pg_prepared_xacts
    ) transactions
), (
    SELECT coalesce(max(greatest(age(xmin), age(catalog_xmin))), 0) FROM pg_replication_slots
)
"""
_NOW = select(extract("epoch", func.clock_timestamp()).cast(Double))
_TASK_NAMES = tuple(column.name for column in TASK)


_IN_PARTS = {"yield_per": 2000}
"""A long queue is not held twice, as rows and as tasks."""


def _found(connection: Connection, query: Executable, **values: Any) -> list[dict[str, Any]]:
    """The rows by column name."""
    result = connection.execute(query, values)
    names = tuple(result.keys())
    return [dict(zip(names, row, strict=True)) for row in result]


def record(connection: Connection, task: TaskId) -> TaskRecord | None:
    return next((_record_of(row) for row in _found(connection, _ONE_RECORD, task=task)), None)


def records(connection: Connection, wanted: TaskFilter) -> Sequence[TaskRecord]:
    return [_record_of(row) for row in _found(connection, listing(wanted))]


def listing(wanted: TaskFilter) -> Select[Any]:
    """The records that match, newest first."""
    query = select(_task.c.id).where(_task.c.tenant == wanted.tenant)
    if wanted.after is not None:
        query = query.where(_task.c.id < wanted.after)
    if wanted.states:
        query = query.where(*_in_states(wanted.states))
    if wanted.min_priority is not None:
        query = query.where(_task.c.priority >= wanted.min_priority)
    if wanted.max_priority is not None:
        query = query.where(_task.c.priority <= wanted.max_priority)
    if wanted.name is not None:
        query = query.where(_task.c.name == wanted.name)
    if wanted.stream is not None:
        query = query.where(_task.c.stream == wanted.stream)
    if wanted.model_type is not None:
        named = select(_spec.c.task).where(
            _spec.c.task == _task.c.id, _spec.c.model_type == wanted.model_type
        )
        query = query.where(named.correlate(_task).exists())
    if wanted.runs_after is not None:
        some = _task.c.after != literal_column("'[]'")  # in the words of the index of dependents
        query = query.where(some, _task.c.after.contains(f'"{wanted.runs_after}"', autoescape=True))
    query = query.where(*_within(_task.c.submitted_at, wanted.submitted_from, wanted.submitted_before))
    query = query.where(*_within(_task.c.finished_at, wanted.finished_from, wanted.finished_before))
    if wanted.kind == EXTERNAL:
        query = query.where(_task.c.external.isnot(None))  # in the words of their index
    elif wanted.kind is not None:
        of_kind = select(_spec.c.task).where(_spec.c.task == _task.c.id, _spec.c.kind == wanted.kind)
        query = query.where(of_kind.correlate(_task).exists())
    if wanted.quarantined is not None:
        used = select(_lease.c.holder).where(_lease.c.holder == _task.c.id, ~_lease.c.released).exists()
        query = query.where(or_(~_task.c.finished, used if wanted.quarantined else ~used))
    for key, value in wanted.labels.items():
        here = (_label.c.tenant == wanted.tenant) & (_label.c.key == key) & (_label.c.value == value)
        query = query.where(_task.c.id.in_(select(_label.c.task).where(here)))
    return _RECORDS.where(_chosen.c.id.in_(query.order_by(_task.c.id.desc()).limit(wanted.limit)))


def _within(time: Column[Any], start: Instant | None, end: Instant | None) -> list[ColumnElement[bool]]:
    """From the start on, and before the end."""
    return [*([] if start is None else [time >= start]), *([] if end is None else [time < end])]


def _in_states(states: Sequence[TaskState]) -> list[Any]:
    """Of states that lie all before or all after the end, in the words of the index for that half."""
    names = [state.value for state in states]
    ended = {state in TERMINAL for state in states}
    if ended == {True}:
        return [_task.c.finished, _task.c.ended_as.in_(names)]
    return [_task.c.state.in_(names), *([~_task.c.finished] if ended == {False} else [])]


def _record_of(row: Mapping[str, Any]) -> TaskRecord:
    failure = row["failure"]
    return TaskRecord(
        task=rows.task_of_row(row[name] for name in _TASK_NAMES),
        spec=rows.spec_of_row(row),
        failure=None if failure is None else from_json(failure),
        has_result=bool(row["has_result"]),
    )


def known_key(connection: Connection, tenant: str, key: str) -> KnownKey | None:
    found = connection.execute(_KNOWN_KEY, {"tenant": tenant, "idem_key": key}).one_or_none()
    return None if found is None else KnownKey(TaskId(found[0]), found[1])


def batch_answer(connection: Connection, first: TaskId) -> str:
    found = connection.execute(_BATCH_ANSWER, {"task": first}).scalar_one_or_none()
    return "" if found is None else str(found)


def stands(connection: Connection, tasks: Sequence[TaskId]) -> Mapping[TaskId, Stand]:
    query = select(_task.c.id, _task.c.tenant, _task.c.state, _task.c.failed_by)
    found = connection.execute(query.where(_task.c.id.in_(tasks)))
    return {TaskId(id): Stand(tenant, TaskState(state), by) for id, tenant, state, by in found}


def specs(connection: Connection, tasks: Sequence[TaskId]) -> Mapping[TaskId, RunSpec]:
    found = _found(connection, select(*_SPEC).where(_spec.c.task.in_(tasks)))
    return {TaskId(row["task"]): rows.spec_of_row(row) for row in found}


def result(connection: Connection, task: TaskId) -> StoredResult | None:
    found = _found(connection, _NEWEST_OUTCOME, task=task)
    if not found:
        return None
    row = found[0]
    return StoredResult(
        ending=row["ending"],
        format=row["result_format"],
        data=row["result"],
        digest=row["result_digest"],
        failure=None if row["failure"] is None else from_json(row["failure"]),
        log_tail=row["log_tail"],
    )


def checkpoints(connection: Connection, task: TaskId) -> Sequence[StoredCheckpoint]:
    return [StoredCheckpoint(*row) for row in connection.execute(_CHECKPOINTS, {"task": task})]


def referenced(connection: Connection, digests: Sequence[str]) -> frozenset[str]:
    of_tasks = (_spec.c.arguments_digest, _outcome.c.result_digest, tables.checkpoint.c.digest)
    places = (*of_tasks, stored_object.c.digest)
    return frozenset(
        digest
        for column in places
        for (digest,) in connection.execute(select(column).where(column.in_(digests)))
    )


def events(connection: Connection, after: Position, limit: int, task: TaskId | None) -> Sequence[Event]:
    query = _EVENTS if task is None else _EVENTS_OF_TASK
    found = connection.execute(query, {"after": after, "most": limit, "task": task})
    return [rows.event_of_row(row) for row in found]


def head(connection: Connection) -> Position:
    return Position(connection.execute(_HEAD).scalar_one())


def leader(connection: Connection) -> LeaderRow:
    row = tables.leadership.c
    [(term, holder, until)] = connection.execute(select(row.term, row.holder, row.lease_until))
    return LeaderRow(Term(term), holder, Instant(until), now(connection))


def oldest(connection: Connection) -> Position:
    return Position(connection.execute(_OLDEST).scalar_one())


def blobs(connection: Connection) -> str | None:
    found: str | None = connection.execute(select(installation.c.blobs)).scalar_one()
    return found


def tokens(connection: Connection) -> Sequence[TokenRow]:
    found = _found(connection, select(tables.token).order_by(tables.token.c.name))
    return [rows.token_of_row(row) for row in found]


def snapshot(connection: Connection, at: Instant) -> Snapshot:
    """Inside one transaction that sees one state of the database."""
    lease, finished, device = tables.lease, tables.finished, tables.device
    holders = select(lease.c.holder).where(~lease.c.released)
    unfinished = select(*TASK).where(~_task.c.finished)
    leaving = select(*TASK).where(_task.c.finished, _task.c.id.in_(holders))
    leases = _found(connection, select(*_LEASE).where(~lease.c.released))
    devices = connection.execute(select(*_DEVICE).where(device.c.present | (device.c.leased_mb > 0)))
    counted = connection.execute(select(finished.c.tenant, finished.c.state, finished.c.n))
    return Snapshot(
        position=head(connection),
        at=at,
        tasks=[
            rows.task_of_row(row)
            for query in (unfinished, leaving)
            for row in connection.execute(query, execution_options=_IN_PARTS)
        ],
        leases=[rows.lease_of_row(row) for row in leases],
        pledges=[rows.pledge_of_row(row) for row in _found(connection, select(*_PLEDGE))],
        devices=[Device(*row) for row in devices],
        nodes=[rows.node_of_row(row) for row in _found(connection, select(tables.node))],
        requests=[rows.request_of_row(row) for row in _found(connection, select(tables.request))],
        finished={(tenant, TaskState(state)): n for tenant, state, n in counted},
        usage=[TenantUsage(*row) for row in connection.execute(_USAGE)],
        estimates=[rows.estimate_of_row(row) for row in connection.execute(_ESTIMATES)],
    )


def now(connection: Connection) -> Instant:
    if connection.dialect.name == "sqlite":
        return Instant(time.time())
    return Instant(connection.execute(_NOW).scalar_one())


def held_back(connection: Connection) -> HeldBack | None:
    """By whoever keeps a snapshot, prepared transactions included, without our own, which asks; and by
    replication slots, of which the database knows no times."""
    if connection.dialect.name == "sqlite":
        return None
    [(seconds, transactions)] = connection.exec_driver_sql(_HELD_BACK).fetchall()
    return HeldBack(seconds, transactions)
