"""Every statement that writes, each over a set of rows. Guards are part of the statement itself."""

from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import Any

from sqlalchemy import (
    Column,
    Double,
    FromClause,
    Integer,
    Table,
    Text,
    case,
    delete,
    func,
    literal_column,
    select,
    true,
    tuple_,
    update,
)

from gpubroker_server.adapters.sql import tables
from gpubroker_server.adapters.sql.columns import Count, now
from gpubroker_server.adapters.sql.rowset import SetStatement
from gpubroker_server.adapters.sql.shared import installation
from gpubroker_server.core.domain.task import HOT_FIELDS

_ONE: Any = literal_column("1", Integer)
_NOTHING: Any = literal_column("''", Text)


def _columns(table: Table, names: Iterable[str] | None = None) -> tuple[Column[Any], ...]:
    return tuple(table.c[name] for name in names) if names is not None else tuple(table.c)


class OnConflict(Enum):
    """What becomes of a row whose key is there already."""

    FAIL = auto()
    SKIP = auto()
    REPLACE = auto()


def _insert(
    table: Table, names: Sequence[str] | None = None, *, known: OnConflict, exact: bool = False
) -> SetStatement:
    columns = _columns(table, names)

    def build(insert: Any, r: FromClause) -> Any:
        source = select(*(r.c[c.name] for c in columns)).where(true())
        statement = insert(table).from_select([c.name for c in columns], source)
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


def _update_guarded(table: Table, names: Sequence[str]) -> SetStatement:
    """Write rows of version n over rows of version n - 1; `names` are key, version and what changes."""
    key = list(table.primary_key.columns)

    def build(_insert: Any, r: FromClause) -> Any:
        same = [column == r.c[column.name] for column in key]
        changes = {name: r.c[name] for name in names if name not in {column.name for column in key}}
        return update(table).values(changes).where(*same, table.c.version == r.c.version - _ONE)

    return SetStatement(f"update {table.name}", _columns(table, names), build, exact=True)


def delete_rows(table: Table, names: Sequence[str], *, exact: bool) -> SetStatement:
    columns = _columns(table, names)

    def build(_insert: Any, r: FromClause) -> Any:
        chosen = select(*(r.c[name] for name in names))
        return delete(table).where(tuple_(*columns).in_(chosen))

    return SetStatement(f"delete {table.name}", columns, build, exact)


def _add(table: Table, name: str) -> SetStatement:
    """Add to a number of a row, made if it is not there."""

    def build(insert: Any, r: FromClause) -> Any:
        statement = insert(table).from_select([c.name for c in table.c], select(*r.c).where(true()))
        total = table.c[name] + statement.excluded[name]
        key = list(table.primary_key.columns)
        return statement.on_conflict_do_update(index_elements=key, set_={name: total})

    return SetStatement(f"count {table.name}", tuple(table.c), build)


def _lease_memory(_insert: Any, r: FromClause) -> Any:
    device = tables.device
    return update(device).values(leased_mb=device.c.leased_mb + r.c.mb).where(device.c.key == r.c.key)


def _trim_checkpoints(_insert: Any, r: FromClause) -> Any:
    """Keep the newest three of each task."""
    old, newer = tables.checkpoint, tables.checkpoint.alias("newer")
    later = tuple_(newer.c.fence, newer.c.sequence) > tuple_(old.c.fence, old.c.sequence)
    count = select(func.count()).select_from(newer).where(newer.c.task == old.c.task, later)
    return delete(old).where(old.c.task.in_(select(r.c.task)), count.scalar_subquery() >= literal_column("3"))


def _known_keys(_insert: Any, r: FromClause) -> Any:
    task = tables.task
    same = (task.c.tenant == r.c.tenant) & (task.c.idem_key == r.c.idem_key)
    return select(task.c.tenant, task.c.idem_key, task.c.id, task.c.body_hash).select_from(r.join(task, same))


def _known_homes(_insert: Any, r: FromClause) -> Any:
    task = tables.task
    same = (task.c.home == r.c.home) & task.c.finished.is_(False)
    return select(task.c.home, task.c.id).select_from(r.join(task, same))


def _known_ids(_insert: Any, r: FromClause) -> Any:
    return select(tables.task.c.id).select_from(r.join(tables.task, tables.task.c.id == r.c.id))


def _tail(_insert: Any, r: FromClause) -> Any:
    """One row at least: the head, with each event after a position, up to another one, or with none.

    Both positions are values to the planner. Joined with their row, of which it believes that there are a
    hundred, it would rather read the whole log along its key than sort what so many of them might find.
    """
    head, whole, event = tables.log_head, installation, tables.event
    after, last = (select(column).scalar_subquery() for column in (r.c.after, r.c.last))
    inside = (event.c.position > after) & (event.c.position <= last)
    joined = head.join(whole, whole.c.id == head.c.id).outerjoin(event, inside)
    columns = (head.c.position.label("head"), whole.c.token_changes, head.c.compatible_from, *EVENT)
    only = head.c.id == select(r.c.id).scalar_subquery()
    return select(*columns).select_from(joined).where(only).order_by(event.c.position)


def _oldest(_insert: Any, r: FromClause) -> Any:
    head, event = tables.log_head, tables.event
    oldest = select(func.min(event.c.position)).scalar_subquery()
    next_one = head.c.position + _ONE
    return select(func.coalesce(oldest, next_one)).select_from(r.join(head, head.c.id == r.c.id))


def _count_token_change(_insert: Any, r: FromClause) -> Any:
    changes = installation.c.token_changes
    return update(installation).values(token_changes=changes + _ONE).where(installation.c.id == r.c.id)


def _claim_blobs(_insert: Any, r: FromClause) -> Any:
    """If it is still the one that was seen, empty for none; the one that it is then comes back."""
    now = installation.c.blobs
    claimed = case((func.coalesce(now, _NOTHING) == r.c.seen, r.c.blobs), else_=now)
    change = update(installation).values(blobs=claimed)
    return change.where(installation.c.id == r.c.id).returning(installation.c.blobs)


def _lock_leader(_insert: Any, r: FromClause) -> Any:
    """Against commits, each of which holds a share of it; a renewal waits for none of them."""
    leader = tables.leadership
    return select(leader.c.term).select_from(r.join(leader, leader.c.id == r.c.id)).with_for_update(of=leader)


def _take_term(_insert: Any, r: FromClause) -> Any:
    """If the row is still the one that was seen."""
    leader = tables.leadership
    same = (leader.c.id == r.c.id, leader.c.term == r.c.term, leader.c.lease_until == r.c.seen_until)
    change = update(leader).values(
        term=leader.c.term + _ONE, holder=r.c.holder, taken_at=now(), lease_until=now() + r.c.ttl_seconds
    )
    return change.where(*same).returning(leader.c.term, leader.c.taken_at)


def _renew_term(_insert: Any, r: FromClause) -> Any:
    leader = tables.leadership
    change = update(leader).values(lease_until=now() + r.c.ttl_seconds)
    return change.where(leader.c.term == r.c.term).returning(leader.c.term)


def _resign_term(_insert: Any, r: FromClause) -> Any:
    leader = tables.leadership
    change = update(leader).values(lease_until=literal_column("0", Double))
    return change.where(leader.c.term == r.c.term).returning(leader.c.term)


def _leader(_insert: Any, r: FromClause) -> Any:
    leader = tables.leadership
    columns = (leader.c.term, leader.c.holder, leader.c.lease_until, now().label("now"))
    return select(*columns).select_from(r.join(leader, leader.c.id == r.c.id))


def _add_token(insert: Any, r: FromClause) -> Any:
    token = tables.token
    source = select(*(r.c[c.name] for c in token.c)).where(true())
    added = insert(token).from_select([c.name for c in token.c], source)
    return added.on_conflict_do_nothing().returning(token.c.name)


def _drop_token(_insert: Any, r: FromClause) -> Any:
    token = tables.token
    return delete(token).where(token.c.name.in_(select(r.c.name))).returning(token.c.name, token.c.tenant)


def _token_hash(_insert: Any, r: FromClause) -> Any:
    token = tables.token
    return select(token.c.sha256).where(token.c.name.in_(select(r.c.name)))


def _usage_of(_insert: Any, r: FromClause) -> Any:
    usage = tables.usage
    columns = (usage.c.tenant, usage.c.held_mb, usage.c.mb_seconds, usage.c.at)
    return select(*columns).select_from(r.join(usage, usage.c.tenant == r.c.tenant))


EVENT = _columns(tables.event, ("position", "at", "kind", "key", "version", "tenant", "fields", "reader"))
TASK_IN = (
    "id", "tenant", "name", "priority", "demand", "submitted_at", "max_retries", "timeout_seconds",
    "grace_seconds", "shareable", "after", "queue_ttl_seconds", "deadline_at", "expected_seconds", "stream",
    "subject", "external", "model", "home", "held", "awaits", "expires_at", "not_before", "idem_key",
    "body_hash",
)  # fmt: skip
SPEC_IN = (
    "task", "arguments", "arguments_digest", "tenant", "kind", "entrypoint", "command", "python", "env",
    "result_format", "labels", "model_type", "working_directory", "sizing",
)  # fmt: skip
EVENT_IN = ("position", "at", "key", "task", "fields", "kind", "version", "tenant", "reader")
"""What differs among tasks that are alike comes first, in each of these."""
LEASE_KEY = ("holder_kind", "holder", "fence", "rank", "device")
DEVICE_IN = tuple(c.name for c in tables.device.c if c.name != "leased_mb")

INSERT_TASKS = _insert(tables.task, TASK_IN, known=OnConflict.SKIP, exact=True)
INSERT_SPECS = _insert(tables.task_spec, SPEC_IN, known=OnConflict.SKIP)
INSERT_LABELS = _insert(tables.task_label, ("task", "tenant", "key", "value"), known=OnConflict.SKIP)
INSERT_BATCHES = _insert(tables.batch, known=OnConflict.SKIP)
INSERT_REQUESTS = _insert(tables.request, known=OnConflict.SKIP, exact=True)
WRITE_NODES = _insert(tables.node, known=OnConflict.REPLACE)
WRITE_DEVICES = _insert(tables.device, DEVICE_IN, known=OnConflict.REPLACE)
MOVE_TASKS = _update_guarded(tables.task, ("id", "version", *HOT_FIELDS, "finished", "ended_as"))
INSERT_LEASES = _insert(tables.lease, known=OnConflict.SKIP, exact=True)
MOVE_LEASES = _update_guarded(
    tables.lease, (*LEASE_KEY, "version", "state", "released", "overused_mb", "quarantined_at")
)
LEASE_MEMORY = SetStatement(
    "lease memory", (tables.device.c.key, Column("mb", Integer)), _lease_memory, exact=True
)
END_PLEDGES = delete_rows(tables.pledge, ("preemptor", "device"), exact=True)
MAKE_PLEDGES = _insert(tables.pledge, known=OnConflict.REPLACE)
WRITE_OUTCOMES = _insert(tables.outcome, known=OnConflict.REPLACE)
WRITE_CHECKPOINTS = _insert(tables.checkpoint, known=OnConflict.REPLACE)
TRIM_CHECKPOINTS = SetStatement("trim checkpoint", (tables.checkpoint.c.task,), _trim_checkpoints)
DELETE_REQUESTS = delete_rows(tables.request, ("id",), exact=False)
FORGET_ESTIMATES = delete_rows(tables.estimate, ("tenant", "subject", "kind", "what"), exact=False)
WRITE_ESTIMATES = _insert(tables.estimate, known=OnConflict.REPLACE)
COUNT_FINISHED = _add(tables.finished, "n")
WRITE_USAGE = _insert(tables.usage, known=OnConflict.REPLACE)
INSERT_EVENTS = _insert(tables.event, EVENT_IN, known=OnConflict.FAIL)
INSERT_AUDIT = _insert(
    tables.audit, ("at", "tenant", "actor", "action", "subject", "reason"), known=OnConflict.FAIL
)

IN_ORDER = (
    INSERT_TASKS, INSERT_SPECS, INSERT_LABELS, INSERT_BATCHES, INSERT_REQUESTS, WRITE_NODES, WRITE_DEVICES,
    MOVE_TASKS, INSERT_LEASES, MOVE_LEASES, LEASE_MEMORY, END_PLEDGES, MAKE_PLEDGES, WRITE_OUTCOMES,
    WRITE_CHECKPOINTS, TRIM_CHECKPOINTS, DELETE_REQUESTS, FORGET_ESTIMATES, WRITE_ESTIMATES, COUNT_FINISHED,
    INSERT_AUDIT,
)  # fmt: skip
"""The order in which one group runs them. Devices before the leases that count on them, ends of pledges
before new pledges of the same key."""

KNOWN_KEYS = SetStatement("known keys", (tables.task.c.tenant, tables.task.c.idem_key), _known_keys)
KNOWN_HOMES = SetStatement("known homes", (tables.task.c.home,), _known_homes)
KNOWN_IDS = SetStatement("known ids", (tables.task.c.id,), _known_ids)
USAGE_OF = SetStatement("usage of", (tables.usage.c.tenant,), _usage_of)
TAIL = SetStatement("tail", (tables.log_head.c.id, Column("after", Count), Column("last", Count)), _tail)
"""Position of the newest event, how often tokens have changed, and who may write; then events."""
OLDEST = SetStatement("oldest", (tables.log_head.c.id,), _oldest)
"""Position of the first event that is still in the log, or of the next one."""
LEADER = SetStatement("leader", _columns(tables.leadership, ("id",)), _leader)
LOCK_LEADER = SetStatement("lock leader", _columns(tables.leadership, ("id",)), _lock_leader)
_TTL = Column("ttl_seconds", Double)
TAKE_TERM = SetStatement(
    "take term",
    (*_columns(tables.leadership, ("id", "holder", "term")), Column("seen_until", Double), _TTL),
    _take_term,
)
RENEW_TERM = SetStatement("renew term", (tables.leadership.c.term, _TTL), _renew_term)
RESIGN_TERM = SetStatement("resign term", (tables.leadership.c.term,), _resign_term)
CLAIM_BLOBS = SetStatement(
    "claim blobs", (*_columns(installation, ("id", "blobs")), Column("seen", Text)), _claim_blobs
)
COUNT_TOKEN_CHANGE = SetStatement("count token change", (installation.c.id,), _count_token_change)
ADD_TOKENS = SetStatement("add token", tuple(tables.token.c), _add_token)
DROP_TOKENS = SetStatement("drop token", (Column("name", Text),), _drop_token)
TOKEN_HASHES = SetStatement("token hash", (Column("name", Text),), _token_hash)
