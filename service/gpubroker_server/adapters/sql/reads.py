"""The reads of the store. They use their own connections and never wait for the writer."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import json
from msgspec.structs import fields
from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Executable,
    FromClause,
    Select,
    and_,
    bindparam,
    func,
    literal_column,
    or_,
    select,
    true,
    tuple_,
    union,
)

from gpubroker_server.adapters.sql import rows, system_tables, tables
from gpubroker_server.adapters.sql.columns import value_of_row
from gpubroker_server.adapters.sql.session import SqlPart, read_rows
from gpubroker_server.adapters.sql.statements import EVENT, begins_from
from gpubroker_server.adapters.sql.system_tables import installation, leadership, log_head, token, worker_set
from gpubroker_server.core.domain.decisions import ItemPage, QueuePause, Request, StreamState
from gpubroker_server.core.domain.device import Device, Node
from gpubroker_server.core.domain.leader_term import LeaderRow
from gpubroker_server.core.domain.lease import Lease, Pledge
from gpubroker_server.core.domain.orders import ItemRange
from gpubroker_server.core.domain.submission import EXTERNAL_KIND as EXTERNAL
from gpubroker_server.core.domain.submission import KnownKey, WorkerSet, with_told
from gpubroker_server.core.domain.task import TERMINAL, TaskState
from gpubroker_server.core.domain.units import Instant, Lineage, Position, TaskId, Term
from gpubroker_server.core.world.events import Event
from gpubroker_server.core.world.payload import COMMON_FIELDS, HOLDER_FIELDS
from gpubroker_server.core.world.phases import STATE_EVENTS
from gpubroker_server.core.world.tenant_accounts import TenantUsage
from gpubroker_server.ports.arrays import ItemCounts, PageFilter
from gpubroker_server.ports.store import (
    HeldBack,
    RunSpec,
    Snapshot,
    StoredCheckpoint,
    StoredResult,
    StoredState,
    TaskFilter,
    TaskRecord,
    TokenRow,
)

_task, _spec, _outcome, _label = tables.task, tables.task_spec, tables.outcome, tables.task_label

TASK = tuple(_task.c[name] for name in (*COMMON_FIELDS, *HOLDER_FIELDS))
_LEASE = tuple(tables.lease.c[field.name] for field in fields(Lease) if field.name in tables.lease.c)
_PLEDGE = tuple(tables.pledge.c[field.name] for field in fields(Pledge))
_DEVICE = tuple(tables.device.c[field.name] for field in fields(Device))
_lease = tables.lease
# The tenant is left out because it is also in the row of the task, which is joined.
_SPEC = tuple(column for column in _spec.c if column.name != "tenant")
ESTIMATE = tuple(tables.estimate.c[name] for name in ("tenant", "subject", "kind", "what", "counts"))
_ESTIMATES = select(*ESTIMATE).order_by(tables.estimate.c.learned_at)
_USAGE = select(*(tables.usage.c[name] for name in TenantUsage._fields)).order_by(tables.usage.c.tenant)

_chosen, _other = _task.alias("chosen"), _outcome.alias("other")
_newest = select(func.max(_other.c.fence)).where(_other.c.task == _chosen.c.id).scalar_subquery()

_page = tables.item_page.c
_behind = _page.first + _page.count
_PAGE_SUMS = (
    func.coalesce(func.sum(_page.count), 0), func.coalesce(func.sum(_page.failed), 0),
    func.coalesce(func.max(_page.page), 0), func.min(_page.at), func.max(_page.at),
    func.coalesce(func.sum(_page.size_bytes), 0),
)  # fmt: skip
"""Sums over the pages of an array, in the order of the fields of ItemCounts."""

# Statements with parameters are built once: building one costs more than running it.
_RECORDS = (
    select(*(_chosen.c[column.name] for column in TASK), *_SPEC, _outcome.c.failure)
    .join(_spec, _spec.c.task == _chosen.c.id)
    .outerjoin(_outcome, and_(_outcome.c.task == _chosen.c.id, _outcome.c.fence == _newest))
)
"""Selects records of chosen tasks. A query chooses tasks by their ids, because building a subquery of whole
rows leaves hundreds of objects in reference cycles."""
_ONE_RECORD = _RECORDS.where(_chosen.c.id == bindparam("task"))
_RESULT = {"format": "result_format", "data": "result", "digest": "result_digest"}
_NEWEST_OUTCOME = (
    select(
        *(_outcome.c[_RESULT.get(field.name, field.name)].label(field.name) for field in fields(StoredResult))
    )
    .where(_outcome.c.task == bindparam("task"))
    .order_by(_outcome.c.fence.desc())
    .limit(1)
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
_EVENTS_OF_TASKS = _EVENTS.where(tables.event.c.task.in_(bindparam("tasks", expanding=True)))
_KNOWN_KEY = select(_task.c.id, _task.c.body_hash).where(
    _task.c.tenant == bindparam("tenant"), _task.c.idem_key == bindparam("idem_key")
)
_BATCH_ANSWER = select(tables.batch.c.answer).where(tables.batch.c.task == bindparam("task"))
_TOKENS = select(token).order_by(token.c.name)
_HEAD = select(log_head.c.position)
_LINEAGE = select(leadership.c.lineage)
_OLDEST = select(
    func.coalesce(select(func.min(tables.event.c.position)).scalar_subquery(), log_head.c.position + 1)
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
_KEPT_LOG = """
SELECT coalesce(max(pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)), 0) FROM pg_replication_slots
"""
_PENDING_ENTRYPOINTS = (
    select(_spec.c.entrypoint, func.count().label("tasks"))
    .join(_task, _task.c.id == _spec.c.task)
    .where(~_task.c.finished, _task.c.state == TaskState.PENDING, _spec.c.kind == "entrypoint")
    .group_by(_spec.c.entrypoint)
)
_NOW = select(system_tables.now())
_row = leadership.c
_LEADER = select(
    _row.term, _row.holder, _row.lease_until, system_tables.now().label("at"), _row.lineage, _row.server
)
_TASK_NAMES = tuple(column.name for column in TASK)
_IN_PARTS = {"yield_per": 2000}
"""Options for reading rows in parts, so that a long queue is not in memory twice, as rows and as tasks
(`bench restart`)."""


class SqlReads(SqlPart):
    """Implements the reads of the port `TaskStore`."""

    _begin_snapshot: str

    async def known_key(self, tenant: str, key: str) -> KnownKey | None:
        stored = await self._rows(_KNOWN_KEY, {"tenant": tenant, "idem_key": key})
        return KnownKey(TaskId(stored[0]["id"]), stored[0]["body_hash"]) if stored else None

    async def batch_answer(self, first: TaskId) -> str:
        stored = await self._rows(_BATCH_ANSWER, {"task": first})
        return str(stored[0]["answer"]) if stored else ""

    async def snapshot(self) -> Snapshot:
        at = await self.database_time()
        return await self._readers.run(_snapshot, self._begin_snapshot, at)

    async def events(
        self, after: Position, limit: int, tasks: Sequence[TaskId] | None = None
    ) -> Sequence[Event]:
        wanted = {"after": after, "most": limit}
        if tasks is None:
            rows_found = await self._rows(_EVENTS, wanted)
        else:
            rows_found = await self._rows(_EVENTS_OF_TASKS, {**wanted, "tasks": tasks})
        return [rows.event_of_row(tuple(row.values())) for row in rows_found]

    async def moves(self, tasks: Sequence[TaskId]) -> Sequence[Event]:
        moved = select(*EVENT).where(tables.event.c.task.in_(tasks), tables.event.c.kind.in_(STATE_EVENTS))
        rows_found = await self._rows(moved.order_by(tables.event.c.position))
        return [rows.event_of_row(tuple(row.values())) for row in rows_found]

    async def head(self) -> Position:
        return await self._readers.run(head)

    async def oldest(self) -> Position:
        return Position(await self._readers.run(_scalar, _OLDEST))

    async def records(self, wanted: TaskFilter) -> Sequence[TaskRecord]:
        return [_record_of(row) for row in await self._rows(listing(wanted))]

    async def first_records(self, parts: Sequence[TaskFilter], limit: int) -> Sequence[TaskRecord]:
        found = await self._readers.run(_first_rows, self._begin_snapshot, parts, limit)
        return [_record_of(row) for row in found]

    async def selected(self, wanted: TaskFilter) -> Sequence[TaskId]:
        query = _matching(wanted).where(_task.c.model.is_(None))
        return [TaskId(row["id"]) for row in await self._rows(query)]

    async def stored_record(self, task: TaskId) -> TaskRecord | None:
        stored = await self._rows(_ONE_RECORD, {"task": task})
        return _record_of(stored[0]) if stored else None

    async def states(self, tasks: Sequence[TaskId]) -> Mapping[TaskId, StoredState]:
        query = select(_task.c.id, _task.c.tenant, _task.c.state, _task.c.failed_by, _task.c.array)
        stored = await self._rows(query.where(_task.c.id.in_(tasks))) if tasks else ()
        return {
            TaskId(row["id"]): StoredState(
                row["tenant"], TaskState(row["state"]), row["failed_by"], row["array"]
            )
            for row in stored
        }

    async def stored_specs(self, tasks: Sequence[TaskId]) -> Mapping[TaskId, RunSpec]:
        stored = await self._rows(select(*_SPEC).where(_spec.c.task.in_(tasks)))
        return {TaskId(row["task"]): with_told(value_of_row(RunSpec, row)) for row in stored}

    async def pending_entrypoints(self) -> Mapping[str, int]:
        return {row["entrypoint"]: row["tasks"] for row in await self._rows(_PENDING_ENTRYPOINTS)}

    async def stored_result(self, task: TaskId) -> StoredResult | None:
        stored = await self._rows(_NEWEST_OUTCOME, {"task": task})
        return StoredResult(**stored[0] | {"failure": _failure_of(stored[0])}) if stored else None

    async def checkpoints(self, task: TaskId) -> Sequence[StoredCheckpoint]:
        return [StoredCheckpoint(**row) for row in await self._rows(_CHECKPOINTS, {"task": task})]

    async def referenced(self, digests: Sequence[str]) -> frozenset[str]:
        return await self._readers.run(referenced, digests)

    async def tokens(self) -> Sequence[TokenRow]:
        return [value_of_row(TokenRow, row) for row in await self._rows(_TOKENS)]

    async def blobs(self) -> str | None:
        """Return the name of the directory of objects that belongs to this database; None if no directory was
        claimed yet."""
        directory: str | None = await self._readers.run(_scalar, select(installation.c.blobs))
        return directory

    async def held_back(self) -> HeldBack | None:
        return await self._readers.run(_held_back)

    async def log_bytes(self) -> int:
        return await self._readers.run(_log_bytes)

    async def database_time(self) -> Instant:
        return await self._readers.run(now)


def _scalar(connection: Connection, query: Executable) -> Any:
    return connection.execute(query).scalar_one()


def _first_rows(
    connection: Connection, begin: str, parts: Sequence[TaskFilter], limit: int
) -> list[dict[str, Any]]:
    connection.exec_driver_sql(begin)
    found: dict[str, dict[str, Any]] = {}
    for wanted in parts:
        if len(found) < limit:
            found.update((row["id"], row) for row in read_rows(connection, listing(wanted), {}))
    return list(found.values())


def listing(wanted: TaskFilter) -> Select[Any]:
    """Return the query of the records of the tasks that match, in order."""
    return _RECORDS.where(_chosen.c.id.in_(_matching(wanted))).order_by(*_order(_chosen, wanted))


def _order(table: FromClause, wanted: TaskFilter) -> list[ColumnElement[Any]]:
    return [table.c[name].desc() if wanted.descending else table.c[name] for name in wanted.sort.fields]


def _matching(wanted: TaskFilter) -> Select[Any]:
    above = None if wanted.max_priority is None else wanted.max_priority + 1
    priorities = _within(_task.c.priority, wanted.min_priority, above)
    query = select(_task.c.id).where(*_in_states(wanted.states), *priorities)
    if wanted.ids is not None:
        query = query.where(_task.c.id.in_(wanted.ids))
    if wanted.after:
        row_key, after_key = tuple_(*(_task.c[name] for name in wanted.sort.fields)), tuple_(*wanted.after)
        query = query.where(row_key < after_key if wanted.descending else row_key > after_key)
    named = {name: getattr(wanted, name) for name in ("tenant", "name", "stream")}
    query = query.where(*(_task.c[name] == value for name, value in named.items() if value is not None))
    if wanted.model_type is not None:
        query = query.where(_has_spec(_spec.c.model_type == wanted.model_type))
    if wanted.runs_after is not None:
        # A partial index is used only by queries that repeat its condition.
        has_predecessors = _task.c.after != literal_column("'[]'")
        query = query.where(
            has_predecessors, _task.c.after.contains(f'"{wanted.runs_after}"', autoescape=True)
        )
    query = query.where(*_within(_task.c.submitted_at, wanted.submitted_from, wanted.submitted_before))
    query = query.where(*_within(_task.c.finished_at, wanted.finished_from, wanted.finished_before))
    if wanted.kind == EXTERNAL:
        query = query.where(_task.c.external.isnot(None))  # This is the condition of the partial index.
    elif wanted.kind is None:
        # Holders of models are listed only if they are asked for.
        query = query.where(_task.c.home.is_(None))
    else:
        query = query.where(_has_spec(_spec.c.kind == wanted.kind))
    if wanted.quarantined is not None:
        used = select(_lease.c.holder).where(_lease.c.holder == _task.c.id, ~_lease.c.released).exists()
        of_ended = and_(_task.c.finished, used if wanted.quarantined else ~used)
        names_unfinished = any(not state.is_terminal for state in wanted.states)
        query = query.where(or_(~_task.c.finished, of_ended) if names_unfinished else of_ended)
    whose = _label.c.tenant == (wanted.tenant or _task.c.tenant)
    for key, value in wanted.labels.items():
        labelled = select(_label.c.task).where(whose, _label.c.key == key, _label.c.value == value)
        query = query.where(_task.c.id.in_(labelled))
    return query.order_by(*_order(_task, wanted)).limit(wanted.limit)


def _has_spec(condition: ColumnElement[bool]) -> ColumnElement[bool]:
    return select(_spec.c.task).where(_spec.c.task == _task.c.id, condition).correlate(_task).exists()


def _within(value: Column[Any], start: Any, end: Any) -> list[ColumnElement[bool]]:
    """Return the conditions that the value is not before `start`, and before `end`; None stands for no
    bound."""
    return [*([] if start is None else [value >= start]), *([] if end is None else [value < end])]


def _in_states(states: Sequence[TaskState]) -> list[Any]:
    """Return the conditions for these states. If all states are terminal or none is, a condition on
    `finished` makes the database use the partial index of such tasks."""
    names, ended = [state.value for state in states], {state in TERMINAL for state in states}
    if ended == {True}:
        return [_task.c.finished, _task.c.ended_as.in_(names)]
    return [_task.c.state.in_(names) if names else true(), *([~_task.c.finished] if ended == {False} else [])]


def _record_of(row: Mapping[str, Any]) -> TaskRecord:
    task = rows.task_of_row(row[name] for name in _TASK_NAMES)
    return TaskRecord(task, with_told(value_of_row(RunSpec, row)), _failure_of(row))


def _failure_of(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return None if row["failure"] is None else json.decode(row["failure"])


def referenced(connection: Connection, digests: Sequence[str]) -> frozenset[str]:
    named = union(*(select(column).where(column.in_(digests)) for column in tables.DIGESTS))
    return frozenset(connection.execute(named).scalars())


def head(connection: Connection) -> Position:
    return Position(connection.execute(_HEAD).scalar_one())


def lineage(connection: Connection) -> Lineage:
    return Lineage(connection.execute(_LINEAGE).scalar_one())


def leader(connection: Connection) -> LeaderRow:
    [(term, holder, until, at, lineage_number, server)] = connection.execute(_LEADER)
    return LeaderRow(Term(term), holder, Instant(until), Instant(at), Lineage(lineage_number), server)


def _snapshot(connection: Connection, begin: str, at: Instant) -> Snapshot:
    """Return the rows from which a World is built. `begin` is SQL that begins a transaction in which all
    reads see one state, so that the events after `position` are exactly the ones that the rows lack."""
    connection.exec_driver_sql(begin)
    finished, device = tables.finished, tables.device
    holders = select(_lease.c.holder).where(~_lease.c.released)
    unfinished = select(*TASK).where(~_task.c.finished)
    # A finished task and a device that is gone count until all their leases are released.
    leaving = select(*TASK).where(_task.c.finished, _task.c.id.in_(holders))
    leases = read_rows(connection, select(*_LEASE).where(~_lease.c.released), {})
    is_kept = device.c.present | (device.c.leased_mb > 0) | device.c.closure.is_not(None)
    devices = read_rows(connection, select(*_DEVICE).where(is_kept), {})
    requests = read_rows(connection, select(tables.request), {})
    worker_sets = connection.execute(select(worker_set.c.fields)).scalars()
    counted = connection.execute(select(finished.c.tenant, finished.c.state, finished.c.n))
    return Snapshot(
        position=head(connection),
        lineage=lineage(connection),
        at=at,
        tasks=[
            rows.task_of_row(row)
            for query in (unfinished, leaving)
            for row in connection.execute(query, execution_options=_IN_PARTS)
        ],
        leases=[value_of_row(Lease, row) for row in leases],
        pledges=[value_of_row(Pledge, row) for row in read_rows(connection, select(*_PLEDGE), {})],
        devices=[value_of_row(Device, row) for row in devices],
        nodes=[value_of_row(Node, row) for row in read_rows(connection, select(tables.node), {})],
        requests=[value_of_row(Request, row) for row in requests],
        worker_sets=[json.decode(text, type=WorkerSet) for text in worker_sets],
        pauses=[QueuePause(*row) for row in connection.execute(select(tables.queue_pause))],
        streams=[StreamState(*row) for row in connection.execute(select(system_tables.work_stream))],
        finished={(tenant, TaskState(state)): n for tenant, state, n in counted},
        usage=[TenantUsage(*row) for row in connection.execute(_USAGE)],
        estimates=[rows.estimate_of_row(row) for row in connection.execute(_ESTIMATES)],
    )


def now(connection: Connection) -> Instant:
    return Instant(connection.execute(_NOW).scalar_one())


def _held_back(connection: Connection) -> HeldBack | None:
    """Return for how long transactions of other clients have held back the database's cleanup, and how many
    transactions replication slots hold back, whose times are unknown. Returns None for SQLite."""
    if connection.dialect.name == "sqlite":
        return None
    [(seconds, transactions)] = connection.exec_driver_sql(_HELD_BACK).fetchall()
    return HeldBack(seconds, transactions)


def _log_bytes(connection: Connection) -> int:
    if connection.dialect.name != "sqlite":
        return int(connection.exec_driver_sql(_KEPT_LOG).scalar_one())
    [(_, _, file)] = connection.exec_driver_sql("PRAGMA database_list").fetchall()
    try:
        return Path(f"{file}-wal").stat().st_size
    except FileNotFoundError:
        return 0


class SqlItemPages(SqlPart):
    """Implements the port `ItemPages`. Decisions write the pages."""

    async def item_counts(self, array: TaskId) -> ItemCounts:
        return await self._readers.run(_item_counts, array)

    async def items_done(self, array: TaskId) -> Sequence[ItemRange]:
        return await self._readers.run(_items_done, array)

    async def item_pages(self, wanted: PageFilter) -> Sequence[ItemPage]:
        return await self._readers.run(_item_pages, wanted)


def counts_of(array: TaskId) -> Select[Any]:
    """Return the query of the sums over all pages of the array. An index covers the query, so that no page is
    read."""
    return select(*_PAGE_SUMS).where(_page.array == array)


def _item_counts(connection: Connection, array: TaskId) -> ItemCounts:
    done, failed, page, first_at, last_at, size_bytes = connection.execute(counts_of(array)).one()
    return ItemCounts(int(done), int(failed), page, first_at, last_at, int(size_bytes))


def _items_done(connection: Connection, array: TaskId) -> Sequence[ItemRange]:
    ranges = connection.execute(select(_page.first, _behind).where(_page.array == array))
    return [(first, behind) for first, behind in ranges]


def pages_of(wanted: PageFilter) -> Select[Any]:
    """Return the query of the pages, in order. The query finds the first page by an index."""
    whose = _page.array == wanted.array
    query = select(tables.item_page).where(whose).limit(wanted.limit)
    if wanted.by_commit:
        query = query.where(_page.page > wanted.after).order_by(_page.page)
    else:
        begins = begins_from(_page.first, wanted.after + 1, whose)
        query = query.where(begins, _behind > wanted.after + 1).order_by(_page.first)
    if wanted.failed is not None:
        query = query.where(_page.failed > 0 if wanted.failed else _page.failed < _page.count)
    return query


def _item_pages(connection: Connection, wanted: PageFilter) -> Sequence[ItemPage]:
    return [ItemPage(**row) for row in connection.execute(pages_of(wanted)).mappings()]
