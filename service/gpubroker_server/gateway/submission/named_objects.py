"""The objects that arguments name: `{"object": id}` in JSON, and what a function says about its own."""

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
"""Text that stands in compact JSON wherever an object is named."""
_PAGE: Final = 500
_decode = msgspec.json.Decoder().decode


def is_object_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def may_name_objects(text: bytes) -> bool:
    """Return True if the JSON of a task, with spaces or without, may name an object."""
    return b'"object"' in text


def objects_in_run(spec: RunSpec) -> Mapping[str, str]:
    """Return the objects that a run names: place of the argument or of the upload -> id of the object.
    `spec` has its arguments, however large they are."""
    if spec.kind == Function.tag:
        found = {f"/run/objects/{index}": id for index, id in enumerate(spec.objects) if id != spec.upload}
    else:
        found = dict(objects_in_arguments(spec.arguments))
    return found | {"/upload": spec.upload} if spec.upload else found


def objects_in_arguments(arguments: bytes) -> Mapping[str, str]:
    """Return the objects that the stored JSON of arguments names: place of the argument -> id of the
    object."""
    if _MARK not in arguments:
        return {}
    given = _decode(arguments)
    positional = objects_among(enumerate(given["args"]), "/run/args")
    return {**positional, **objects_among(given["kwargs"].items(), "/run/kwargs")}


def objects_among(values: Iterable[tuple[Any, Any]], within: str) -> dict[str, str]:
    """Return the objects that some of the values name: place, below `within`, -> id of the object. `values`:
    (place, value) pairs."""
    found = ((place, _named(value)) for place, value in values)
    return {f"{within}/{place}": id for place, id in found if id is not None}


def _named(value: Any) -> str | None:
    """Return the object that a value names, by the rules of `gpubroker.runtime.objects`."""
    if type(value) is not dict or len(value) != 1 or type(id := value.get("object")) is not str:
        return None
    return id if is_object_id(id) else None


async def find_objects(
    rows: ObjectRows, tenant: str, ids: set[str], now: Instant
) -> Mapping[str, StoredObject]:
    """Return those of these objects that the tenant has. Many are looked for among all that it has, of which
    there is a limit."""
    if len(ids) < _PAGE:
        found = [await rows.find_object(tenant, id, now) for id in sorted(ids)]
        return {kept.digest: kept for kept in found if kept is not None}
    known: dict[str, StoredObject] = {}
    after: SortKey = ()
    while page := await rows.stored_objects(tenant, now, ObjectOrder(), after=after, limit=_PAGE):
        known |= {kept.digest: kept for kept in page if kept.digest in ids}
        after = (page[-1].digest,)
    return known
