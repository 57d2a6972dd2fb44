"""The rows of uploaded objects."""

import json
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import (
    Column,
    Connection,
    Double,
    FromClause,
    Integer,
    Select,
    bindparam,
    case,
    delete,
    false,
    func,
    literal_column,
    select,
    tuple_,
    update,
)

from gpubroker_server.adapters.sql.session import Session, SqlPart, over
from gpubroker_server.adapters.sql.statements import insert_given
from gpubroker_server.adapters.sql.system_tables import Count
from gpubroker_server.adapters.sql.tables import stored_object, task, task_spec
from gpubroker_server.core.domain.stored_objects import LEAST_BYTES, Counted, Quota, StoredObject
from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.ports.objects import ObjectOrder, SortKey

OBJECTS_PER_STEP = 500
_AT = Column("at", Double)
_c = stored_object.c
_KEY = (_c.tenant, _c.digest)
_least: Any = literal_column(str(LEAST_BYTES), Integer)
_COUNTED = (
    func.coalesce(
        func.sum(case((_c.size_bytes < _least, _least), else_=_c.size_bytes)), literal_column("0", Count)
    ),
    func.count(),
)
"""The total size in bytes and the number of objects. Each object counts as at least LEAST_BYTES."""

_OBJECT = select(stored_object).where(_c.tenant == bindparam("tenant"), _c.digest == bindparam("digest"))
_COUNTED_OBJECTS = select(*_COUNTED).where(_c.tenant == bindparam("tenant"), _c.expires_at > bindparam("now"))


class SqlObjects(SqlPart):
    """Implements the port `ObjectRows`."""

    async def keep_object(self, given: StoredObject, quota: Quota) -> StoredObject | None:
        def act(session: Session) -> StoredObject | None:
            # Lock the head of the log first: other uploads wait for it, and then count this one, so that
            # simultaneous uploads cannot exceed the quota together.
            session.take_positions(0)
            session.write(_drop_expired, [(given.tenant, given.created_at)])
            [(others, many)] = session.fetch(_count_others, [(given.tenant, given.digest)])
            if not quota.has_room(Counted(int(others), many), given):
                return None
            row = (given.tenant, given.digest, given.size_bytes, given.created_at, given.expires_at)
            [kept] = session.fetch(_keep, [row])
            return StoredObject(*kept)

        return await self._write_alone(act)

    async def stored_object(self, tenant: str, digest: str) -> StoredObject | None:
        return await self._readers.run(_find, tenant, digest)

    async def find_object(self, tenant: str, digest: str, now: Instant) -> StoredObject | None:
        kept = await self.stored_object(tenant, digest)
        return kept if kept is not None and kept.expires_at > now else None

    async def note_use(self, kept: StoredObject, now: Instant, object_seconds: Seconds) -> None:
        expires_at = kept.end_after_use(now, object_seconds)
        if expires_at is not None:
            await self.extend_object(kept.tenant, kept.digest, expires_at)

    async def stored_objects(
        self, tenant: str, now: Instant, order: ObjectOrder, *, after: SortKey = (), limit: int
    ) -> Sequence[StoredObject]:
        return await self._readers.run(_page, listing(tenant, now, order, after, limit))

    async def counted_objects(self, tenant: str, now: Instant) -> Counted:
        return await self._readers.run(_count, tenant, now)

    async def objects_of_open_tasks(self) -> Collection[tuple[str, str]]:
        return await self._readers.run(_named_by_open_tasks)

    async def extend_object(self, tenant: str, digest: str, until: Instant) -> None:
        await self._write_alone(lambda session: session.write(_extend, [(tenant, digest, until)]))

    async def drop_object(self, tenant: str, digest: str) -> bool:
        is_dropped = False

        def act(session: Session) -> bool:
            # The act is repeated if the answer to its commit was lost, and then finds no object.
            nonlocal is_dropped
            is_dropped = bool(session.fetch(_drop, [(tenant, digest)])) or is_dropped
            return is_dropped

        return await self._write_alone(act)


def prune_objects(session: Session, now: Instant) -> bool:
    """Remove some objects that had expired by `now`. Returns True if there were any."""
    return bool(session.fetch(_prune, [(now,)]))


def _find(connection: Connection, tenant: str, digest: str) -> StoredObject | None:
    row = connection.execute(_OBJECT, {"tenant": tenant, "digest": digest}).one_or_none()
    return None if row is None else StoredObject(*row)


def listing(tenant: str, now: Instant, order: ObjectOrder, after: SortKey, limit: int) -> Select[Any]:
    """Return the query of a page. A page that is sorted by digest, as the primary key is, reads only its own
    rows."""
    columns = [_c[name] for name in order.sort.fields]
    query = select(stored_object).where(_c.tenant == tenant, _c.expires_at > now).limit(limit)
    if after:
        row_key, after_key = tuple_(*columns), tuple_(*after)
        query = query.where(row_key < after_key if order.descending else row_key > after_key)
    return query.order_by(*(column.desc() if order.descending else column for column in columns))


def _page(connection: Connection, query: Select[Any]) -> Sequence[StoredObject]:
    return [StoredObject(*row) for row in connection.execute(query)]


def _count(connection: Connection, tenant: str, now: Instant) -> Counted:
    size_bytes, objects = connection.execute(_COUNTED_OBJECTS, {"tenant": tenant, "now": now}).one()
    return Counted(int(size_bytes), objects)


def _named_by_open_tasks(connection: Connection) -> Collection[tuple[str, str]]:
    query = select(task.c.tenant, task_spec.c.objects).join(task_spec, task_spec.c.task == task.c.id)
    rows = connection.execute(query.where(task.c.finished == false(), task_spec.c.objects != "[]").distinct())
    return {(tenant, id) for tenant, objects in rows for id in json.loads(objects)}


@over(_c.tenant, _AT)
def _drop_expired(_insert: Any, r: FromClause) -> Any:
    now = select(r.c.at).scalar_subquery()
    return delete(stored_object).where(_c.tenant.in_(select(r.c.tenant)), _c.expires_at <= now)


@over(*_KEY)
def _count_others(_insert: Any, r: FromClause) -> Any:
    others = (_c.tenant == r.c.tenant) & (_c.digest != r.c.digest)
    return select(*_COUNTED).select_from(r.join(stored_object, others))


@over(*_c)
def _keep(insert: Any, r: FromClause) -> Any:
    statement = insert_given(insert, stored_object, r)
    later = statement.excluded.expires_at
    # An upload that is repeated never shortens the time for which the object is kept.
    end = case((_c.expires_at > later, _c.expires_at), else_=later)
    return statement.on_conflict_do_update(index_elements=list(_KEY), set_={"expires_at": end}).returning(
        *stored_object.c
    )


@over(*_KEY, _c.expires_at)
def _extend(_insert: Any, r: FromClause) -> Any:
    same = (_c.tenant == r.c.tenant) & (_c.digest == r.c.digest) & (_c.expires_at < r.c.expires_at)
    return update(stored_object).values(expires_at=r.c.expires_at).where(same)


@over(*_KEY)
def _drop(_insert: Any, r: FromClause) -> Any:
    chosen = tuple_(*_KEY).in_(select(r.c.tenant, r.c.digest))
    return delete(stored_object).where(chosen).returning(_c.digest)


@over(_AT)
def _prune(_insert: Any, r: FromClause) -> Any:
    """Delete some objects that have expired. The deletion itself checks the time again, because another
    transaction may have extended it since the object was found."""
    now, other = select(r.c.at).scalar_subquery(), stored_object.alias("other")
    step: Any = literal_column(str(OBJECTS_PER_STEP))
    expired = select(other.c.tenant, other.c.digest).where(other.c.expires_at <= now).limit(step)
    chosen = tuple_(*_KEY).in_(expired.offset(literal_column("0")))
    return delete(stored_object).where(chosen, _c.expires_at <= now).returning(_c.digest)
