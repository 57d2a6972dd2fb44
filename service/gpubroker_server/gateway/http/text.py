"""Text as clients may send it: names, labels, and lines of any other kind."""

from typing import Annotated

from pydantic import Field, StringConstraints

from gpubroker_server.gateway.http.bodies import LabelKey

LINE = r"^[^\x00-\x1f\x7f]*$"


def line(most: int, least: int = 0) -> StringConstraints:
    """One line of text: no control characters, which neither databases nor terminals take well."""
    return StringConstraints(min_length=least, max_length=most, pattern=LINE)


Text = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$")]
Name = Annotated[str, line(200)]
LabelValue = Annotated[str, line(255)]
Labels = Annotated[dict[LabelKey, LabelValue], Field(max_length=32)]
KindName = Annotated[str, StringConstraints(max_length=100, pattern=r"[A-Za-z0-9]")]
NodeLabels = Annotated[
    dict[LabelKey, Annotated[list[LabelValue], Field(min_length=1, max_length=100)]], Field(max_length=32)
]
