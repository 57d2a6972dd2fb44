"""The bounds of the values that tasks, defaults and the operator's rules may have."""

from typing import Annotated

from msgspec import Meta

MAX_PRIORITY = 100
MAX_RETRIES = 100
MAX_ITEMS = 10_000_000
"""The largest number of items of one array."""
MAX_GRACE_SECONDS = 3600.0

Priority = Annotated[int, Meta(ge=0, le=MAX_PRIORITY)]
"""A priority as a number. In settings, a band's name may stand in its place."""

Retries = Annotated[int, Meta(ge=0, le=MAX_RETRIES)]
GraceSeconds = Annotated[float, Meta(ge=0, le=MAX_GRACE_SECONDS)]
Count = Annotated[int, Meta(ge=0)]
PositiveCount = Annotated[int, Meta(gt=0)]
Amount = Annotated[float, Meta(ge=0)]
