"""Base models of bodies and queries, types of fields that several models share, and pages of lists."""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from fastapi import Body as JsonParameter
from jiter import from_json
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from gpubroker_server.http.ids import is_task_id
from gpubroker_server.http.problems import Problem
from gpubroker_server.ports.objects import SortKey

T = TypeVar("T")


LINE = r"^[^\x00-\x1f\x7f]*$"
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
ENTRYPOINT = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"
EVENT_KIND = r"^[a-z_]+\.([A-Za-z_]+|\*)$"
LABEL_KEY = "[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?"
PATTERNS_IN_WORDS = {
    LINE: "must be one line without control characters",
    ENTRYPOINT: "must be module:function",
    NAME: "must be letters, digits, dots, dashes and underscores, at most 63",
    EVENT_KIND: "must be a kind of event, such as task.failed, or all of a subject, such as task.*",
}
"""Pattern -> the text that describes it in a refusal."""


def is_name(text: str) -> bool:
    return re.fullmatch(NAME, text) is not None


def line(max_length: int, min_length: int = 0) -> StringConstraints:
    """Return the constraints of one line of text. Control characters are refused, because databases and
    terminals mishandle them."""
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
    """The base of bodies. It is strict: an unknown field or a wrong type is refused.

    Give defaults that are immutable or made by a factory: pydantic would copy a `{}` for each request.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class JsonText:
    """Validates bytes in pydantic's JSON mode, in which strict models take enums and times as text."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        model = handler(source)
        text = core_schema.no_info_before_validator_function(
            _without_duplicate_keys, core_schema.json_schema(model)
        )
        return core_schema.json_or_python_schema(json_schema=model, python_schema=text)


def _without_duplicate_keys(text: bytes) -> bytes:
    """Return the text. Raises PydanticCustomError if an object in the text has a key twice."""
    fault = key_given_twice(text)
    if fault:
        raise PydanticCustomError("duplicate_key", "{twice}", {"twice": fault})
    return text


def key_given_twice(text: bytes) -> str:
    """Return a message that names a key which an object in the text has twice, or an empty text. Such a key
    is refused because parsers differ in which of its values they take. The text is empty also for bytes that
    are not JSON, which validation refuses."""
    try:
        from_json(text, catch_duplicate_keys=True)
    except ValueError as fault:
        try:
            from_json(text)
        except ValueError:
            return ""
        return f"{str(fault)[:1].lower()}{str(fault)[1:200]}; send each key of an object once"
    return ""


JsonBody = Annotated[T, JsonText(), JsonParameter()]
"""The type of an endpoint's parameter that is a body of JSON, as in `body: JsonBody[AskLease]`."""


class ListBody(Body):
    """A body with one long list. The items stay JSON text, and the route validates them one by one."""

    list_name: ClassVar[str]
    """The field that holds the list."""


class BinaryBody(Body):
    """A body of JSON that binary data may follow. If it does, a header gives the length of the JSON."""


class Query(BaseModel):
    """The base of query parameters. Unknown names are refused, except those that match `open_names`."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)
    open_names: ClassVar[re.Pattern[str] | None] = None

    @model_validator(mode="before")
    @classmethod
    def _as_given(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Split the values of lists at commas. In a model with `open_names`, refuse unknown names."""
        if cls.open_names is not None:
            _refuse_unknown(cls, values)
        return {
            name: [part for text in value for part in text.split(",") if part]
            if isinstance(value, list) and name in cls.model_fields
            else value
            for name, value in values.items()
        }


def _refuse_unknown(model: type[Query], values: Mapping[str, Any]) -> None:
    """Check the names in the query. Raises ValidationError, as pydantic does for a model without open
    names."""
    assert model.open_names is not None
    unknown = [
        InitErrorDetails(type="extra_forbidden", loc=(name,), input=value)
        for name, value in values.items()
        if name not in model.model_fields and not model.open_names.fullmatch(name)
    ]
    if unknown:
        raise ValidationError.from_exception_data(model.__name__, unknown)


class WaitQuery(Query):
    timeout_seconds: Annotated[
        float, Field(ge=0, description="The answer comes after 60 seconds at most, whatever is asked.")
    ] = 30.0


class PageQuery(Query):
    limit: Annotated[int, Field(ge=1, description="At most the server's maximum.")] = 100
    cursor: Annotated[str | None, Field(max_length=200, description="`next_cursor` of a page.")] = None


class LabelQuery(Query):
    """A query that selects by labels, as in `label.team=vision`."""

    model_config = ConfigDict(extra="allow")  # labels
    open_names: ClassVar = re.compile(rf"label\.{LABEL_KEY}")
    __pydantic_extra__: dict[str, LabelValue]

    @property
    def labels(self) -> dict[str, str]:
        extra: dict[str, str] = self.model_extra or {}
        return {name.removeprefix("label."): value for name, value in extra.items()}


LABELS_PARAMETER: Mapping[str, Any] = {
    "name": "label",
    "in": "query",
    "style": "form",
    "explode": True,
    "description": "`label.team=vision`: only tasks with this label; all given must match.",
    "schema": {"type": "object", "patternProperties": {r"^label\.": {"type": "string"}}},
}
"""The labels of a `LabelQuery` in the OpenAPI document."""


def direction_of(sort: str) -> tuple[str, bool]:
    """Return the word of `sort` without its sign, and True if the largest values come first, as in
    `-priority`."""
    return sort.removeprefix("-"), sort.startswith("-")


def in_order(items: Iterable[T], sort: str, values: Mapping[str, Callable[[T], Any]]) -> list[T]:
    """Return the items sorted by one of the values. Items of equal value keep their order, and items without
    a value come last. `values` maps a word of `sort` to the function that gives the value of an item."""
    word, descending = direction_of(sort)
    value, listed = values[word], list(items)
    with_value = [item for item in listed if value(item) is not None]
    return sorted(with_value, key=value, reverse=descending) + [
        item for item in listed if value(item) is None
    ]


_NUMBER_BEFORE = re.compile(r"^-?[0-9]{1,15}(?:\.[0-9]{1,20})?:")


class Paging(NamedTuple):
    """The part of a sorted list that a query asks for. A place in the list consists of numbers and an id."""

    limit: int
    after: SortKey
    """The place of the last item of the previous page; empty for the first page."""
    filtered_by: str
    """A few characters of a hash of the filters and the order, which tell a cursor of another list."""

    def cut(self, found: Sequence[T], place: Callable[[T], SortKey]) -> tuple[Sequence[T], str | None]:
        """Return the page at the beginning of `found`, and the cursor of the next page, which is None if
        there is no more."""
        page = found[: self.limit]
        if len(found) <= self.limit:
            return page, None
        text = self.filtered_by + ":".join(map(str, place(page[-1])))
        return page, base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def paging_of(
    query: PageQuery,
    most_items: int,
    filters: Mapping[str, Any],
    length: int,
    is_id: Callable[[str], bool] = is_task_id,
) -> Paging:
    """Return the part of a list that a query asks for.

    `filters` are the values that tell this list from others. `length` is the number of values in a place.
    Raises Problem cursor-invalid for the cursor of another list or order.
    """
    text = json.dumps(filters, sort_keys=True)
    filtered_by = hashlib.sha256(text.encode()).hexdigest()[:12]
    after = () if query.cursor is None else _read_cursor(query.cursor, filtered_by, length, is_id)
    return Paging(min(query.limit, most_items), after, filtered_by)


def _read_cursor(cursor: str, filtered_by: str, length: int, is_id: Callable[[str], bool]) -> SortKey:
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode("ascii")
    except ValueError:
        text = ""
    made_for, place = text[: len(filtered_by)], text[len(filtered_by) :]
    if not is_id(_NUMBER_BEFORE.sub("", place, 1)):
        raise Problem("cursor-invalid", "the cursor is not one of this service; start without a cursor")
    if made_for != filtered_by:
        raise Problem(
            "cursor-invalid",
            "the cursor belongs to a list with other filters; send the same ones, or start without a cursor",
        )
    *values, id = place.split(":")
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
) -> tuple[Sequence[T], str | None]:
    """Return a page of a list in memory, and the cursor of the next page, which is None if there is no more.

    `fields` maps a word of `sort` to the attributes by which it sorts, the last of which is an id. `tenant`
    is the tenant of the token. Raises Problem cursor-invalid.
    """
    word, descending = direction_of(sort)
    names = fields[word]

    def place(item: T) -> SortKey:
        return tuple(getattr(item, name) for name in names)

    paging = paging_of(query, most_items, {"list of": tenant, "sort": sort}, len(names))
    remaining, after = sorted(items, key=place, reverse=descending), paging.after
    if after:
        remaining = [
            item for item in remaining if (place(item) < after if descending else place(item) > after)
        ]
    return paging.cut(remaining, place)
