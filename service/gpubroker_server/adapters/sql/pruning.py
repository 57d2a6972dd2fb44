"""Pruning in small steps: finished tasks with all their rows, the beginning of the log, and old audit
notes."""

from math import inf
from typing import Any, Final

from pydantic_core import from_json
from sqlalchemy import Boolean, Column, Double, FromClause, Integer, delete, literal_column, select
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import GenericFunction

from gpubroker_server.adapters.sql import system_tables, tables
from gpubroker_server.adapters.sql.objects import prune_objects
from gpubroker_server.adapters.sql.session import Session, SetStatement, over
from gpubroker_server.adapters.sql.statements import ONE, delete_rows
from gpubroker_server.adapters.sql.system_tables import Count
from gpubroker_server.core.domain.lease import HOLDERS_OF_TASKS
from gpubroker_server.core.domain.policy import Cutoffs
from gpubroker_server.core.domain.submission import WORKER_LABELS
from gpubroker_server.core.domain.units import TaskId, Term

TASKS_PER_STEP: Final = 200
EVENTS_PER_STEP: Final = 2000
_task, _spec, _event, _audit = tables.task, tables.task_spec, tables.event, system_tables.audit


def prune_step(session: Session, term: Term, cutoffs: Cutoffs) -> list[TaskId] | None:
    """Remove some expired rows, in a transaction that fails if the term is over. Returns the tasks that were
    removed; None if nothing was left to remove."""
    session.require_term(term)
    tasks = _prune_tasks(session, cutoffs)
    events = _prune_first(session, _FIRST_EVENTS, _DELETE_EVENTS, cutoffs.finished, cutoffs.heard)
    notes = _prune_first(session, _FIRST_NOTES, _DELETE_NOTES, cutoffs.audited)
    objects = prune_objects(session, cutoffs.expired)
    return tasks if tasks or events or notes or objects else None


def _prune_tasks(session: Session, cutoffs: Cutoffs) -> list[TaskId]:
    finished = session.fetch(_finished_tasks, [(cutoffs.finished, cutoffs.keyed)])
    if not finished:
        return []
    ids = [(id,) for id, _, _ in finished]
    labels = [
        (tenant, key, value, id) for id, tenant, text in finished for key, value in from_json(text).items()
    ]
    if labels:
        session.write(_DELETE_LABELS, labels)
    kinds = sorted(str(kind) for kind in HOLDERS_OF_TASKS)
    session.write(_DELETE_LEASES, [(kind, id) for (id,) in ids for kind in kinds])
    for statement in _DELETE_OF_TASKS:
        session.write(statement, ids)
    return [TaskId(id) for (id,) in ids]


def _prune_first(
    session: Session, first: SetStatement, delete_upto: SetStatement, before: float, last: float = inf
) -> bool:
    """Delete the first rows that are older than `before`, up to the place `last`. Deletion stops at the first
    newer row, so that the rest has no gap even if the clock was set back. Returns True if there were any."""
    upto = None
    for place, at in session.fetch(first, [(1,)]):
        if at >= before or place > last:
            break
        upto = place
    if upto is None:
        return False
    session.write(delete_upto, [(upto,)])
    return True


class _IsAwaited(GenericFunction[bool]):
    """The SQL condition that an unfinished task waits for the end of the given task."""

    type = Boolean()
    inherit_cache = True


_AWAITED = (
    "{id} IN (SELECT {first} FROM task AS d, {each} WHERE d.after <> '[]' AND d.awaits AND NOT d.finished)"
)


@compiles(_IsAwaited, "sqlite")
def _on_sqlite(is_awaited: _IsAwaited, compiler: Any, **options: Any) -> str:
    id = compiler.process(is_awaited.clauses, **options)
    return _AWAITED.format(id=id, first="json_extract(one.value, '$[0]')", each="json_each(d.after) AS one")


@compiles(_IsAwaited, "postgresql")
def _on_postgresql(is_awaited: _IsAwaited, compiler: Any, **options: Any) -> str:
    id = compiler.process(is_awaited.clauses, **options)
    each = "jsonb_array_elements(d.after::jsonb) AS one(value)"
    return _AWAITED.format(id=id, first="one.value->>0", each=each)


@over(Column("before", Double), Column("keyed_before", Double))
def _finished_tasks(_insert: Any, r: FromClause) -> Any:
    """Find finished tasks whose memory is confirmed free, whose idempotency key has expired, and for whose
    end no task waits: a new leader would read how an awaited task ended. The first worker of an array or a
    worker set stays while others work, because the terms and the results of the whole array or set are in its
    rows. Times are scalar subqueries for the planner's sake, as in `statements.tail`."""
    lease, label, worker = tables.lease, tables.task_label, _task.alias("worker")
    before, keyed_before = (select(time).scalar_subquery() for time in (r.c.before, r.c.keyed_before))
    held = select(lease.c.holder).where(lease.c.holder == _task.c.id, ~lease.c.released).exists()
    ended = (_task.c.finished) & (_task.c.finished_at < before)
    of_first = (
        (label.c.tenant == _task.c.tenant)
        & label.c.key.in_([literal_column(f"'{name}'") for name in WORKER_LABELS])
        & (label.c.value == _task.c.id)
    )
    at_work = select(worker.c.id).join(label, label.c.task == worker.c.id).where(of_first, ~worker.c.finished)
    unkeyed = _task.c.idem_key.is_(None) | (_task.c.submitted_at < keyed_before)
    return (
        select(_task.c.id, _task.c.tenant, _spec.c.labels)
        .join_from(_task, _spec, _spec.c.task == _task.c.id)
        .where(ended & unkeyed & ~held & ~_IsAwaited(_task.c.id) & ~at_work.exists())
        .order_by(_task.c.finished_at)
        .limit(literal_column(str(TASKS_PER_STEP)))
        .offset(literal_column("0"))  # Without it SQLAlchemy makes the offset a parameter.
    )


def _first(table: Any, name: str) -> SetStatement:
    """Return the statement that finds the first rows, in the order in which they were written, with their
    times. The statement takes one row."""

    def build(_insert: Any, r: FromClause) -> Any:
        rows = select(table.c[name], table.c.at).order_by(table.c[name])
        some = rows.limit(literal_column(str(EVENTS_PER_STEP))).offset(literal_column("0")).subquery("first")
        return select(*some.c).select_from(r.join(some, r.c.one == ONE)).order_by(some.c[name])

    return SetStatement(f"first {table.name}", (Column("one", Integer),), build)


def _upto(table: Any, name: str) -> SetStatement:
    def build(_insert: Any, r: FromClause) -> Any:
        return delete(table).where(table.c[name] <= select(r.c.upto).scalar_subquery())

    return SetStatement(f"prune {table.name}", (Column("upto", Count),), build)


_DELETE_LABELS = delete_rows(tables.task_label, ("tenant", "key", "value", "task"))
_DELETE_LEASES = delete_rows(tables.lease, ("holder_kind", "holder"))
_DELETE_OF_TASKS = (
    delete_rows(tables.outcome, ("task",)),
    delete_rows(tables.checkpoint, ("task",)),
    delete_rows(tables.run_log, ("task",)),
    delete_rows(tables.run_output, ("task",)),
    delete_rows(tables.batch, ("task",)),
    delete_rows(tables.item_page, ("array",)),
    delete_rows(_spec, ("task",)),
    delete_rows(_task, ("id",)),
)
_FIRST_EVENTS, _DELETE_EVENTS = _first(_event, "position"), _upto(_event, "position")
_FIRST_NOTES, _DELETE_NOTES = _first(_audit, "id"), _upto(_audit, "id")
