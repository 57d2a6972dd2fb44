"""Describes the faults of a request: one fault per field, with the value found and what to send instead."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from types import UnionType
from typing import Any, Final, Union, get_args, get_origin

from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from gpubroker import units
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gpubroker_server.core.admission.facts import Refused
from gpubroker_server.core.domain.suggestions import did_you_mean, meant_field
from gpubroker_server.http.bodies import PATTERNS_IN_WORDS, key_given_twice
from gpubroker_server.http.problems import Fault, Problem
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
"""Names of fields in other systems -> the name of the same field here."""

_CODES: Final[Mapping[str, str]] = {"extra_forbidden": "unknown-field", "json_invalid": "malformed-json"}
_TIME_FAULTS = frozenset(
    {"time_form", "timezone_aware", "datetime_type", "datetime_parsing", "datetime_from_date_parsing"}
)
_RUN_KINDS = ("entrypoint", "command", "function")
_SHOWN_CHARACTERS = 60


class InvalidPart(Exception):
    """Raised if one part of a request is invalid. The exception carries all faults of that part."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__(faults)
        self.faults = faults


def duplicate_key(text: bytes) -> Fault | None:
    """Return a fault if an object in the text has a key twice; None otherwise."""
    detail = key_given_twice(text)
    return Fault(pointer="", detail=detail, code="duplicate-key") if detail else None


def request_faults(error: RequestValidationError, route: APIRoute) -> list[Fault]:
    """Return all faults that FastAPI found in a request. Raises Problem malformed-json if the body is not
    JSON."""
    faults = []
    for fault in error.errors():
        place, *path = fault["loc"]
        match place:
            case "body":
                assert route.body_field is not None
                model: Any = route.body_field.field_info.annotation
                faults.append(_body_fault(fault, path, model))
            case "query":
                faults.append(_parameter_fault(fault, path, _query_model(route.dependant)))
            case _:
                faults.append(header_fault(".".join(map(str, path)), fault["msg"]))
    return faults


def _query_model(dependant: Dependant) -> Any:
    """Return the model of a route's query, which is a parameter of the endpoint or of a dependency."""
    fields = [
        *dependant.query_params,
        *(field for dependency in dependant.dependencies for field in dependency.query_params),
    ]
    return fields[0].field_info.annotation


def header_fault(header: str, detail: str) -> Fault:
    return Fault(pointer=f"header:{header}", detail=detail, code="bad-header")


def body_faults(error: ValidationError, model: type[BaseModel]) -> list[Fault]:
    """Return one fault per error, with RFC 6901 pointers. Raises Problem malformed-json if the body is not
    JSON."""
    return [_body_fault(found, found["loc"], model) for found in error.errors(include_url=False)]


def _body_fault(found: ErrorDetails, location: Sequence[int | str], model: type[BaseModel]) -> Fault:
    """Return the fault of one field. Raises Problem malformed-json if the body is not JSON."""
    if found["type"] == "json_invalid":
        raise Problem("malformed-json", why=found["ctx"]["error"])
    if found["type"] == "missing" and not location:
        raise Problem("malformed-json", why="the body is empty")
    path = _field_path(location, model)
    return _fault(found, _pointer(path), path, model, location)


def parameter_faults(error: ValidationError, model: type[BaseModel]) -> list[Fault]:
    """Return the faults of query parameters."""
    return [_parameter_fault(found, found["loc"], model) for found in error.errors(include_url=False)]


def _parameter_fault(found: ErrorDetails, path: Sequence[int | str], model: type[BaseModel]) -> Fault:
    name = str(path[0]) if path else ""
    if found["type"] == "extra_forbidden":
        return unknown_parameter(name, model)
    return _fault(found, f"query:{name}", path, model, path)


def unknown_parameter(name: str, model: type[BaseModel]) -> Fault:
    detail = f'unknown parameter "{name}"{_suggestion(name, model)}'
    return Fault(pointer=f"query:{name}", detail=detail, code="unknown-parameter")


def problem_of(refused: Refused) -> Problem:
    """Return the problem that answers a refused submission."""
    faults = [Fault(pointer=fault.field, detail=fault.message, code=fault.code) for fault in refused.faults]
    return Problem(refused.code, refused.detail, errors=faults) if refused.detail else invalid(*faults)


def refuse(refused: Refused | None) -> None:
    """Raise the problem of a refusal. Does nothing if `refused` is None."""
    if refused is not None:
        raise problem_of(refused)


def invalid(*faults: Fault) -> Problem:
    """Return a Problem validation-failed with all faults of a request. Its text describes the first fault."""
    first = f"{faults[0].pointer}: {faults[0].detail}".removeprefix(": ")
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return Problem("validation-failed", first + more, errors=faults)


def _fault(
    found: ErrorDetails,
    pointer: str,
    path: Sequence[int | str],
    model: type[BaseModel],
    location: Sequence[int | str],
) -> Fault:
    """Return the fault. `location` is pydantic's location, which also names the model that was chosen among
    several."""
    code = _CODES.get(found["type"], found["type"].replace("_", "-"))
    return Fault(pointer=pointer, detail=_detail(found, path, model, location), code=code)


def _detail(
    found: ErrorDetails, path: Sequence[int | str], model: type[BaseModel], location: Sequence[int | str]
) -> str:
    match found["type"]:
        case "missing":
            return f'field "{path[-1]}" is required'
        case "extra_forbidden":
            name = str(path[-1])
            owner = _model_at(model, path[:-1], location)
            return f'unknown field "{name}"{_suggestion(name, owner)}'
        case "duplicate_key":
            return found["msg"]
        case "run_kind":
            return f"{found['msg']}{_meant_kind(found['input'])}"
        case "string_pattern_mismatch":
            pattern = str(found["ctx"]["pattern"])
            expectation = PATTERNS_IN_WORDS.get(pattern, f"must match {pattern}")
            return f"{expectation}; found {_shown(found['input'])}"
    message = text_of(found)
    is_counted = found["type"].endswith(("too_short", "too_long"))  # pydantic's text gives the length found
    # A validator that has looked into an object or an array has said what is wrong in it.
    is_complete = isinstance(found["input"], dict | list) and not found["type"].endswith("_type")
    if is_counted or is_complete:
        return message
    return f"{message}; found {_shown(found['input'])}{_meant_value(path, found)}"


def _meant_value(path: Sequence[int | str], found: ErrorDetails) -> str:
    """Return a hint at what was probably meant: a time with its zone, a number of MiB instead of a size with
    a unit, or a part of a GPU. The hint is empty if nothing suggests one."""
    field, kind, value = str(path[-1]) if path else "", found["type"], found["input"]
    if kind in _TIME_FAULTS:
        return "; give a time with its zone, such as 2026-11-21T22:00:00Z"
    if field == "gpus" and isinstance(value, float):
        return "; for a part of a GPU leave gpus out and give gpu_fraction or gpu_mb"
    if isinstance(value, str) and field.endswith("_mb"):
        with suppress(ValueError):
            return f"; in MiB that is {units.size_mb(value)}"
    return ""


def _meant_kind(run: Any) -> str:
    """Return a hint at which of entrypoint, command and function was probably meant."""
    if not isinstance(run, dict) or not run:
        return ""
    for name in run:
        suggestion = did_you_mean(FOREIGN_NAMES.get(name, name), _RUN_KINDS)
        if suggestion and name not in _RUN_KINDS:
            return f"; unknown field {_shown(name)}; {suggestion}"
    return f"; found {', '.join(map(_shown, islice(run, 5)))}"


def _shown(value: Any) -> str:
    """Return a short text of the value: the kind of a container, the length of a long string, or the value
    itself."""
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
    """Return a hint at the field that may be meant, in this object or one level deeper; empty if `model` is
    None."""
    if model is None:
        return ""
    inner = {
        field: [name for model in _models_in(info.annotation) for name in model.model_fields]
        for field, info in model.model_fields.items()
    }
    return f"; {meant_field(FOREIGN_NAMES.get(name, name), list(model.model_fields), inner)}"


def _model_at(
    model: type[BaseModel], path: Sequence[int | str], location: Sequence[int | str]
) -> type[BaseModel] | None:
    """Return the model of the object at `path`; None if it has none. `location` also names the model that was
    chosen among several."""
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
    """Return the location without the parts that pydantic adds: tags of union members, and `[key]`."""
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
