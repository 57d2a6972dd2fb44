"""What is over is taken out in small steps: tasks with all that is theirs, and the beginning of the log."""

from math import inf
from typing import Any, Final

from pydantic_core import from_json
from sqlalchemy import Boolean, Column, Double, FromClause, Integer, delete, literal_column, select
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import GenericFunction

from gpubroker_server.adapters.sql import tables
from gpubroker_server.adapters.sql.columns import Count
from gpubroker_server.adapters.sql.objects import prune_objects
from gpubroker_server.adapters.sql.rowset import SetStatement
from gpubroker_server.adapters.sql.session import Session
from gpubroker_server.adapters.sql.statements import delete_rows
from gpubroker_server.core.domain.lease import HOLDERS_OF_TASKS
from gpubroker_server.core.domain.policy import Cutoffs
from gpubroker_server.core.domain.units import TaskId, Term

TASKS_PER_STEP: Final = 200
EVENTS_PER_STEP: Final = 2000
_AT = Column("before", Double)
_task, _spec, _event, _audit = tables.task, tables.task_spec, tables.event, tables.audit


def prune_step(session: Session, term: Term, cutoffs: Cutoffs) -> list[TaskId] | None:
    """One step, within a transaction that fails if the term is over. The tasks that it took out; None if
    there was nothing to take out at all."""
    session.require_term(term)
    tasks = _prune_tasks(session, cutoffs)
    events = _prune_first(session, _OLDEST_EVENTS, _DELETE_EVENTS, cutoffs.finished, cutoffs.heard)
    notes = _prune_first(session, _OLDEST_NOTES, _DELETE_NOTES, cutoffs.audited)
    objects = prune_objects(session)
    return tasks if tasks or events or notes or objects else None


def _prune_tasks(session: Session, cutoffs: Cutoffs) -> list[TaskId]:
    found = session.fetch(_OVER, [(cutoffs.finished, cutoffs.keyed)])
    if not found:
        return []
    ids = [(id,) for id, _, _ in found]
    labels = [
        (tenant, key, value, id) for id, tenant, text in found for key, value in from_json(text).items()
    ]
    if labels:
        session.write(_DELETE_LABELS, labels)
    kinds = sorted(str(kind) for kind in HOLDERS_OF_TASKS)
    session.write(_DELETE_LEASES, [(kind, id) for (id,) in ids for kind in kinds])
    for statement in _DELETE_OF_TASKS:
        session.write(statement, ids)
    return [TaskId(id) for (id,) in ids]


def _prune_first(
    session: Session, oldest: SetStatement, away: SetStatement, before: float, last: float = inf
) -> int:
    """Only a beginning goes, so that what is left has no gap."""
    upto = None
    for place, at in session.fetch(oldest, [(1,)]):
        if at >= before or place > last:
            break
        upto = place
    if upto is None:
        return 0
    session.write(away, [(upto,)])
    return 1


class _IsAwaited(GenericFunction[bool]):
    """Whether a task that has not ended and still awaits others runs after this one."""

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


def _over(_insert: Any, r: FromClause) -> Any:
    """Whose memory is confirmed free, whose key need not be known any more, and whose end nobody waits for:
    a leader that comes into office asks how those ended after whom others run.

    The times are values to the planner, which would else look through all that has ended (see `TAIL`)."""
    lease = tables.lease
    before, keyed_before = (select(time).scalar_subquery() for time in (r.c.before, r.c.keyed_before))
    held = select(lease.c.holder).where(lease.c.holder == _task.c.id, ~lease.c.released).exists()
    ended = (_task.c.finished) & (_task.c.finished_at < before)
    unkeyed = _task.c.idem_key.is_(None) | (_task.c.submitted_at < keyed_before)
    return (
        select(_task.c.id, _task.c.tenant, _spec.c.labels)
        .join_from(_task, _spec, _spec.c.task == _task.c.id)
        .where(ended & unkeyed & ~held & ~_IsAwaited(_task.c.id))
        .order_by(_task.c.finished_at)
        .limit(literal_column(str(TASKS_PER_STEP)))
        .offset(literal_column("0"))  # else SQLite is given one as a parameter
    )


def _of_tasks(table: Any, name: str) -> SetStatement:
    column = table.c[name]

    def build(_insert: Any, r: FromClause) -> Any:
        return delete(table).where(column.in_(select(r.c[name])))

    return SetStatement(f"prune {table.name}", (column,), build)


def _first(table: Any, name: str) -> SetStatement:
    """The first rows in the order in which they were written, with their times. `one` says nothing."""

    def build(_insert: Any, r: FromClause) -> Any:
        rows = select(table.c[name], table.c.at).order_by(table.c[name])
        some = rows.limit(literal_column(str(EVENTS_PER_STEP))).offset(literal_column("0")).subquery("first")
        return (
            select(*some.c).select_from(r.join(some, r.c.one == literal_column("1"))).order_by(some.c[name])
        )

    return SetStatement(f"first {table.name}", (Column("one", Integer),), build)


def _upto(table: Any, name: str) -> SetStatement:
    def build(_insert: Any, r: FromClause) -> Any:
        return delete(table).where(table.c[name] <= select(r.c.upto).scalar_subquery())

    return SetStatement(f"prune {table.name}", (Column("upto", Count),), build)


_OVER = SetStatement("over", (_AT, Column("keyed_before", Double)), _over)
_DELETE_LABELS = delete_rows(tables.task_label, ("tenant", "key", "value", "task"), exact=False)
_DELETE_LEASES = delete_rows(tables.lease, ("holder_kind", "holder"), exact=False)
_DELETE_OF_TASKS = (
    _of_tasks(tables.outcome, "task"),
    _of_tasks(tables.checkpoint, "task"),
    _of_tasks(tables.batch, "task"),
    _of_tasks(_spec, "task"),
    _of_tasks(_task, "id"),
)
_OLDEST_EVENTS, _DELETE_EVENTS = _first(_event, "position"), _upto(_event, "position")
_OLDEST_NOTES, _DELETE_NOTES = _first(_audit, "id"), _upto(_audit, "id")
