"""The last values of the leader and the gateways. On PostgreSQL the readers' connections write these values,
so that no commit waits for them."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from pydantic_core import from_json
from sqlalchemy import ColumnElement, Connection, FromClause, bindparam, delete, select

from gpubroker_server.adapters.sql.session import Row, SqlPart, json_text, over, postgres_rows, postgres_text
from gpubroker_server.adapters.sql.statements import insert_given
from gpubroker_server.adapters.sql.system_tables import last_value
from gpubroker_server.core.control.idle import Idle
from gpubroker_server.core.domain.device import DeviceSample, NodeSample
from gpubroker_server.core.domain.progress import Progress
from gpubroker_server.core.domain.units import Instant, TaskId, Term
from gpubroker_server.core.serving.slots import Claim
from gpubroker_server.ports.last_values import (
    LastValues,
    LastValueStore,
    LeaderSeen,
    Presence,
    PresenceStore,
    SlotStore,
)

_REVISIONS_PER_TERM = 2**32
"""The distance between the first revisions of two terms. A leader never publishes so often in one term, so
all revisions of a later term are higher."""

OF_GATEWAYS = -(2**62)
"""The revision of a gateway's row is OF_GATEWAYS plus the row's time in microseconds. It is below all
revisions of leaders, and it rises, because each such row has one writer, whose clock never goes back."""


@over(*last_value.c)
def write_last_values(insert: Any, r: FromClause) -> Any:
    """Write values over older values, never over newer ones."""
    written = insert_given(insert, last_value, r)
    new = {"revision": written.excluded.revision, "value": written.excluded.value}
    return written.on_conflict_do_update(
        index_elements=[last_value.c.kind, last_value.c.key],
        set_=new,
        where=last_value.c.revision <= written.excluded.revision,
    )


_NEWER = select(last_value).where(last_value.c.revision > bindparam("after"))
_PRESENCES = select(last_value.c.key, last_value.c.value).where(last_value.c.kind == "gateway")
_CLAIMS = select(last_value.c.key, last_value.c.value).where(last_value.c.kind == "slots")


class SqlLastValues(SqlPart, LastValueStore, PresenceStore, SlotStore):
    """Implements the ports `LastValueStore`, `PresenceStore` and `SlotStore`."""

    async def publish(self, term: Term, number: int, values: LastValues) -> None:
        if self.is_shared:
            await self._readers.run(_publish, term, number, values)
        else:
            rows = _rows(term, number, values)
            await self._write_alone(lambda session: session.write(write_last_values, rows))

    async def published(self, after: int) -> tuple[int, LastValues]:
        return await self._readers.run(_published, after)

    async def present(self, presence: Presence) -> None:
        value = {
            "at": presence.at,
            "let_go": sorted(presence.let_go),
            "in_use": sorted(presence.in_use),
            "recent": sorted(presence.recent),
        }
        await self._put("gateway", presence.gateway, presence.at, value)

    async def absent(self, gateway: str) -> None:
        await self._readers.run(_forget, "gateway", gateway)

    async def presences(self) -> Sequence[Presence]:
        return await self._readers.run(_presences)

    async def claim_slots(self, claim: Claim) -> None:
        value = {"at": claim.at, "holds": claim.holds, "wants": claim.wants}
        await self._put("slots", claim.gateway, claim.at, value)

    async def slot_claims(self) -> Sequence[Claim]:
        return await self._readers.run(_claims)

    async def drop_slots(self, gateway: str) -> None:
        await self._readers.run(_forget, "slots", gateway)

    @property
    def is_shared(self) -> bool:
        raise NotImplementedError

    async def _put(self, kind: str, key: str, at: Instant, value: Any) -> None:
        """Write a row of a gateway. A cancelled call still waits until the row is written, so that no row is
        written after `absent` or `drop_slots`."""
        row = (kind, key, OF_GATEWAYS + round(at * 1e6), json_text(value))
        written = asyncio.ensure_future(self._readers.run(_write_rows, [row]))
        try:
            await asyncio.shield(written)
        except asyncio.CancelledError:
            await asyncio.wait([written])
            raise


def _publish(connection: Connection, term: Term, number: int, values: LastValues) -> None:
    """Write the values, and delete the progress of runs that have ended. The first publication of a term also
    deletes the values of older leaders."""
    outdated = []
    if values.ended:
        outdated.append((last_value.c.kind == "run") & last_value.c.key.in_(values.ended))
    if number == 1:
        is_older = last_value.c.revision < term * _REVISIONS_PER_TERM
        # Rows of gateways are below every term. A new leader needs their claims of slots.
        outdated.append(is_older & (last_value.c.kind != "slots"))
    _write_rows(connection, _rows(term, number, values), *outdated)


def _rows(term: Term, number: int, values: LastValues) -> Sequence[Row]:
    revision = term * _REVISIONS_PER_TERM + number
    return sorted((kind, key, revision, json_text(value)) for kind, key, value in _by_key(values))


def _forget(connection: Connection, kind: str, key: str) -> None:
    _write_rows(connection, (), (last_value.c.kind == kind) & (last_value.c.key == key))


def _write_rows(connection: Connection, rows: Sequence[Row], *outdated: ColumnElement[bool]) -> None:
    """Write the rows without waiting for the disk, because all values are published again soon."""
    connection.exec_driver_sql("BEGIN READ WRITE")
    connection.exec_driver_sql("SET LOCAL synchronous_commit = off")
    if rows:
        connection.exec_driver_sql(
            postgres_text(write_last_values), {"rows": postgres_rows(write_last_values, rows)}
        )
    for condition in outdated:
        connection.execute(delete(last_value).where(condition))
    connection.exec_driver_sql("COMMIT")


def _by_key(values: LastValues) -> Iterator[tuple[str, str, Any]]:
    yield from (("device", sample.device, sample) for sample in values.samples)
    yield from (("node", sample.node, sample) for sample in values.nodes)
    yield from (("run", task, progress) for task, progress in values.progress.items())
    if values.leader is not None:
        yield "leader", "", values.leader
    if values.idle is not None:
        yield "idle", "", values.idle


def _published(connection: Connection, after: int) -> tuple[int, LastValues]:
    """Return the newest revision, and the values that were published after the revision `after`. A leader of
    a newer release may publish more fields, which msgspec ignores."""
    samples: list[DeviceSample] = []
    nodes: list[NodeSample] = []
    progress: dict[TaskId, Progress] = {}
    leader: LeaderSeen | None = None
    idle: tuple[Idle, ...] | None = None
    newest = after
    for kind, key, revision, value in connection.execute(_NEWER, {"after": after}):
        newest = max(newest, revision)
        match kind:
            case "device":
                samples.append(msgspec.json.decode(value, type=DeviceSample))
            case "node":
                nodes.append(msgspec.json.decode(value, type=NodeSample))
            case "run":
                progress[TaskId(key)] = msgspec.json.decode(value, type=Progress)
            case "leader":
                leader = msgspec.json.decode(value, type=LeaderSeen)
            case "idle":
                idle = msgspec.json.decode(value, type=tuple[Idle, ...])
    return newest, LastValues(tuple(samples), progress, leader, idle, nodes=tuple(nodes))


def _claims(connection: Connection) -> Sequence[Claim]:
    values = [(gateway, from_json(value)) for gateway, value in connection.execute(_CLAIMS)]
    return [Claim(gateway, value["at"], value["holds"], value["wants"]) for gateway, value in values]


def _presences(connection: Connection) -> Sequence[Presence]:
    values = [(gateway, from_json(value)) for gateway, value in connection.execute(_PRESENCES)]
    return [
        Presence(
            gateway,
            value["at"],
            frozenset(value["let_go"]),
            frozenset(value.get("in_use", ())),
            frozenset(value.get("recent", ())),
        )
        for gateway, value in values
    ]
