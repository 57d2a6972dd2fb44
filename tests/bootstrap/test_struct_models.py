"""Pydantic models made from Structs: what may be written, and what it becomes."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import pytest
from gpubroker.wire.bounds import Count, Priority
from gpubroker_server.core.domain.setting_marks import (
    ELSEWHERE,
    HOME,
    WORDS,
    Share,
    alone,
    by_name,
    check,
    prepare,
    written,
)
from gpubroker_server.core.domain.units import Mib
from gpubroker_server.settings.struct_models import model_of, value_of
from msgspec import Meta, Struct, field
from pydantic import ValidationError


def _refuse_seven(number: int) -> int:
    if number == 7:
        raise ValueError("7 is taken")
    return number


class Part(Struct, frozen=True):
    name: str
    size_mb: Annotated[Mib, Meta(gt=0)]
    priority: Priority = 50

    def __post_init__(self) -> None:
        if self.size_mb > self.priority:
            raise ValueError("too large")


class Whole(Struct, frozen=True, kw_only=True):
    number: Annotated[Count, check(_refuse_seven)]
    inner: Annotated[int, ELSEWHERE] = 1
    level: Share = 0.5
    closed: Annotated[bool, written("door", {"open": False, "closed": True})] = False
    home: Annotated[Path, HOME] | None = None
    words: Annotated[tuple[str, ...], WORDS] = ()
    parts: Annotated[tuple[Part, ...], by_name(alone="size_mb")] = ()
    pairs: tuple[tuple[str, tuple[str, ...]], ...] = ()
    each: Annotated[Mapping[str, Count], alone("*")] = field(default_factory=dict)
    twice: Annotated[int, prepare(lambda given: given * 2)] = 0

    def check_given(self, given: Collection[str]) -> None:
        if "inner" in given or ("closed" in given and not self.closed):
            raise ValueError("the door is open anyway")


def made(**given: Any) -> Whole:
    found: Whole = value_of(Whole, model_of(Whole)(**{"number": 1, **given}))
    return found


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ({}, Whole(number=1)),
        ({"level_percent": 75}, Whole(number=1, level=0.75)),
        ({"door": "closed"}, Whole(number=1, closed=True)),
        ({"home": "~/a"}, Whole(number=1, home=Path.home() / "a")),
        ({"words": "b, a"}, Whole(number=1, words=("b", "a"))),
        (
            {"parts": {"b": {"size_mb": "1MiB", "priority": "batch"}, "a": 2}},
            Whole(number=1, parts=(Part("a", Mib(2)), Part("b", Mib(1), 54))),
        ),
        ({"pairs": {"z": ["b", "a"], "k": []}}, Whole(number=1, pairs=(("k", ()), ("z", ("a", "b"))))),
        ({"each": 3}, Whole(number=1, each={"*": 3})),
        ({"each": {0: 3}}, Whole(number=1, each={"0": 3})),
        ({"twice": 2}, Whole(number=1, twice=4)),
    ],
)
def test_what_is_written_becomes_the_value(given: dict[str, Any], value: Whole) -> None:
    assert made(**given) == value


def test_all_faults_are_found_at_their_places() -> None:
    with pytest.raises(ValidationError) as refused:
        made(number=7, level_percent=101, parts={"a": {"size_mb": 0}, "b": 60}, inner=3, each={"x": -1})
    assert {fault["loc"]: fault["type"] for fault in refused.value.errors()} == {
        ("number",): "value_error",
        ("level_percent",): "less_than_equal",
        ("parts", "a", "size_mb"): "greater_than",
        ("parts", "b"): "value_error",
        ("inner",): "extra_forbidden",
        ("each", "x"): "greater_than_equal",
    }


def test_a_struct_hears_which_settings_were_given() -> None:
    with pytest.raises(ValueError, match="the door is open anyway"):
        made(door="open")
    assert not made().closed
