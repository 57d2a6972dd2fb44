"""Makes pydantic models from the Structs of the settings.

The service uses the settings as frozen Structs, most of them of the core. Pydantic checks the configuration
that the operator wrote, because it reports every wrong setting at once and the place of each. A model is
made from the fields of its Struct and their marks (`core/domain/setting_marks.py`), so no setting is
described twice.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from functools import cache, partial
from types import GenericAlias, UnionType
from typing import Annotated, Any, Final, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from gpubroker import units
from gpubroker.user_places import expanded
from msgspec import Meta, Struct
from msgspec.structs import fields, replace
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    create_model,
    model_validator,
)
from pydantic_settings import NoDecode

from gpubroker_server.core.domain.policy import PRIORITIES_IN_WORDS, priority_of

_BOUNDS: Final = ("gt", "ge", "lt", "le", "pattern", "min_length", "max_length")
_PRIORITIES: Final = ("priority", "max_priority", "priority_threshold")
WRITTEN_AS: Final = {
    "_mb": "a number of MiB or a size such as 40GiB",
    "_bytes": "a number of bytes or a size such as 16MiB",
    "_seconds": "a number of seconds or a duration such as 15m or 7d",
    **dict.fromkeys(_PRIORITIES, PRIORITIES_IN_WORDS),
}
"""The texts about what may be written for a number, by the end of the setting's name."""


def as_number(name: str, value: Any) -> Any:
    """Return `16GiB`, `7d` or `batch` as a number in the unit of the setting's name. In a mapping, each
    value is converted. Any other value is returned unchanged, and is refused where the setting's type is
    known."""
    if isinstance(value, dict):
        return {
            key: as_number(name, number) if isinstance(number, str) else number
            for key, number in value.items()
        }
    if not isinstance(value, str):
        return value
    with contextlib.suppress(ValueError):
        if name.endswith("_mb"):
            return units.size_mb(value)
        if name.endswith("_bytes"):
            return math.ceil(units.size_bytes(value, plain=1))
        if name.endswith("_seconds"):
            return units.seconds(value)
        if name in _PRIORITIES and (priority := priority_of(value)) is not None:
            return priority
    return value


class WithUnits(BaseModel):
    @model_validator(mode="before")
    @classmethod
    def _numbers(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: as_number(str(name), value) for name, value in given.items()}


class Section(WithUnits):
    # A section is checked only as a part of all settings, whose schema contains that of the section.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


class _Setting(NamedTuple):
    name: str
    field: str
    """The field of the Struct that the setting fills."""
    annotation: Any
    is_required: bool


def model_of(kind: Any, base: type[BaseModel] = Section) -> type[BaseModel]:
    """Return the model that checks the configuration of a value of this Struct."""
    return _model_of(kind, base, named=False)


@cache
def _model_of(kind: Any, base: type[BaseModel], *, named: bool) -> type[BaseModel]:
    """Return the model of a Struct. `named` is True if the name is the key of the value, so that it is no
    setting of the section."""
    written: dict[str, Any] = {
        setting.name: (
            setting.annotation,
            ... if setting.is_required else None,
        )  # the Struct knows the default
        for setting in _settings_of(kind)
        if not (named and setting.field == "name")
    }
    return create_model(kind.__name__, __base__=base, **written)


def value_of(kind: Any, model: BaseModel, **more: Any) -> Any:
    """Return the value that a checked model describes. If the kind has a method `check_given`, it is called
    with the names of the given settings. Raises ValueError if the settings contradict each other."""
    names = {setting.name: setting.field for setting in _settings_of(kind)}
    given = {names[setting]: getattr(model, setting) for setting in model.model_fields_set}
    value = kind(**given, **more)
    if hasattr(kind, "check_given"):
        value.check_given(given.keys())
    return value


@cache
def _settings_of(kind: Any) -> tuple[_Setting, ...]:
    hints = get_type_hints(kind, include_extras=True)
    settings = []
    for field in fields(kind):
        hint, marks = hints[field.name], _marks_of(hints[field.name])
        if "elsewhere" not in marks:
            name = marks.get("name") or (f"{field.name}_percent" if "percent" in marks else field.name)
            settings.append(_Setting(name, field.name, _written(hint), field.required))
    return tuple(settings)


def _marks_of(hint: Any) -> dict[str, Any]:
    metas = (mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Meta))
    return {name: value for meta in metas for name, value in (meta.extra or {}).items()}


def _written(hint: Any) -> Any:
    """Return the annotation with which pydantic checks the configuration of a value of this type."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _marked(hint)
    if isinstance(hint, type) and issubclass(hint, Struct):
        return Annotated[model_of(hint), AfterValidator(partial(value_of, hint))]
    if origin in (Union, UnionType):
        return Union[tuple(map(_written, args))]  # noqa: UP007  # of as many as there are
    if origin is Mapping or origin is dict:
        return _dict_of(_written(args[1]))
    if origin is tuple and get_origin(args[0]) is tuple:
        _, value = get_args(args[0])
        return Annotated[_dict_of(_written(value)), AfterValidator(_pairs)]
    return GenericAlias(tuple, (_written(args[0]), ...)) if origin is tuple else hint


def _dict_of(value: Any) -> Any:
    return GenericAlias(dict, (str, value))


def _marked(hint: Any) -> Any:
    marks, inner = _marks_of(hint), get_args(hint)[0]
    scale = 100 if "percent" in marks else 1
    if "by_name" in marks:
        written = _by_name(get_args(inner)[0], marks["alone"])
    elif "text" in marks:
        written = Annotated[str, AfterValidator(marks["text"])]
    elif marks.get("choices"):
        written = Annotated[Literal[tuple(marks["choices"])], AfterValidator(marks["choices"].__getitem__)]
    else:
        written = _written(inner)
    checks = [*_bounds(hint, scale), *_checks(marks)]
    if scale != 1:
        checks.append(AfterValidator(lambda percent: percent / scale))
    for check in checks:
        written = Annotated[written, check]
    return written


def _bounds(hint: Any, scale: int) -> Iterator[Any]:
    for meta in hint.__metadata__:
        given = {name: bound for name in _BOUNDS if (bound := getattr(meta, name)) is not None}
        if given:
            yield Field(**(given if scale == 1 else {name: bound * scale for name, bound in given.items()}))


def _checks(marks: Mapping[str, Any]) -> Iterator[Any]:
    if "home" in marks:
        yield AfterValidator(expanded)
    if "check" in marks:
        yield AfterValidator(marks["check"])
    if "by_name" not in marks and "alone" in marks:
        yield BeforeValidator(partial(_alone, marks["alone"], types=object))
    if "words" in marks:
        yield NoDecode
        yield BeforeValidator(_comma_separated)
    if "prepare" in marks:
        yield BeforeValidator(marks["prepare"])


def _by_name(kind: Any, alone: str) -> Any:
    model = _model_of(kind, Section, named=True)
    entry: Any = Annotated[model, AfterValidator(partial(value_of, kind, name=""))]
    if alone:
        entry = Annotated[entry, BeforeValidator(partial(_alone, alone))]
    return Annotated[_dict_of(entry), AfterValidator(_named)]


def _named(values: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return each value with its name, sorted by name."""
    return tuple(replace(entry, name=name) for name, entry in sorted(values.items()))


def _pairs(values: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return pairs of name and value, sorted by name. Several values of one name are a set, so these are
    sorted too."""
    return tuple(
        (name, tuple(sorted(value)) if isinstance(value, tuple) else value)
        for name, value in sorted(values.items())
    )


def _alone(key: str, value: Any, types: Any = int | float | str) -> Any:
    if isinstance(value, dict):
        return {str(name): entry for name, entry in value.items()}  # numbers of devices are words here
    return {key: value} if isinstance(value, types) else value


def _comma_separated(value: Any) -> Any:
    """Return a text as a list, split at its commas, because a list in the environment is written so."""
    if not isinstance(value, str):
        return value
    return [word.strip() for word in value.split(",") if word.strip()]
