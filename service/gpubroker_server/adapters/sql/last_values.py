"""What leader and gateways have last said that is no event: written past the writer, so that no commit waits
for it."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, TypeVar

from pydantic_core import from_json
from sqlalchemy import Connection, FromClause, bindparam, delete, select, true
from sqlalchemy.dialects.postgresql import insert

from gpubroker_server.adapters.sql.rowset import SetStatement, json_text, postgres_rows, postgres_text
from gpubroker_server.adapters.sql.shared import last_value
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

T = TypeVar("T")

_PER_TERM = 2**32
"""More than a leader ever writes in its term, once a second."""

_OWN = -(2**62)
"""From here on gateways count their own words, in microseconds: below each leader's, so that none is heard as
one. Each row of theirs has one writer, whose clock never goes back: so its own time puts them in order."""


def _write(insert: Any, r: FromClause) -> Any:
    """Over an older word, never over a newer one."""
    source = select(*(r.c[c.name] for c in last_value.c)).where(true())
    said = insert(last_value).from_select([c.name for c in last_value.c], source)
    new = {"revision": said.excluded.revision, "value": said.excluded.value}
    return said.on_conflict_do_update(
        index_elements=[last_value.c.kind, last_value.c.key],
        set_=new,
        where=last_value.c.revision < said.excluded.revision,
    )


_WRITE = SetStatement("write last_value", tuple(last_value.c), _write)
_NEWER = select(last_value).where(last_value.c.revision > bindparam("after"))
_PRESENCES = select(last_value.c.key, last_value.c.value).where(last_value.c.kind == "gateway")
_CLAIMS = select(last_value.c.key, last_value.c.value).where(last_value.c.kind == "slots")
_FROM_OLDER_TERMS = delete(last_value).where(
    last_value.c.revision < bindparam("first"), last_value.c.kind != "slots"
)
"""But not what gateways claim, which holds whoever leads."""


class SqlLastValues(LastValueStore, PresenceStore, SlotStore):
    """The part of the store that has them."""

    async def say(self, term: Term, number: int, values: LastValues) -> None:
        await self._read(write, term, number, values)

    async def said(self, after: int) -> tuple[int, LastValues]:
        return await self._read(read, after)

    async def present(self, presence: Presence) -> None:
        value = json_text({"at": presence.at, "let_go": sorted(presence.let_go)})
        await self._put("gateway", presence.gateway, presence.at, value)

    async def absent(self, gateway: str) -> None:
        await self._read(_forget, "gateway", gateway)

    async def presences(self) -> Sequence[Presence]:
        return await self._read(_presences)

    async def claim_slots(self, claim: Claim) -> None:
        value = json_text({"at": claim.at, "holds": claim.holds, "wants": claim.wants})
        await self._put("slots", claim.gateway, claim.at, value)

    async def slot_claims(self) -> Sequence[Claim]:
        return await self._read(_claims)

    async def drop_slots(self, gateway: str) -> None:
        await self._read(_forget, "slots", gateway)

    async def _put(self, kind: str, key: str, at: Instant, value: str) -> None:
        """Who is cancelled meanwhile ends when it is written: nothing comes after a goodbye."""
        written = asyncio.ensure_future(self._read(_put, kind, key, at, value))
        try:
            await asyncio.shield(written)
        except asyncio.CancelledError:
            await asyncio.wait([written])
            raise

    async def _read(self, query: Callable[..., T], *values: Any) -> T:
        """On one of the readers' connections."""
        raise NotImplementedError


def write(connection: Connection, term: Term, number: int, values: LastValues) -> None:
    """The leader's `number`-th word of its term, counted from 1; what it says for the first time takes the
    place of all that older leaders said."""
    revision = term * _PER_TERM + number
    rows = sorted((kind, key, revision, json_text(value)) for kind, key, value in _said(values))
    connection.exec_driver_sql("BEGIN READ WRITE")
    connection.exec_driver_sql("SET LOCAL synchronous_commit = off")  # soon it is said again
    if rows:
        connection.exec_driver_sql(postgres_text(_WRITE), {"rows": postgres_rows(_WRITE, rows)})
    if values.ended:
        of_runs = last_value.c.kind == "run"
        connection.execute(delete(last_value).where(of_runs, last_value.c.key.in_(values.ended)))
    if number == 1:
        connection.execute(_FROM_OLDER_TERMS, {"first": term * _PER_TERM})
    connection.exec_driver_sql("COMMIT")


def read(connection: Connection, after: int) -> tuple[int, LastValues]:
    """What was said after a revision, and the revision of that."""
    found = connection.execute(_NEWER, {"after": after}).fetchall()
    said = [(kind, key, from_json(value)) for kind, key, _, value in found]
    return max((revision for _, _, revision, _ in found), default=after), _heard(said)


def _put(connection: Connection, kind: str, key: str, at: Instant, value: str) -> None:
    """A gateway's own word. One that was on its way for longer takes no newer one's place."""
    connection.exec_driver_sql("BEGIN READ WRITE")
    connection.exec_driver_sql("SET LOCAL synchronous_commit = off")
    said = insert(last_value).values(kind=kind, key=key, revision=_OWN + round(at * 1e6), value=value)
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
    found = connection.execute(_CLAIMS).fetchall()
    said = [(gateway, from_json(value)) for gateway, value in found]
    return [Claim(gateway, value["at"], value["holds"], value["wants"]) for gateway, value in said]


def _presences(connection: Connection) -> Sequence[Presence]:
    found = connection.execute(_PRESENCES).fetchall()
    said = [(gateway, from_json(value)) for gateway, value in found]
    return [Presence(gateway, value["at"], frozenset(value["let_go"])) for gateway, value in said]


def _said(values: LastValues) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for sample in values.samples:
        yield "device", sample.device, asdict(sample)
    for task, progress in values.progress.items():
        yield "run", task, asdict(progress)
    if values.leader is not None:
        yield "leader", "", asdict(values.leader)


def _heard(said: Iterable[tuple[str, str, Mapping[str, Any]]]) -> LastValues:
    samples: list[DeviceSample] = []
    progress: dict[TaskId, Progress] = {}
    leader: LeaderSeen | None = None
    for kind, key, value in said:
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
    """A leader of a later release may say more."""
    return {about.name: value[about.name] for about in fields(form) if about.name in value}
