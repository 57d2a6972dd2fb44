"""The building blocks of answers: times, states, lists and pages, and the base of all answers."""

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Generic, Self, TypeVar

from msgspec import Meta, Struct, to_builtins
from msgspec.json import Encoder

T = TypeVar("T")
Raw = Mapping[str, Any]


class Time(datetime):
    """A time in UTC. In JSON it is RFC 3339 with three digits after the second, and Z."""

    @classmethod
    def at(cls, seconds: float) -> Self:
        """Return the time that is this many seconds after 1970."""
        return cls.fromtimestamp(seconds, UTC)

    @classmethod
    def at_or_none(cls, seconds: float | None) -> Self | None:
        return None if seconds is None else cls.fromtimestamp(seconds, UTC)

    def __str__(self) -> str:
        return self.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def plain(value: object) -> str:
    """Return the JSON form of a value that msgspec does not know. Raises TypeError for other types."""
    if isinstance(value, Time):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


encode = Encoder(enc_hook=plain).encode
"""Write an answer as JSON. Floats that JSON cannot express become null."""


class Answered(Struct, frozen=True, dict=True):
    """An answer, or an object in one."""

    @property
    def raw(self) -> Raw:
        """All fields that the service sent, including those that this version of the SDK does not know."""
        raw: Raw | None = self.__dict__.get("raw")
        return to_builtins(self, enc_hook=plain) if raw is None else raw

    def with_raw(self, raw: Raw) -> Self:
        """Attach the answer from which this value was made, and return the value."""
        self.__dict__["raw"] = raw
        return self


class KnownState(StrEnum):
    """States to which newer services may add more. The SDK shows any other as UNKNOWN, and `raw["state"]` has
    its name."""

    @classmethod
    def _missing_(cls, _value: object) -> Self:
        return cls["UNKNOWN"]


class SettledState(KnownState):
    """States that are all listed in the document of the API, so that no service has others."""


class Listed(Answered, Generic[T], frozen=True):
    """A whole list."""

    items: tuple[T, ...]

    def __iter__(self) -> Iterator[T]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


class Page(Listed[T], Generic[T], frozen=True):
    """A part of a list, and the cursor of the next part, which is null after the last."""

    next_cursor: str | None
    has_more: bool


class AsOf(Answered, frozen=True):
    """An overview of the cluster, which may be a little older than the answer."""

    as_of: Annotated[Time, Meta(description="The commit time of the newest event in this overview.")]
    age_seconds: Annotated[
        float, Meta(description="The time since the overview was last known to be current.")
    ]
    position: Annotated[int, Meta(description="Log position of the newest event in this overview.")]


class Overview(AsOf, Generic[T], frozen=True):
    """A list as of one moment."""

    items: tuple[T, ...]

    def __iter__(self) -> Iterator[T]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


class OverviewPage(Overview[T], Generic[T], frozen=True):
    """A part of an overview, or all of it."""

    next_cursor: Annotated[
        str | None, Meta(description="The cursor of the next part; null if this part is the last.")
    ] = None
    has_more: bool = False


def part_of(items: Iterable[T], next_cursor: str | None) -> dict[str, Any]:
    """Return the fields of a page apart from the moment."""
    return {"items": tuple(items), "next_cursor": next_cursor, "has_more": next_cursor is not None}
