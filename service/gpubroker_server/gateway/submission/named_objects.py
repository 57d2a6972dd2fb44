"""The objects that arguments name: `{"object": id}` in JSON, and what a function says about its own."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from gpubroker_server.core.domain.submission import RunSpec
from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.gateway.http.faults import invalid
from gpubroker_server.gateway.http.problems import Fault
from gpubroker_server.gateway.submission.task_body import Command, Entrypoint, Function
from gpubroker_server.ports.objects import (
    ObjectOrder,
    ObjectRows,
    SortKey,
    StoredObject,
    find_object,
    note_use,
)

_ID: Final = re.compile("[0-9a-f]{64}")
_MARK: Final = b'{"object":"'
"""In compact JSON, wherever an object is named."""
_PAGE: Final = 500
_MOST_NAMED: Final = 10
_decode = msgspec.json.Decoder().decode


def is_object_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def may_name_objects(text: bytes) -> bool:
    """Of the JSON of a task, with spaces or without."""
    return b'"object"' in text


def named_by(run: Entrypoint | Command | Function, arguments: bytes) -> tuple[str, ...]:
    """Ids of the objects that the arguments of a run name, or that a function says."""
    if isinstance(run, Function):
        return tuple(run.objects)
    return tuple(objects_in_arguments(arguments).values())


def objects_in_run(spec: RunSpec) -> Mapping[str, str]:
    """Id by the place of an argument that names it. `spec` has its arguments, however large."""
    if spec.kind == Function.tag:
        return {f"/run/objects/{at}": id for at, id in enumerate(spec.objects)}
    return objects_in_arguments(spec.arguments)


def objects_in_arguments(arguments: bytes) -> Mapping[str, str]:
    """The same of JSON that is stored."""
    if _MARK not in arguments:
        return {}
    given = _decode(arguments)
    positional = objects_among(enumerate(given["args"]), "/run/args")
    return {**positional, **objects_among(given["kwargs"].items(), "/run/kwargs")}


def objects_among(values: Iterable[tuple[Any, Any]], within: str) -> dict[str, str]:
    """The same of (place, value) pairs."""
    found = ((place, _named(value)) for place, value in values)
    return {f"{within}/{place}": id for place, id in found if id is not None}


def _named(value: Any) -> str | None:
    """As `gpubroker.runtime.objects` reads it."""
    if type(value) is not dict or len(value) != 1 or type(id := value.get("object")) is not str:
        return None
    return id if is_object_id(id) else None


async def check_objects(
    rows: ObjectRows, tenant: str, named: Mapping[str, str], now: Instant, object_seconds: Seconds
) -> None:
    """Raises Problem for objects that the tenant does not have. To name one is a use of it."""
    known = await _known(rows, tenant, set(named.values()), now)
    missing = [(place, id) for place, id in named.items() if id not in known]
    if missing:
        faults = (
            Fault(pointer=place, detail=unknown_object(id, object_seconds), code="unknown-object")
            for place, id in missing[:_MOST_NAMED]
        )
        raise invalid(*faults)
    for kept in known.values():
        await note_use(rows, kept, now, object_seconds)


async def _known(rows: ObjectRows, tenant: str, ids: set[str], now: Instant) -> Mapping[str, StoredObject]:
    """Of these. Many are looked for among all that the tenant has, of which there is a limit."""
    if len(ids) < _PAGE:
        found = [await find_object(rows, tenant, id, now) for id in sorted(ids)]
        return {kept.digest: kept for kept in found if kept is not None}
    known: dict[str, StoredObject] = {}
    after: SortKey = ()
    while page := await rows.stored_objects(tenant, now, ObjectOrder(), after=after, limit=_PAGE):
        known |= {kept.digest: kept for kept in page if kept.digest in ids}
        after = (page[-1].digest,)
    return known


def unknown_object(id: str, object_seconds: Seconds) -> str:
    return (
        f'you have no object "{id[:100]}"; objects are kept for {object_seconds:g} seconds after their last '
        "use: upload it with POST /objects"
    )
