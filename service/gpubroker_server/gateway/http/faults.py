"""What is wrong with a request: one fault per field, with what was found and what to send instead."""

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import islice
from types import UnionType
from typing import Any, Final, Union, get_args, get_origin

from jiter import from_json
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gpubroker_server.gateway.http.bodies import PATTERNS_IN_WORDS
from gpubroker_server.gateway.http.problems import Fault, Problem
from gpubroker_server.settings.validation_text import text_of

FOREIGN_NAMES: Final[Mapping[str, str]] = {
    "gpu_memory": "gpu_mb",
    "gpu_memory_mb": "gpu_mb",
    "vram_mb": "gpu_mb",
    "gpu": "gpus",
    "num_gpus": "gpus",
    "cpus": "cpu",
    "num_cpus": "cpu",
    "memory": "memory_mb",
    "mem_mb": "memory_mb",
    "timeout": "timeout_seconds",
    "grace": "grace_seconds",
    "retries": "max_retries",
    "tags": "labels",
    "ttl": "ttl_seconds",
    "cmd": "command",
}
"""Names that other systems have for our fields."""

_CODES: Final[Mapping[str, str]] = {"extra_forbidden": "unknown-field", "json_invalid": "malformed-json"}
_RUN_KINDS = ("entrypoint", "command", "function")
_SHOWN_CHARACTERS = 60
_SIZE = re.compile(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([MGT])i?B?\s*", re.IGNORECASE)
_MIB_OF: Final[Mapping[str, int]] = {"m": 1, "g": 1024, "t": 1024**2}


class InvalidPart(Exception):
    """One part of a request is invalid; all its faults together."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__(faults)
        self.faults = faults


def duplicate_key(text: bytes) -> Fault | None:
    """If a key stands twice in one object: which one counts differs from parser to parser. Text that is no
    JSON has none; validation says what is wrong with it."""
    try:
        from_json(text, catch_duplicate_keys=True)
    except ValueError as twice:
        try:
            from_json(text)
        except ValueError:
            return None
        detail = f"{str(twice)[:1].lower()}{str(twice)[1:200]}; send each key of an object once"
        return Fault(pointer="", detail=detail, code="duplicate-key")
    return None


def body_faults(error: ValidationError, model: type[BaseModel]) -> list[Fault]:
    """One fault per error, with RFC 6901 pointers. Raises Problem if the body is no JSON at all."""
    faults = []
    for found in error.errors(include_url=False):
        if found["type"] == "json_invalid":
            raise Problem("malformed-json", why=found["ctx"]["error"])
        path = _field_path(found["loc"], model)
        faults.append(_fault(found, _pointer(path), path, model))
    return faults


def parameter_faults(error: ValidationError, place: str, model: type[BaseModel]) -> list[Fault]:
    """Faults of query parameters or headers; `place` is `query` or `header`."""
    return [
        _fault(found, f"{place}:{found['loc'][0] if found['loc'] else ''}", found["loc"], model)
        for found in error.errors(include_url=False)
    ]


def unknown_parameter(name: str, model: type[BaseModel]) -> Fault:
    detail = f'unknown parameter "{name}"{_suggestion(name, model)}'
    return Fault(pointer=f"query:{name}", detail=detail, code="unknown-parameter")


def invalid(*faults: Fault) -> Problem:
    """Problem validation-failed with all faults of a request."""
    first = f"{faults[0]['pointer']}: {faults[0]['detail']}".removeprefix(": ")
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return Problem("validation-failed", first + more, errors=faults)


def _fault(found: ErrorDetails, pointer: str, path: Sequence[int | str], model: type[BaseModel]) -> Fault:
    code = _CODES.get(found["type"], found["type"].replace("_", "-"))
    return Fault(pointer=pointer, detail=_detail(found, path, model), code=code)


def _detail(found: ErrorDetails, path: Sequence[int | str], model: type[BaseModel]) -> str:
    match found["type"]:
        case "missing":
            return f'field "{path[-1]}" is required'
        case "extra_forbidden":
            name = str(path[-1])
            owner = _model_at(model, path[:-1], found["loc"])
            return f'unknown field "{name}"{_suggestion(name, owner)}'
        case "run_kind":
            return f"{found['msg']}{_meant_kind(found['input'])}"
        case "string_pattern_mismatch":
            pattern = str(found["ctx"]["pattern"])
            what = PATTERNS_IN_WORDS.get(pattern, f"must match {pattern}")
            return f"{what}; found {_shown(found['input'])}"
    message = text_of(found)
    is_counted = found["type"].endswith(("too_short", "too_long"))  # the text says what it has
    is_told = found["type"] == "value_error" and isinstance(found["input"], dict | list)
    if is_counted or is_told:
        return message
    return f"{message}; found {_shown(found['input'])}{_meant_value(path, found['input'])}"


def _meant_value(path: Sequence[int | str], value: Any) -> str:
    """What was probably meant: a size with a unit instead of a number of MiB, or half a GPU."""
    field = str(path[-1]) if path else ""
    if field.endswith("_at") or field == "not_before":
        return "; give a time with its zone, such as 2026-11-21T22:00:00Z"
    if field == "gpus" and isinstance(value, float):
        return "; for a part of a GPU leave gpus out and give gpu_fraction or gpu_mb"
    size = _SIZE.fullmatch(value) if isinstance(value, str) and field.endswith("_mb") else None
    if size is None:
        return ""
    return f"; in MiB that is {round(float(size[1]) * _MIB_OF[size[2].lower()])}"


def _meant_kind(run: Any) -> str:
    """Which of entrypoint, command and function was probably meant."""
    if not isinstance(run, dict) or not run:
        return ""
    for name in run:
        near = get_close_matches(FOREIGN_NAMES.get(name, name), _RUN_KINDS, n=1)
        if near and name not in _RUN_KINDS:
            return f'; unknown field {_shown(name)}; did you mean "{near[0]}"?'
    return f"; found {', '.join(map(_shown, islice(run, 5)))}"


def _shown(value: Any) -> str:
    """The value, shortened: only the kind of a container, only the length of a long string."""
    match value:
        case dict():
            return "an object"
        case list():
            return "an array"
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str() if len(value) > _SHOWN_CHARACTERS:
            return f"a string of {len(value)} characters"
        case str():
            return f'"{value}"' if value.isprintable() else ascii(value)
    return str(value)[:_SHOWN_CHARACTERS]


def _suggestion(name: str, model: type[BaseModel] | None) -> str:
    """The field with the nearest name, in this object or one level deeper."""
    if model is None:
        return ""
    known = list(model.model_fields)
    meant = FOREIGN_NAMES.get(name, name)
    if meant in known:
        return f'; did you mean "{meant}"?'
    for field, info in model.model_fields.items():
        if any(meant in inner.model_fields for inner in _models_in(info.annotation)):
            return f'; did you mean "{field}.{meant}"?'
    near = get_close_matches(meant, known, n=1)
    return f'; did you mean "{near[0]}"?' if near else f"; known are {', '.join(known)}"


def _model_at(
    model: type[BaseModel], path: Sequence[int | str], location: Sequence[int | str]
) -> type[BaseModel] | None:
    """The model that describes the object at `path`. `location` also names the chosen one of several."""
    current: type[BaseModel] | None = model
    parts = iter(path)
    for part in parts:
        if isinstance(part, int):
            continue
        if current is None or part not in current.model_fields:
            return None
        annotation = current.model_fields[part].annotation
        if get_origin(annotation) is dict:
            next(parts, None)
        inner = _models_in(annotation)
        chosen = [candidate for candidate in inner if _tag_of(candidate) in location]
        current = next(iter(chosen or inner), None)
    return current


def _field_path(location: Sequence[int | str], model: type[BaseModel]) -> list[int | str]:
    """The location without what pydantic adds: tags of union members, and `[key]`."""
    top = model.model_fields.get(str(location[0])) if location else None
    tags = {_tag_of(inner) for inner in _models_in(top.annotation)} if top is not None else set()
    return [
        part for index, part in enumerate(location) if not (index == 1 and part in tags) and part != "[key]"
    ]


def _tag_of(model: type[BaseModel]) -> str:
    return getattr(model, "tag", "")


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType, list, dict) or hasattr(annotation, "__metadata__"):
        return [model for part in get_args(annotation) for model in _models_in(part)]
    return []


def _pointer(path: Iterable[int | str]) -> str:
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)
