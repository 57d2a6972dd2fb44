"""The submit of an array: its body, its checks, and the workers and terms to store."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple, Protocol

from gpubroker.wire.bounds import MAX_ITEMS
from msgspec import to_builtins
from msgspec.structs import replace
from pydantic import BeforeValidator, Field, JsonValue, WithJsonSchema
from pydantic_core import from_json, to_json

from gpubroker_server.core.admission.admit import like
from gpubroker_server.core.admission.submission import Submission
from gpubroker_server.core.domain.orders import MAX_HELD, ItemRange
from gpubroker_server.core.domain.submission import (
    ARRAY_LABEL,
    ArrayTerms,
    ItemTerms,
    RunSpec,
)
from gpubroker_server.core.domain.task import RetryOn
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.gateway.submission.named_objects import (
    may_name_objects,
    objects_among,
    objects_in_run,
)
from gpubroker_server.gateway.submission.submissions import Submissions
from gpubroker_server.gateway.submission.task_body import Function, SubmitTask, causes_of, decoded
from gpubroker_server.http.bodies import Body
from gpubroker_server.http.faults import invalid
from gpubroker_server.http.identity import Identity
from gpubroker_server.http.problems import Fault
from gpubroker_server.ports.store import BatchSubmission

MAX_WORKERS = 256
MAX_CHUNK = MAX_HELD // 2
"""The largest number of items in a chunk. It is half of what a worker may hold, because a worker gets its
next chunk before it has finished the last."""
_LENGTH_BYTES = 8
"""The number of bytes of the length before joined arguments, which `gpubroker.runtime.items` reads."""


class GivenObjects(Protocol):
    """Access to the stored objects that a body names."""

    async def copied(self, tenant: str, object_id: str, pointer: str) -> bytes: ...


Count = Annotated[int, Field(ge=1, le=MAX_ITEMS, description="How many items a pickled list has.")]


class ObjectItems(Body):
    """Items in an uploaded object: a JSON array, or the cloudpickle of a list with `count` items."""

    object: Annotated[str, Field(max_length=64, description="Id of the object (`POST /objects`).")]
    count: Count | None = None


class PickledItems(Body):
    """Items as the cloudpickle of a list, in base64. The service never unpickles them."""

    pickled: Annotated[
        bytes,
        BeforeValidator(decoded),
        Field(min_length=1),
        WithJsonSchema({"type": "string", "contentEncoding": "base64", "minLength": 4}),
    ]
    count: Count


class SubmitArray(SubmitTask):
    """One function or command for many items, and what each of its workers needs.

    A function gets the item as its first argument, before `args`. In a command the item replaces each `{}`,
    also inside a word. If a command has no `{}`, the item becomes its last word.
    """

    items: Annotated[
        list[JsonValue] | ObjectItems | PickledItems, Field(description="The items, or where they are.")
    ]
    max_parallel: Annotated[
        int, Field(ge=1, le=MAX_WORKERS, description="How many workers run at once, if there is room.")
    ] = 4
    chunk: Annotated[
        int | None,
        Field(
            ge=1, le=MAX_CHUNK, description="How many items are handed out together; null: 100 ms of work."
        ),
    ] = None
    item_timeout_seconds: Annotated[float | None, Field(gt=0, le=30 * 86_400)] = None
    item_retries: Annotated[
        int, Field(ge=0, le=100, description="How often an item is tried again, as `retry_on` says.")
    ] = 0


class GivenItems(NamedTuple):
    packed: bytes
    pickled: bool
    total: int
    objects: Mapping[str, str]
    """Place -> id of an object that an item names. Empty for pickled items, whose objects the function's
    `objects` lists."""


async def items_of(body: SubmitArray, objects: GivenObjects, tenant: str) -> GivenItems:
    """Return the items of a body. Raises Problem if there are none or too many, or if they are neither a JSON
    array nor a pickled list with its count."""
    is_pickled = isinstance(body.items, PickledItems) or (
        isinstance(body.items, ObjectItems) and body.items.count is not None
    )
    if is_pickled and not isinstance(body.run, Function):
        detail = "only a pickled function takes pickled items: to open them runs code; give a JSON array"
        raise invalid(Fault(pointer="/items", detail=detail, code="pickled-items"))
    match body.items:
        case PickledItems():
            return GivenItems(body.items.pickled, True, body.items.count, {})
        case ObjectItems():
            packed = await objects.copied(tenant, body.items.object, "/items/object")
            listed = await asyncio.to_thread(_list_in, packed)
            if listed is None and body.items.count is not None:
                return GivenItems(packed, True, body.items.count, {})
            if listed is None:
                detail = "the object is neither a JSON array nor a pickled list with its count"
                raise invalid(Fault(pointer="/items/object", detail=detail, code="not-a-list"))
        case _:
            packed, listed = to_json(body.items), body.items
    if not listed:
        raise invalid(Fault(pointer="/items", detail="an array needs one item or more", code="no-items"))
    if len(listed) > MAX_ITEMS:
        detail = f"an array has at most {MAX_ITEMS} items; there are {len(listed)}; make several arrays"
        raise invalid(Fault(pointer="/items", detail=detail, code="too-many-items"))
    named = await asyncio.to_thread(objects_among, enumerate(listed), "/items")
    return GivenItems(packed, False, len(listed), named)


def _list_in(packed: bytes) -> list[Any] | None:
    """Return the items of a JSON array; None for any other text."""
    try:
        value = from_json(packed)
    except ValueError:
        return None
    return value if isinstance(value, list) else None


def check_worker(body: SubmitArray) -> None:
    """Check that the body has no fields that a worker of an array cannot have. Raises Problem
    validation-failed."""
    faults = []
    if body.resources.bundles:
        detail = "a worker of an array has one process; leave bundles out, and set max_parallel"
        faults.append(Fault(pointer="/resources/bundles", detail=detail, code="no-gang"))
    if body.max_retries is not None:
        detail = "an array retries items, not its workers; set item_retries"
        faults.append(Fault(pointer="/max_retries", detail=detail, code="item-retries"))
    if ARRAY_LABEL in body.labels:
        detail = "the service sets the label array; choose another name"
        faults.append(Fault(pointer=f"/labels/{ARRAY_LABEL}", detail=detail, code="reserved"))
    if faults:
        raise invalid(*faults)


async def new_array(
    submissions: Submissions,
    identity: Identity,
    worker: Submission,
    terms: ArrayTerms,
    named: Mapping[str, str],
    most_workers: int,
) -> BatchSubmission:
    """Return the admitted workers of a new array, with its terms.

    `worker` is the submission of each worker, with the joined arguments. `terms` has no workers yet. `named`
    maps a place to the id of an object that the workers open. There are at most `most_workers` workers, and
    no more than there are chunks. All workers share one object of their arguments if these are large. Raises
    Problem if a worker is refused.
    """
    submissions.leader.require("array")
    chunks = -(-terms.total // (terms.chunk or 1))
    ids = submissions.ids.tasks(submissions.clock.now(), min(most_workers, chunks))
    terms = replace(terms, id=ids[0], workers=tuple(ids))
    spec = replace(
        worker.spec,
        items=ItemTerms(
            terms.id, terms.item_retries, terms.item_timeout_seconds, terms.pickled, terms.retry_on
        ),
        labels={**worker.spec.labels, ARRAY_LABEL: terms.id},
    )
    new = await submissions.admitted(identity, replace(worker, spec=spec), named=named, id=ids[0])
    first = await submissions.with_object(new)
    workers = [first, *(like(first, id, first.spec) for id in ids[1:])]
    return BatchSubmission(workers, answer=json.dumps(to_builtins(terms)))


def joined(arguments: bytes, items: bytes) -> bytes:
    """Return the common arguments and the items in one value, which begins with the length of the
    arguments."""
    return len(arguments).to_bytes(_LENGTH_BYTES, "big") + arguments + items


async def objects_left(spec: RunSpec, terms: ArrayTerms, numbers: Sequence[ItemRange]) -> Mapping[str, str]:
    """Return the ids of the objects that the common arguments and the items in `numbers` name, by place.

    The result is empty for pickled items: the function lists the objects of all its items together, including
    those that need not be done again.
    """
    if terms.pickled:
        return {}
    begin = _LENGTH_BYTES + int.from_bytes(spec.arguments[:_LENGTH_BYTES], "big")
    common, packed = spec.arguments[_LENGTH_BYTES:begin], spec.arguments[begin:]
    in_common = objects_in_run(replace(spec, arguments=common))
    if not may_name_objects(packed):
        return in_common
    items = await asyncio.to_thread(from_json, packed)
    left = (
        (number, items[number]) for first, end in numbers for number in range(first, min(end, len(items)))
    )
    return {**in_common, **objects_among(left, "/items")}


def terms_of(tenant: str, body: SubmitArray, given: GivenItems, now: float) -> ArrayTerms:
    """Return the terms of a new array, without the ids of its workers."""
    return ArrayTerms(
        id=TaskId(""),
        tenant=tenant,
        name=body.name,
        workers=(),
        numbers=((0, given.total),),
        chunk=body.chunk,
        item_retries=body.item_retries,
        retry_on=causes_of(body.retry_on, tuple(RetryOn)),
        item_timeout_seconds=body.item_timeout_seconds,
        result_format=body.result_format,
        pickled=given.pickled,
        submitted_at=now,
        objects=tuple(sorted(set(given.objects.values()))),
    )
