"""The statements of a group commit. A guard, which makes a stale write fail, is part of the statement."""

from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import Any

from sqlalchemy import (
    Column,
    ColumnElement,
    FromClause,
    Integer,
    Table,
    Text,
    and_,
    case,
    delete,
    func,
    literal_column,
    select,
    true,
    tuple_,
    update,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from gpubroker_server.adapters.sql import system_tables, tables
from gpubroker_server.adapters.sql.session import SetStatement, over
from gpubroker_server.adapters.sql.system_tables import Count
from gpubroker_server.core.domain.task import HOT_FIELDS
from gpubroker_server.core.world.payload import COMMON_FIELDS, HOLDER_FIELDS

ONE: Any = literal_column("1", Integer)
_EMPTY: Any = literal_column("''", Text)


def columns_of(table: Table, names: Iterable[str] | None = None) -> tuple[Column[Any], ...]:
    return tuple(table.c[name] for name in names) if names is not None else tuple(table.c)


class OnConflict(Enum):
    """Ways to treat a row whose key exists."""

    FAIL = auto()
    SKIP = auto()
    REPLACE = auto()


def insert_given(insert: Any, table: Table, r: FromClause, names: Sequence[str] | None = None) -> Any:
    """Return the INSERT of the rows of `r` into the table."""
    names = names or [column.name for column in table.c]
    # Without a WHERE, SQLite reads the ON of a following ON CONFLICT as the ON of a join.
    return insert(table).from_select(names, select(*(r.c[name] for name in names)).where(true()))


def insert_into(
    table: Table, names: Sequence[str] | None = None, *, known: OnConflict, exact: bool = False
) -> SetStatement:
    columns = columns_of(table, names)

    def build(insert: Any, r: FromClause) -> Any:
        statement = insert_given(insert, table, r, [c.name for c in columns])
        key = list(table.primary_key.columns)
        rest = {c.name: statement.excluded[c.name] for c in columns if c not in key}
        match known:
            case OnConflict.FAIL:
                return statement
            case OnConflict.SKIP:
                return statement.on_conflict_do_nothing()
            case OnConflict.REPLACE:
                return statement.on_conflict_do_update(index_elements=key, set_=rest)

    copied = "" if known is OnConflict.REPLACE else table.name
    return SetStatement(f"insert {table.name}", columns, build, exact, copied)


class SameKey(FunctionElement[Any]):
    """The condition that a column of a key has the given value. PostgreSQL gets the condition in a form that
    gives rows no order: otherwise, for a table that was empty when its statistics were taken, the planner
    would walk through the whole index and compare each row with each given one."""

    inherit_cache = True


@compiles(SameKey)
def _equal(same: SameKey, compiler: SQLCompiler, **given: Any) -> str:
    return " = ".join(compiler.process(side, **given) for side in same.clauses)


@compiles(SameKey, "postgresql")
def _equal_without_order(same: SameKey, compiler: SQLCompiler, **given: Any) -> str:
    column, value = (compiler.process(side, **given) for side in same.clauses)
    return f"{column} = ANY (ARRAY[{value}])"


def _update_guarded(table: Table, names: Sequence[str]) -> SetStatement:
    """Return the statement that writes rows of version n over rows of version n - 1. `names` are the key, the
    version and the columns that change."""
    key = list(table.primary_key.columns)

    def build(_insert: Any, r: FromClause) -> Any:
        same = [SameKey(column, r.c[column.name]) for column in key]
        changes = {name: r.c[name] for name in names if name not in {column.name for column in key}}
        return update(table).values(changes).where(*same, table.c.version == r.c.version - ONE)

    return SetStatement(f"update {table.name}", columns_of(table, names), build, exact=True)


def delete_rows(table: Table, names: Sequence[str], *, exact: bool = False) -> SetStatement:
    """Return the statement that deletes the rows with the given values in these columns."""
    columns = columns_of(table, names)

    def build(_insert: Any, r: FromClause) -> Any:
        chosen = select(*(r.c[name] for name in names))
        return delete(table).where(tuple_(*columns).in_(chosen))

    return SetStatement(f"delete {table.name}", columns, build, exact)


def begins_from(first: ColumnElement[int], at: Any, *whose: ColumnElement[bool]) -> ColumnElement[bool]:
    """Return the condition that a range is the last one that begins at `at` or before, or a later one.
    `first` is the column with the beginning of a range. `whose` are the conditions that choose the ranges of
    one owner. No two ranges of one owner overlap, so no earlier range reaches `at`.

    A condition on the ends of the ranges would choose the same rows, but without an index: each page would
    read all ranges before it.
    """
    last = select(func.max(first)).where(*whose, first <= at).correlate(None).scalar_subquery()
    return first >= func.coalesce(last, literal_column("0"))


EVENT = columns_of(tables.event, ("position", "at", "kind", "key", "version", "tenant", "fields", "reader"))
_LATER = frozenset({
    "state", "version", "fence", "failed_by", "failures", "preemptions", "node", "admitted_at", "ordered_at",
    "started_at", "checkpoint_at", "finished_at", "stop_reason", "stop_deadline_at", "stop_cause",
    "freeing_for", "members",
})  # fmt: skip
"""Fields that have their defaults in a new task. Their columns have equal defaults, so no insert names
them."""
_TASK_HEAD, _SPEC_HEAD = ("id", "queued_bytes"), ("task", "arguments", "arguments_digest", "tenant")
TASK_IN = (
    *_TASK_HEAD,
    *(name for name in COMMON_FIELDS if name not in _LATER | {*_TASK_HEAD}),
    *(name for name in HOLDER_FIELDS if name not in _LATER),
    "home",
    "idem_key",
    "body_hash",
)
SPEC_IN = (*_SPEC_HEAD, *(c.name for c in tables.task_spec.c if c.name not in (*_SPEC_HEAD, "env")), "env")
TASK_MOVED = (
    "id", "version", *(name for name in HOT_FIELDS if name != "holder"),
    "model", "members", "home", "finished", "ended_as",
)  # fmt: skip
EVENT_IN = ("position", "key", "task", "fields", "kind", "version", "tenant", "reader", "at")
"""TASK_IN, SPEC_IN and EVENT_IN begin with the columns that differ among the tasks of a batch, which are the
heads of an `Alike`."""
LEASE_KEY = ("holder_kind", "holder", "fence", "rank", "device")
LEASE_IN = (*(c.name for c in tables.lease.c if c.name != "released"), "released")
LEASE_MOVED = (*LEASE_KEY, "version", "state", "overused_mb", "quarantined_at", "released")
DEVICE_IN = tuple(c.name for c in tables.device.c if c.name != "leased_mb")

INSERT_TASKS = insert_into(tables.task, TASK_IN, known=OnConflict.SKIP, exact=True)
INSERT_SPECS = insert_into(tables.task_spec, SPEC_IN, known=OnConflict.SKIP)
INSERT_LABELS = insert_into(tables.task_label, ("task", "tenant", "key", "value"), known=OnConflict.SKIP)
INSERT_BATCHES = insert_into(tables.batch, known=OnConflict.SKIP)
INSERT_REQUESTS = insert_into(tables.request, known=OnConflict.SKIP, exact=True)
WRITE_NODES = insert_into(tables.node, known=OnConflict.REPLACE)
WRITE_DEVICES = insert_into(tables.device, DEVICE_IN, known=OnConflict.REPLACE)
MOVE_TASKS = _update_guarded(tables.task, TASK_MOVED)
INSERT_LEASES = insert_into(tables.lease, LEASE_IN, known=OnConflict.SKIP, exact=True)
MOVE_LEASES = _update_guarded(tables.lease, LEASE_MOVED)
END_PLEDGES = delete_rows(tables.pledge, ("preemptor", "device"), exact=True)
MAKE_PLEDGES = insert_into(tables.pledge, known=OnConflict.REPLACE)
WRITE_OUTCOMES = insert_into(tables.outcome, known=OnConflict.REPLACE)
INSERT_ITEM_PAGES = insert_into(tables.item_page, known=OnConflict.SKIP, exact=True)
WRITE_CHECKPOINTS = insert_into(tables.checkpoint, known=OnConflict.REPLACE)
DELETE_REQUESTS = delete_rows(tables.request, ("id",))
MAKE_PAUSES = insert_into(tables.queue_pause, known=OnConflict.REPLACE)
END_PAUSES = delete_rows(tables.queue_pause, ("queue",))
WRITE_WORKER_SETS = insert_into(system_tables.worker_set, known=OnConflict.REPLACE)
END_WORKER_SETS = delete_rows(system_tables.worker_set, ("id",))
WRITE_STREAMS = insert_into(system_tables.work_stream, known=OnConflict.REPLACE)
REMOVE_STREAMS = delete_rows(system_tables.work_stream, ("name",))
FORGET_ESTIMATES = delete_rows(tables.estimate, ("tenant", "subject", "kind", "what"))
WRITE_ESTIMATES = insert_into(tables.estimate, known=OnConflict.REPLACE)
WRITE_USAGE = insert_into(tables.usage, known=OnConflict.REPLACE)
INSERT_EVENTS = insert_into(tables.event, EVENT_IN, known=OnConflict.FAIL)
INSERT_AUDIT = insert_into(
    system_tables.audit, ("at", "tenant", "actor", "action", "subject", "reason"), known=OnConflict.FAIL
)


@over(*INSERT_AUDIT.columns)
def noted(_insert: Any, r: FromClause) -> Any:
    """Find the rows of the audit log that equal a given one."""
    audit = system_tables.audit
    same = (column == r.c[column.name] for column in INSERT_AUDIT.columns)
    return select(audit.c.id).select_from(r.join(audit, and_(*same)))


@over(tables.device.c.key, Column("mb", Integer), exact=True)
def lease_memory(_insert: Any, r: FromClause) -> Any:
    device = tables.device
    return update(device).values(leased_mb=device.c.leased_mb + r.c.mb).where(SameKey(device.c.key, r.c.key))


@over(tables.checkpoint.c.task)
def trim_checkpoints(_insert: Any, r: FromClause) -> Any:
    """Delete all but the newest three checkpoints of each task."""
    old, newer = tables.checkpoint, tables.checkpoint.alias("newer")
    later = tuple_(newer.c.fence, newer.c.sequence) > tuple_(old.c.fence, old.c.sequence)
    count = select(func.count()).select_from(newer).where(newer.c.task == old.c.task, later)
    return delete(old).where(old.c.task.in_(select(r.c.task)), count.scalar_subquery() >= literal_column("3"))


@over(*tables.finished.c)
def count_finished(insert: Any, r: FromClause) -> Any:
    table = tables.finished
    statement = insert_given(insert, table, r)
    total = {"n": table.c.n + statement.excluded.n}
    return statement.on_conflict_do_update(index_elements=list(table.primary_key.columns), set_=total)


IN_ORDER = (
    INSERT_TASKS, INSERT_SPECS, INSERT_LABELS, INSERT_BATCHES, INSERT_REQUESTS, WRITE_NODES, WRITE_DEVICES,
    MOVE_TASKS, INSERT_LEASES, MOVE_LEASES, lease_memory, END_PLEDGES, MAKE_PLEDGES, WRITE_OUTCOMES,
    INSERT_ITEM_PAGES, WRITE_CHECKPOINTS, trim_checkpoints, DELETE_REQUESTS, MAKE_PAUSES, END_PAUSES,
    WRITE_WORKER_SETS, END_WORKER_SETS, WRITE_STREAMS, REMOVE_STREAMS, FORGET_ESTIMATES, WRITE_ESTIMATES,
    count_finished, INSERT_AUDIT,
)  # fmt: skip
"""The order of the statements of a group. Devices come before the leases that use their memory, and ends of
pledges before new pledges of the same key."""


@over(tables.task.c.tenant, tables.task.c.idem_key)
def known_keys(_insert: Any, r: FromClause) -> Any:
    task = tables.task
    same = (task.c.tenant == r.c.tenant) & (task.c.idem_key == r.c.idem_key)
    return select(task.c.tenant, task.c.idem_key, task.c.id, task.c.body_hash).select_from(r.join(task, same))


@over(tables.task.c.home)
def known_homes(_insert: Any, r: FromClause) -> Any:
    task = tables.task
    same = (task.c.home == r.c.home) & task.c.finished.is_(False)
    return select(task.c.home, task.c.id).select_from(r.join(task, same))


@over(tables.task.c.id)
def known_ids(_insert: Any, r: FromClause) -> Any:
    return select(tables.task.c.id).select_from(r.join(tables.task, tables.task.c.id == r.c.id))


@over(tables.usage.c.tenant)
def usage_of(_insert: Any, r: FromClause) -> Any:
    usage = tables.usage
    columns = (usage.c.tenant, usage.c.held_mb, usage.c.mb_seconds, usage.c.at)
    return select(*columns).select_from(r.join(usage, usage.c.tenant == r.c.tenant))


@over(system_tables.log_head.c.id, Column("after", Count), Column("last", Count))
def tail(_insert: Any, r: FromClause) -> Any:
    """Return a row for each event after the position `after` up to `last`, or one row without an event if
    there is none. Each row begins with the head of the log, the number of changes of tokens, the oldest
    schema that may write, and the lineage.

    The positions are scalar subqueries. PostgreSQL estimates that `r` has a hundred rows: if the log were
    joined with it, the planner would read the whole log along its key.
    """
    head, whole, event = system_tables.log_head, system_tables.installation, tables.event
    after, last = (select(column).scalar_subquery() for column in (r.c.after, r.c.last))
    inside = (event.c.position > after) & (event.c.position <= last)
    term = system_tables.leadership
    of_all = head.join(whole, whole.c.id == head.c.id).join(term, term.c.id == head.c.id)
    joined = of_all.outerjoin(event, inside)
    about = (head.c.position.label("head"), whole.c.token_changes, head.c.compatible_from, term.c.lineage)
    columns = (*about, *EVENT)
    only = head.c.id == select(r.c.id).scalar_subquery()
    return select(*columns).select_from(joined).where(only).order_by(event.c.position)


@over(system_tables.log_head.c.id)
def oldest(_insert: Any, r: FromClause) -> Any:
    """Return the position of the first event in the log, or of the next event if the log is empty."""
    head, event = system_tables.log_head, tables.event
    first = select(func.min(event.c.position)).scalar_subquery()
    next_position = head.c.position + ONE
    return select(func.coalesce(first, next_position)).select_from(r.join(head, head.c.id == r.c.id))


@over(system_tables.installation.c.id)
def count_token_change(_insert: Any, r: FromClause) -> Any:
    row = system_tables.installation
    return update(row).values(token_changes=row.c.token_changes + ONE).where(row.c.id == r.c.id)


@over(*columns_of(system_tables.installation, ("id", "blobs")), Column("seen", Text))
def claim_blobs(_insert: Any, r: FromClause) -> Any:
    """Set the directory of objects if the present one is `seen` (empty for none). Returns the directory that
    is set after that."""
    row = system_tables.installation
    claimed = case((func.coalesce(row.c.blobs, _EMPTY) == r.c.seen, r.c.blobs), else_=row.c.blobs)
    return update(row).values(blobs=claimed).where(row.c.id == r.c.id).returning(row.c.blobs)


@over(*system_tables.token.c)
def add_token(insert: Any, r: FromClause) -> Any:
    added = insert_given(insert, system_tables.token, r)
    return added.on_conflict_do_nothing().returning(system_tables.token.c.name)


@over(Column("name", Text))
def drop_token(_insert: Any, r: FromClause) -> Any:
    token = system_tables.token
    return delete(token).where(token.c.name.in_(select(r.c.name))).returning(token.c.name, token.c.tenant)


@over(Column("name", Text))
def token_hash(_insert: Any, r: FromClause) -> Any:
    token = system_tables.token
    return select(token.c.sha256).where(token.c.name.in_(select(r.c.name)))
