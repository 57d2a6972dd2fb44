"""The bounds of what a task, a default and a rule of the operator may say."""

from typing import Annotated

from msgspec import Meta

MOST_PRIORITY = 100
MOST_RETRIES = 100
MOST_ITEMS = 10_000_000
"""The most items of one array."""
MOST_GRACE_SECONDS = 3600.0

Priority = Annotated[int, Meta(ge=0, le=MOST_PRIORITY)]
"""A priority as a number; settings may also name a band instead."""

Retries = Annotated[int, Meta(ge=0, le=MOST_RETRIES)]
GraceSeconds = Annotated[float, Meta(ge=0, le=MOST_GRACE_SECONDS)]
Count = Annotated[int, Meta(ge=0)]
PositiveCount = Annotated[int, Meta(gt=0)]
Amount = Annotated[float, Meta(ge=0)]
