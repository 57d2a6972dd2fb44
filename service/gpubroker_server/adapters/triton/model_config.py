"""What a model's configuration says of how it is run: as the server tells it, or as its file does."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpubroker_server.ports.protowire import Message

_MAX_BATCH_SIZE, _INSTANCE_GROUP, _ENSEMBLE = 4, 7, 15
_GROUP_COUNT, _GROUP_GPUS = 2, 3
_STEP, _STEP_MODEL = 1, 1


_VERSION = re.compile("[1-9][0-9]*")
"""The name of a folder that Triton takes for a version."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    instances: int = 1
    most_batch: int = 1
    """So many requests an instance takes together."""
    steps: tuple[str, ...] = ()
    """Of an ensemble, each model once."""
    latest: int | None = 1
    """So many of the highest versions are loaded; None: all."""
    specific: tuple[str, ...] = ()
    """If there are any, these are loaded instead."""

    def versions_in(self, folder: Path) -> tuple[str, ...]:
        """Those in the model's folder that a load brings, sorted as in an index. Raises OSError."""
        there = [one.name for one in folder.iterdir() if one.is_dir() and _VERSION.fullmatch(one.name)]
        if self.specific:
            return tuple(sorted(set(self.specific) & set(there)))
        highest_first = sorted(there, key=int, reverse=True)
        return tuple(sorted(highest_first[: self.latest]))


def config_of(message: Message) -> ModelConfig:
    """As the server tells it. Raises Malformed."""
    groups = message.messages(_INSTANCE_GROUP)
    steps = message.message(_ENSEMBLE).messages(_STEP)
    return ModelConfig(
        instances=sum(
            _instances(group.number(_GROUP_COUNT), len(group.numbers(_GROUP_GPUS))) for group in groups
        )
        or 1,
        most_batch=message.number(_MAX_BATCH_SIZE) or 1,
        steps=tuple(dict.fromkeys(step.text(_STEP_MODEL) for step in steps)),
    )


def _instances(count: int, gpus: int) -> int:
    """Of one group: so many on each of its GPUs."""
    return (count or 1) * (gpus or 1)


def config_in(file: Path) -> ModelConfig:
    """As a `config.pbtxt` says, which the server may complete. Raises OSError, ValueError."""
    found = _Text(file.read_text(encoding="utf-8")).fields()
    latest, specific = _policy_in(found)
    groups = [group for group in found.get("instance_group", []) if isinstance(group, dict)]
    ensembles = [one for one in found.get("ensemble_scheduling", []) if isinstance(one, dict)]
    steps = [step for one in ensembles for step in one.get("step", []) if isinstance(step, dict)]
    counts = [(_first_number(group.get("count", [])), len(group.get("gpus", []))) for group in groups]
    return ModelConfig(
        instances=sum(_instances(count, gpus) for count, gpus in counts) or 1,
        most_batch=_first_number(found.get("max_batch_size", [])) or 1,
        steps=tuple(dict.fromkeys(str(name) for step in steps for name in step.get("model_name", []))),
        latest=latest,
        specific=specific,
    )


def _policy_in(config: "Fields") -> tuple[int | None, tuple[str, ...]]:
    """Of versions: (so many of the highest, or None for all; or these)."""
    for policy in (one for one in config.get("version_policy", []) if isinstance(one, dict)):
        if "all" in policy:
            return None, ()
        for one in policy.get("specific", []):
            if isinstance(one, dict):
                return 1, tuple(str(version) for version in one.get("versions", []))
        for one in policy.get("latest", []):
            if isinstance(one, dict):
                return _first_number(one.get("num_versions", [])) or 1, ()
    return 1, ()


Fields = dict[str, "list[str | Fields]"]

_TOKEN = re.compile(r"""\#[^\n]*|("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[\[\]{}:,;<>]|[^\s\[\]{}:,;<>"'\#]+)""")
"""Or a remark, which is none."""

_ENDS = {"{": "}", "<": ">"}


class _Text:
    """Protobuf's text format: `name: value`, `name { ... }`, `name [ ..., ... ]`."""

    def __init__(self, text: str) -> None:
        self._tokens = list(_tokens(text))
        self._at = 0

    def fields(self, end: str = "") -> Fields:
        """Until that token. Each has all its values. Raises ValueError."""
        found: Fields = {}
        while (name := self._next()) != end:
            if name in (",", ";"):
                continue
            if self._peek() == ":":
                self._next()
            found.setdefault(name, []).extend(self._values())
        return found

    def _values(self) -> "list[str | Fields]":
        if self._peek() != "[":
            return [self._value()]
        self._next()
        values: list[str | Fields] = []
        while self._peek() != "]":
            if self._peek() == ",":
                self._next()
            else:
                values.append(self._value())
        self._next()
        return values

    def _value(self) -> "str | Fields":
        found = self._next()
        if found in _ENDS:
            return self.fields(_ENDS[found])
        if not found:
            raise ValueError("it ends in the middle")
        return found[1:-1] if found[0] in "\"'" else found

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _next(self) -> str:
        token = self._peek()
        self._at += 1
        if not token and self._at > len(self._tokens) + 1:
            raise ValueError("it ends in the middle")
        return token


def _tokens(text: str) -> Iterator[str]:
    return (found[1] for found in _TOKEN.finditer(text) if found[1])


def _first_number(values: "list[str | Fields]") -> int:
    value = values[0] if values else ""
    return int(value) if isinstance(value, str) and value.isdecimal() else 0
