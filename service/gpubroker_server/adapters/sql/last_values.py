"""Last values of the leader and the gateways. They are written on reader connections, so no commit waits for
them."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from pydantic_core import from_json
from sqlalchemy import Connection, FromClause, bindparam, delete, select
from sqlalchemy.dialects.postgresql import insert

from gpubroker_server.adapters.sql.postgres import postgres_rows, postgres_text
from gpubroker_server.adapters.sql.reads import Readers
from gpubroker_server.adapters.sql.session import json_text, over
from gpubroker_server.adapters.sql.statements import insert_given
from gpubroker_server.adapters.sql.system_tables import last_value
from gpubroker_server.core.domain.device import DeviceSample
from gpubroker_server.core.domain.units import Instant, TaskId, Term
from gpubroker_server.core.lifecycle.silent_nodes import PausedDetection
from gpubroker_server.core.serving.slots import Claim
from gpubroker_server.ports.last_values import (
    LastValues,
    LastValueStore,
    LeaderSeen,
    Presence,
    PresenceStore,
    SlotStore,
)
from gpubroker_server.ports.store import Progress

_REVISIONS_PER_TERM = 2**32
"""More than a leader ever publishes in one term."""

_OF_GATEWAYS = -(2**62)
"""The revision of a gateway's row is this plus its time in microseconds: below those of leaders, and in
order, because each such row has one writer, whose clock never goes back."""


@over(*last_value.c)
def _write(insert: Any, r: FromClause) -> Any:
    """Over older values, never over newer ones."""
    said = insert_given(insert, last_value, r)
    new = {"revision": said.excluded.revision, "value": said.excluded.value}
    return said.on_conflict_do_update(
        index_elements=[last_value.c.kind, last_value.c.key],
        set_=new,
        where=last_value.c.revision < said.excluded.revision,
    )


_NEWER = select(last_value).where(last_value.c.revision > bindparam("after"))
_PRESENCES = select(last_value.c.key, last_value.c.value).where(last_value.c.kind == "gateway")
_CLAIMS = select(last_value.c.key, last_value.c.value).where(last_value.c.kind == "slots")
_FROM_OLDER_TERMS = delete(last_value).where(
    last_value.c.revision < bindparam("first"), last_value.c.kind != "slots"
)
"""But not the claims of gateways, which a new leader needs."""


class SqlLastValues(LastValueStore, PresenceStore, SlotStore):
    """The LastValueStore, PresenceStore and SlotStore of the store."""

    _readers: Readers

    async def publish(self, term: Term, number: int, values: LastValues) -> None:
        await self._readers.run(_publish, term, number, values)

    async def published(self, after: int) -> tuple[int, LastValues]:
        return await self._readers.run(_published, after)

    async def present(self, presence: Presence) -> None:
        value = json_text({"at": presence.at, "let_go": sorted(presence.let_go)})
        await self._put("gateway", presence.gateway, presence.at, value)

    async def absent(self, gateway: str) -> None:
        await self._readers.run(_forget, "gateway", gateway)

    async def presences(self) -> Sequence[Presence]:
        return await self._readers.run(_presences)

    async def claim_slots(self, claim: Claim) -> None:
        value = json_text({"at": claim.at, "holds": claim.holds, "wants": claim.wants})
        await self._put("slots", claim.gateway, claim.at, value)

    async def slot_claims(self) -> Sequence[Claim]:
        return await self._readers.run(_claims)

    async def drop_slots(self, gateway: str) -> None:
        await self._readers.run(_forget, "slots", gateway)

    async def _put(self, kind: str, key: str, at: Instant, value: str) -> None:
        """When cancelled, ends once it is written: no presence is written after `absent`."""
        written = asyncio.ensure_future(self._readers.run(_put, kind, key, at, value))
        try:
            await asyncio.shield(written)
        except asyncio.CancelledError:
            await asyncio.wait([written])
            raise


def _publish(connection: Connection, term: Term, number: int, values: LastValues) -> None:
    """Number 1 of a term deletes what older leaders published."""
    revision = term * _REVISIONS_PER_TERM + number
    rows = sorted((kind, key, revision, json_text(value)) for kind, key, value in _values_by_key(values))
    connection.exec_driver_sql("BEGIN READ WRITE")
    connection.exec_driver_sql("SET LOCAL synchronous_commit = off")  # it is published again soon
    if rows:
        connection.exec_driver_sql(postgres_text(_write), {"rows": postgres_rows(_write, rows)})
    if values.ended:
        of_runs = last_value.c.kind == "run"
        connection.execute(delete(last_value).where(of_runs, last_value.c.key.in_(values.ended)))
    if number == 1:
        connection.execute(_FROM_OLDER_TERMS, {"first": term * _REVISIONS_PER_TERM})
    connection.exec_driver_sql("COMMIT")


def _published(connection: Connection, after: int) -> tuple[int, LastValues]:
    """What was published after a revision, and the newest revision."""
    rows = connection.execute(_NEWER, {"after": after}).fetchall()
    found = [(kind, key, from_json(value)) for kind, key, _, value in rows]
    return max((revision for _, _, revision, _ in rows), default=after), _values_of(found)


def _put(connection: Connection, kind: str, key: str, at: Instant, value: str) -> None:
    """A gateway's row, unless a newer one is there."""
    connection.exec_driver_sql("BEGIN READ WRITE")
    connection.exec_driver_sql("SET LOCAL synchronous_commit = off")
    said = insert(last_value).values(kind=kind, key=key, revision=_OF_GATEWAYS + round(at * 1e6), value=value)
    newest = said.on_conflict_do_update(
        index_elements=[last_value.c.kind, last_value.c.key],
        set_={"revision": said.excluded.revision, "value": said.excluded.value},
        where=last_value.c.revision <= said.excluded.revision,
    )
    connection.execute(newest)
    connection.exec_driver_sql("COMMIT")


def _forget(connection: Connection, kind: str, key: str) -> None:
    connection.exec_driver_sql("BEGIN READ WRITE")
    connection.execute(delete(last_value).where(last_value.c.kind == kind, last_value.c.key == key))
    connection.exec_driver_sql("COMMIT")


def _claims(connection: Connection) -> Sequence[Claim]:
    found = [(gateway, from_json(value)) for gateway, value in connection.execute(_CLAIMS)]
    return [Claim(gateway, value["at"], value["holds"], value["wants"]) for gateway, value in found]


def _presences(connection: Connection) -> Sequence[Presence]:
    found = [(gateway, from_json(value)) for gateway, value in connection.execute(_PRESENCES)]
    return [Presence(gateway, value["at"], frozenset(value["let_go"])) for gateway, value in found]


def _values_by_key(values: LastValues) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for sample in values.samples:
        yield "device", sample.device, asdict(sample)
    for task, progress in values.progress.items():
        yield "run", task, asdict(progress)
    if values.leader is not None:
        yield "leader", "", asdict(values.leader)


def _values_of(found: Iterable[tuple[str, str, Mapping[str, Any]]]) -> LastValues:
    samples: list[DeviceSample] = []
    progress: dict[TaskId, Progress] = {}
    leader: LeaderSeen | None = None
    for kind, key, value in found:
        match kind:
            case "device":
                samples.append(DeviceSample(**_known(DeviceSample, value)))
            case "run":
                progress[TaskId(key)] = Progress(**_known(Progress, value))
            case "leader":
                leader = LeaderSeen(**{**_known(LeaderSeen, value), "paused": _paused(value["paused"])})
    return LastValues(tuple(samples), progress, leader)


def _paused(value: Mapping[str, Any] | None) -> PausedDetection | None:
    if value is None:
        return None
    return PausedDetection(**{**_known(PausedDetection, value), "nodes": tuple(value["nodes"])})


def _known(form: Any, value: Mapping[str, Any]) -> Mapping[str, Any]:
    """A leader of a newer release may publish more fields."""
    return {about.name: value[about.name] for about in fields(form) if about.name in value}
