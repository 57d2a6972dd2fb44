"""Finds the objects that a run names: as `{"object": id}` in the JSON of arguments, or in the list that a
pickled function brings."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from gpubroker_server.core.domain.stored_objects import StoredObject
from gpubroker_server.core.domain.submission import RunSpec
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.gateway.submission.task_body import Function
from gpubroker_server.ports.objects import ObjectOrder, ObjectRows, SortKey

_ID: Final = re.compile("[0-9a-f]{64}")
_MARK: Final = b'{"object":"'
"""The text that compact JSON contains wherever it names an object."""
_PAGE: Final = 500
_decode = msgspec.json.Decoder().decode


def is_object_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def may_name_objects(text: bytes) -> bool:
    """Return True if the JSON of a task may name an object. The JSON may be compact or contain spaces."""
    return b'"object"' in text


def objects_in_run(spec: RunSpec) -> Mapping[str, str]:
    """Return the objects that a run names: place of the argument or of the upload -> id of the object. `spec`
    must contain its arguments, however large they are."""
    named = {"/upload": spec.upload} if spec.upload else {}
    if spec.environment is not None and spec.environment.project:
        named["/environment/project"] = spec.environment.project
    if spec.kind == Function.tag:
        others = (id for id in spec.objects if id not in named.values())
        return {f"/run/objects/{index}": id for index, id in enumerate(others)} | named
    return {**objects_in_arguments(spec.arguments), **named}


def objects_in_arguments(arguments: bytes) -> Mapping[str, str]:
    """Return the objects that the stored JSON of arguments names: place of the argument -> id of the
    object."""
    if _MARK not in arguments:
        return {}
    decoded = _decode(arguments)
    positional = objects_among(enumerate(decoded["args"]), "/run/args")
    return {**positional, **objects_among(decoded["kwargs"].items(), "/run/kwargs")}


def objects_among(values: Iterable[tuple[Any, Any]], within: str) -> dict[str, str]:
    """Return the objects that some of the values name: place below `within` -> id of the object. `values` are
    pairs of a place and a value."""
    named = ((place, _named(value)) for place, value in values)
    return {f"{within}/{place}": id for place, id in named if id is not None}


def _named(value: Any) -> str | None:
    """Return the id of the object that a value names, by the rules of `gpubroker.runtime.objects`; None if it
    names no object."""
    if type(value) is not dict or len(value) != 1 or type(id := value.get("object")) is not str:
        return None
    return id if is_object_id(id) else None


async def find_objects(
    rows: ObjectRows, tenant: str, ids: set[str], now: Instant
) -> Mapping[str, StoredObject]:
    """Return the objects with these ids that the tenant has, by id. If there are many ids, all objects of the
    tenant are read page by page instead; their number is limited."""
    if len(ids) < _PAGE:
        rows_or_none = [await rows.find_object(tenant, id, now) for id in sorted(ids)]
        return {row.digest: row for row in rows_or_none if row is not None}
    row_by_id: dict[str, StoredObject] = {}
    after: SortKey = ()
    while page := await rows.stored_objects(tenant, now, ObjectOrder(), after=after, limit=_PAGE):
        row_by_id |= {row.digest: row for row in page if row.digest in ids}
        after = (page[-1].digest,)
    return row_by_id
