"""Parse what people type: sizes, durations, times, NAME=VALUE pairs, JSON. The functions raise
typer.BadParameter."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

import typer

from gpubroker import units


@contextmanager
def _refused() -> Iterator[None]:
    try:
        yield
    except ValueError as wrong:
        raise typer.BadParameter(str(wrong)) from None


def size_mb(text: str) -> int:
    """Return `18GiB`, `18g`, `512MiB`, `80GB` or a number of MiB as MiB, rounded up."""
    with _refused():
        return units.size_mb(text)


def gpu_size(text: str) -> int | str:
    """Return a size in MiB, or the word `learned`."""
    return text if text == "learned" else size_mb(text)


def seconds(text: str) -> float:
    """Return `90`, `90s`, `15m`, `1h30m` or `2d` as seconds."""
    with _refused():
        return units.seconds(text)


def time_ahead(text: str) -> datetime:
    """Return the time that a text means: a time, or a duration from now. A time without a zone is in the zone
    of this machine."""
    return _time(text, 1, "in two hours")


def time_or_seconds(text: str) -> datetime | float:
    """Parse a time as `time_ahead` does, but return a duration as seconds, for the clock of the service."""
    with suppress(typer.BadParameter):
        return seconds(text)
    return time_ahead(text)


def time_ago(text: str) -> datetime:
    """Parse a time as `time_ahead` does, but count a duration back from now."""
    return _time(text, -1, "two hours ago")


def _time(text: str, direction: int, two_hours: str) -> datetime:
    with suppress(ValueError):
        return datetime.fromisoformat(text).astimezone()
    with suppress(typer.BadParameter):
        return datetime.fromtimestamp(time.time() + direction * seconds(text), UTC)
    raise typer.BadParameter(f"invalid time {text!r}: write 2026-11-21T22:00, or 2h for {two_hours}")


def priority(text: str) -> int | str:
    """Return a number, or the name of a band, which the service checks."""
    return int(text) if re.fullmatch(r"[+-]?\d+", text) else text


def amount(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"invalid number {text!r}: write 2 or 0.5") from None


def json_or_text(text: str) -> Any:
    """Return a JSON value; other text is a string, so `-i name=resnet` needs no quotes."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except ValueError:
        return text


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def demand(text: str, option: str) -> dict[str, Any]:
    """Return `count=4,gpu_mb=18GiB,custom.fpga=1` in the form of the API; several kinds are written
    `kinds=H100/A100`."""
    found: dict[str, Any] = {}
    for name, value in pairs(text.split(","), option).items():
        if name.startswith("custom."):
            found.setdefault("custom", {})[name.removeprefix("custom.")] = amount(value)
        elif name == "gpu_mb":
            found[name] = gpu_size(value)
        elif name.endswith("_mb"):
            found[name] = size_mb(value)
        elif name.endswith("kinds"):
            found[name] = value.split("/")
        else:
            found[name] = json_or_text(value)
    return found


def shapes(words: list[str], option: str) -> dict[str, list[int]]:
    """Return the shapes in `["image=3,224,224"]` by name."""
    try:
        return {name: [*map(int, dims.split(","))] for name, dims in pairs(words, option).items()}
    except ValueError:
        raise typer.BadParameter(f"{option} takes INPUT=3,224,224, not {' '.join(words)!r}") from None


def role(text: str) -> tuple[str, dict[str, Any]]:
    """Return `train:gpu_mb=40GiB,cpu=4` as a name and a demand."""
    name, colon, needs = text.partition(":")
    if not name or not colon:
        raise typer.BadParameter(
            f"invalid --role {text!r}: write NAME:FIELD=VALUE,..., such as train:gpu_mb=40GiB,cpu=4"
        )
    return name, demand(needs, "--role")


def pairs(words: list[str], option: str) -> dict[str, str]:
    """Return `["a=1", "b=x=y"]` as `{"a": "1", "b": "x=y"}`."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"invalid {option} {word!r}: write NAME=VALUE")
        found[name] = value
    return found
