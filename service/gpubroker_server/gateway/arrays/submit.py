"""What an array is asked to be: its body, and the workers and terms that are made of it."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any, NamedTuple, Protocol

from pydantic import BeforeValidator, Field, JsonValue, WithJsonSchema
from pydantic_core import from_json, to_json

from gpubroker_server.core.domain.orders import MOST_HELD, ItemRange
from gpubroker_server.core.domain.submission import (
    ARRAY_LABEL,
    ARRAY_VARIABLE,
    ArrayTerms,
    RunSpec,
    bytes_of,
)
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.core.domain.values import changed
from gpubroker_server.gateway.http.bodies import Body
from gpubroker_server.gateway.http.faults import invalid
from gpubroker_server.gateway.http.problems import Fault
from gpubroker_server.gateway.submission.named_objects import (
    may_name_objects,
    objects_among,
    objects_in_run,
)
from gpubroker_server.gateway.submission.submissions import Submissions, submission_of
from gpubroker_server.gateway.submission.task_body import Function, SubmitTask, decoded
from gpubroker_server.ports.store import Submission

MAX_WORKERS = 256
MAX_ITEMS = 10_000_000
MAX_CHUNK = MOST_HELD // 2
"""A worker gets its next chunk before it has finished the one before."""
WORKER_RETRIES = 10
"""So often in a row a worker is started again that ended before its first report."""
_LENGTH_BYTES = 8
"""As `gpubroker.runtime.items` reads them."""


class GivenObjects(Protocol):
    async def copied(self, tenant: str, object_id: str, at: str) -> bytes: ...


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

    A function gets the item as its first argument, before `args`. In a command each `{}` is replaced by the
    item, also inside a word; without any, the item is the last word.
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
        int, Field(ge=0, le=100, description="How often a failed item is tried again.")
    ] = 0


class NewArray(NamedTuple):
    terms: ArrayTerms
    workers: list[Submission]


class GivenItems(NamedTuple):
    packed: bytes
    pickled: bool
    total: int
    objects: Mapping[str, str]
    """Ids of the objects that items name, by place. Of pickled items the function's `objects` says it."""


async def items_of(body: SubmitArray, objects: GivenObjects, tenant: str) -> GivenItems:
    """Raises Problem for items that cannot be counted, and for none."""
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
    """Of a JSON array."""
    try:
        found = from_json(packed)
    except ValueError:
        return None
    return found if isinstance(found, list) else None


def check_worker(body: SubmitArray) -> None:
    """Raises Problem for what a worker of an array cannot have."""
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
    task: Task,
    spec: RunSpec,
    terms: ArrayTerms,
    arguments: bytes,
    most_workers: int,
) -> NewArray:
    """`task` and `spec` are those of a worker; `terms` have no workers yet: there will be no more than have
    something to do. All workers share one object of their arguments if these are large."""
    chunks = -(-terms.total // (terms.chunk or 1))
    ids = submissions.ids.tasks(submissions.clock.now(), min(most_workers, chunks))
    terms = replace(terms, id=ids[0], workers=tuple(ids))
    limits = {
        "id": terms.id,
        "item_retries": terms.item_retries,
        "item_timeout_seconds": terms.item_timeout_seconds,
        "pickled": terms.pickled,
    }
    spec = changed(
        spec,
        arguments=arguments,
        arguments_digest=None,
        env={**spec.env, ARRAY_VARIABLE: json.dumps(limits)},
        labels={**spec.labels, ARRAY_LABEL: terms.id},
    )
    worker = changed(task, id=ids[0], array=ids[0], shareable=False, max_retries=WORKER_RETRIES)
    first = await submissions.with_object(submission_of(worker, spec))
    own_bytes = bytes_of(first.spec)
    others = (changed(first.task, id=id, queued_bytes=own_bytes) for id in ids[1:])
    return NewArray(terms, [first, *(Submission(other, first.spec, like=first) for other in others)])


def joined(arguments: bytes, items: bytes) -> bytes:
    return len(arguments).to_bytes(_LENGTH_BYTES, "big") + arguments + items


async def objects_left(spec: RunSpec, terms: ArrayTerms, numbers: Sequence[ItemRange]) -> Mapping[str, str]:
    """Ids of the objects that the common arguments and these items name, by place. A function with pickled
    items says what all of them name together, also those that need not be done again."""
    if terms.pickled:
        return {}
    begin = _LENGTH_BYTES + int.from_bytes(spec.arguments[:_LENGTH_BYTES], "big")
    common, packed = spec.arguments[_LENGTH_BYTES:begin], spec.arguments[begin:]
    in_common = objects_in_run(changed(spec, arguments=common))
    if not may_name_objects(packed):
        return in_common
    items = await asyncio.to_thread(from_json, packed)
    left = ((at, items[at]) for first, behind in numbers for at in range(first, min(behind, len(items))))
    return {**in_common, **objects_among(left, "/items")}


def terms_of(tenant: str, body: SubmitArray, given: GivenItems, now: float) -> ArrayTerms:
    """Without the ids of its workers."""
    return ArrayTerms(
        id=TaskId(""),
        tenant=tenant,
        name=body.name,
        workers=(),
        numbers=((0, given.total),),
        chunk=body.chunk,
        item_retries=body.item_retries,
        item_timeout_seconds=body.item_timeout_seconds,
        result_format=body.result_format,
        pickled=given.pickled,
        submitted_at=now,
        objects=tuple(sorted(set(given.objects.values()))),
    )


def terms_text(terms: ArrayTerms) -> str:
    return json.dumps(asdict(terms))
