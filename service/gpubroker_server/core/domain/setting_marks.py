"""Marks on the fields of values that the operator sets: bounds, and how a field is written in the settings.

The core does not read these marks. `settings/struct_models.py` reads them when settings are checked.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from msgspec import Meta

from gpubroker_server.core.domain.units import Mib, Seconds

ELSEWHERE = Meta(extra={"elsewhere": True})
"""Marks a field that is no setting of its section: another section sets it, or the operator cannot choose
it."""

WORDS = Meta(extra={"words": True})
"""Marks a list that may also be written as one text, in words separated by commas, because environment
variables have only texts."""

HOME = Meta(extra={"home": True})
"""Marks a path that may begin with `~`."""

Share = Annotated[float, Meta(ge=0, le=1, extra={"percent": True})]
"""A share that is written in percent, with `_percent` at the end of the field's name."""

PositiveAmount = Annotated[float, Meta(gt=0)]
NonNegativeMib = Annotated[Mib, Meta(ge=0)]
PositiveMib = Annotated[Mib, Meta(gt=0)]
NonNegativeSeconds = Annotated[Seconds, Meta(ge=0)]
PositiveSeconds = Annotated[Seconds, Meta(gt=0)]


def by_name(alone: str = "") -> Meta:
    """Mark a tuple of values with a `name`, which are written as a mapping from the name to the other fields.
    A value that is no mapping is the value of the field `alone`."""
    return Meta(extra={"by_name": True, "alone": alone})


def alone(key: str) -> Meta:
    """Mark a mapping for which a single value may be written. That is then the value of this key."""
    return Meta(extra={"alone": key})


def written(name: str, choices: Mapping[str, Any]) -> Meta:
    """Mark a field that has another name in the settings, and whose values are words there."""
    return Meta(extra={"name": name, "choices": choices})


def text(read: Callable[[str], Any]) -> Meta:
    """Mark a field that is written as one text: `read` returns its value, or raises ValueError."""
    return Meta(extra={"text": read})


def check(refuse: Callable[[Any], Any]) -> Meta:
    """Mark a field with a check of its own: `refuse` returns the value to use, or raises ValueError."""
    return Meta(extra={"check": refuse})


def prepare(change: Callable[[Any], Any]) -> Meta:
    """Mark a field that `change` brings into the form that its type describes."""
    return Meta(extra={"prepare": change})
