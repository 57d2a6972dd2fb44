"""Bodies, queries and pages: strict models, fields that several share, and the limits of requests."""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.gateway.http.ids import is_task_id
from gpubroker_server.gateway.http.problems import Problem
from gpubroker_server.ports.objects import SortKey

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RequestLimits:
    body_bytes: int = 8 * 1024 * 1024
    batch_body_bytes: int = 16 * 1024 * 1024
    object_bytes: int = 1024**3
    """The largest object that may be uploaded."""
    copied_object_bytes: int = 16 * 1024 * 1024
    """The most that the objects have of which one request takes a copy."""
    tenant_object_bytes: int = 4 * 1024**3
    tenant_objects: int = 10_000
    """Both limits are for all objects of a tenant."""
    tenant_pending_tasks: int = 500_000
    """The most tasks of a tenant that wait."""
    tenant_pending_bytes: int = 4 * 1024**3
    """The most that they keep for their runs."""
    tenant_waits: int = 1_000
    """The most requests of a tenant that wait for a task in one gateway."""
    object_seconds: Seconds = Seconds(86400.0)
    """An object is kept this long after its last use."""
    inline_bytes: int = 64 * 1024
    """Arguments up to this size stay in the task's row; larger ones become objects."""
    stale_seconds: Seconds = Seconds(30.0)
    """Overviews older than this are refused."""
    wait_seconds: Seconds = Seconds(60.0)
    """No answer is held back longer than this."""
    settle_seconds: Seconds = Seconds(1.0)
    """How long the answer to a cancel or a change waits for the leader to carry it out."""
    page_items: int = 500
    """The most items on a page."""


LINE = r"^[^\x00-\x1f\x7f]*$"
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
ENTRYPOINT = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"
LABEL_KEY = "[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?"
PATTERNS_IN_WORDS = {
    LINE: "must be one line without control characters",
    ENTRYPOINT: "must be module:function",
    NAME: "must be letters, digits, dots, dashes and underscores, at most 63",
}
"""How a refusal describes a pattern."""


def is_name(text: str) -> bool:
    return re.fullmatch(NAME, text) is not None


def line(max_length: int, min_length: int = 0) -> StringConstraints:
    """One line of text without control characters, which neither databases nor terminals take well."""
    return StringConstraints(min_length=min_length, max_length=max_length, pattern=LINE)


Text = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$")]
Name = Annotated[str, line(200)]
Because = Annotated[
    str, line(500), Field(description="Why, in your own words.", examples=["planned maintenance"])
]
LabelKey = Annotated[str, StringConstraints(pattern=f"^{LABEL_KEY}$")]
LabelValue = Annotated[str, line(255)]
Labels = Annotated[dict[LabelKey, LabelValue], Field(max_length=32)]
KindName = Annotated[str, StringConstraints(max_length=100, pattern=r"[A-Za-z0-9]")]
NodeLabels = Annotated[
    dict[LabelKey, Annotated[list[LabelValue], Field(min_length=1, max_length=100)]], Field(max_length=32)
]


class Body(BaseModel):
    """Strict: an unknown field or a wrong type is refused.

    Give defaults that are immutable or made by a factory: pydantic would copy a `{}` for each request.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class ListBody(Body):
    """A body with one long list. The items stay JSON text, and the route validates them one by one."""

    list_name: ClassVar[str]
    """The field that holds the list."""


class BinaryBody(Body):
    """A body of JSON that binary data may follow; a header then gives the length of the JSON."""


class Query(BaseModel):
    """Query parameters. Unknown names are refused, except those that match `open_names`."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, frozen=True)
    open_names: ClassVar[re.Pattern[str] | None] = None


class WaitQuery(Query):
    timeout_seconds: Annotated[
        float, Field(ge=0, description="The answer comes after 60 seconds at most, whatever is asked.")
    ] = 30.0


class PageQuery(Query):
    limit: Annotated[int, Field(ge=1, description="At most the server's maximum.")] = 100
    cursor: Annotated[str | None, Field(max_length=200, description="`next_cursor` of a page.")] = None


def direction_of(sort: str) -> tuple[str, bool]:
    """A word of `sort`, and whether the largest come first: `-priority`."""
    return sort.removeprefix("-"), sort.startswith("-")


def in_order(items: Iterable[T], sort: str, values: Mapping[str, Callable[[T], Any]]) -> list[T]:
    """A list without pages, by one of these values. Equal ones stay as they are; those without a value come
    last."""
    word, descending = direction_of(sort)
    value, listed = values[word], list(items)
    known = [item for item in listed if value(item) is not None]
    return sorted(known, key=value, reverse=descending) + [item for item in listed if value(item) is None]


def filter_hash(filters: Mapping[str, Any]) -> str:
    """A few characters that differ for different filters."""
    text = json.dumps(filters, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def write_cursor(last_id: str, filtered_by: str) -> str:
    return base64.urlsafe_b64encode(f"{filtered_by}{last_id}".encode()).decode().rstrip("=")


_NUMBER_BEFORE = re.compile(r"^-?[0-9]{1,15}(?:\.[0-9]{1,20})?:")


def write_place(key: SortKey, filtered_by: str) -> str:
    """The cursor of the page after this place in a sorted list."""
    return write_cursor(":".join(map(str, key)), filtered_by)


def read_place(
    cursor: str, filtered_by: str, length: int, is_id: Callable[[str], bool] = is_task_id
) -> SortKey:
    """The place after which the next page begins: numbers and an id, so many in all. Raises Problem."""
    text = read_cursor(cursor, filtered_by, lambda text: is_id(_NUMBER_BEFORE.sub("", text, 1)))
    *values, id = text.split(":")
    if len(values) + 1 != length:
        raise Problem("cursor-invalid", "the cursor belongs to another order; start without a cursor")
    return (*map(float, values), id)


def page_in_order(
    items: Iterable[T],
    query: PageQuery,
    sort: str,
    fields: Mapping[str, Sequence[str]],
    tenant: str,
    most_items: int,
) -> tuple[list[T], str | None]:
    """A page of a list in memory, and the cursor of the next one.

    `fields`: what a word of `sort` sorts by; the last one is an id. `tenant`: of the token. Raises Problem
    cursor-invalid.
    """
    word, descending = direction_of(sort)
    names = fields[word]

    def place(item: T) -> SortKey:
        return tuple(getattr(item, name) for name in names)

    filtered_by, limit = filter_hash({"list of": tenant, "sort": sort}), min(query.limit, most_items)
    left = sorted(items, key=place, reverse=descending)
    if query.cursor is not None:
        after = read_place(query.cursor, filtered_by, len(names))
        left = [item for item in left if (place(item) < after if descending else place(item) > after)]
    page = left[:limit]
    return page, write_place(place(page[-1]), filtered_by) if len(left) > limit else None


def read_cursor(cursor: str, filtered_by: str, is_id: Callable[[str], bool] = is_task_id) -> str:
    """The id after which the next page begins. Raises Problem."""
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode("ascii")
    except ValueError:
        text = ""
    made_for, last_id = text[: len(filtered_by)], text[len(filtered_by) :]
    if not is_id(last_id):
        raise Problem("cursor-invalid", "the cursor is not one of this service; start without a cursor")
    if made_for != filtered_by:
        raise Problem(
            "cursor-invalid",
            "the cursor belongs to a list with other filters; send the same ones, or start without a cursor",
        )
    return last_id
