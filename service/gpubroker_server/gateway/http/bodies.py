"""What bodies and query strings have in common: strict models, and the text fields that several share."""

import re
from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

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


def line(max_length: int, min_length: int = 0) -> StringConstraints:
    """One line of text without control characters, which neither databases nor terminals take well."""
    return StringConstraints(min_length=min_length, max_length=max_length, pattern=LINE)


Text = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$")]
Name = Annotated[str, line(200)]
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
    """A body whose JSON may be followed by binary data; a header then gives the length of the JSON."""


class Query(BaseModel):
    """Query parameters. Unknown names are refused, except those that match `open_names`."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, frozen=True)
    open_names: ClassVar[re.Pattern[str] | None] = None


class WaitQuery(Query):
    timeout_seconds: Annotated[
        float, Field(ge=0, description="The answer comes after 60 seconds at most, whatever is asked.")
    ] = 30.0
