"""The payload of an event: a domain value, or those of its fields that have changed.

The process that wrote an event has the values themselves; other processes read their JSON texts from the
database. The text of another release is read by the same types: fields that it lacks have their defaults, and
unknown fields are left out. `NewEvent.reader` says which texts must not be read in this way.

In texts, the fields of a task's holder are written beside the other fields, like the columns of a row. All
releases write them in this way, and the demand tells gangs and inferences apart, so processes of several
releases can follow one log. A run, the usual holder, has no fields of its own.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar, assert_never

from msgspec import NODEFAULT, UNSET, Struct, UnsetType, convert, defstruct, field, json
from msgspec.structs import FieldInfo, fields, replace

from gpubroker_server.core.domain.demand import Demand, interned
from gpubroker_server.core.domain.holders import (
    External,
    Gang,
    Holder,
    Inference,
    Member,
    Model,
    Run,
    WorkerSeat,
    holder_of,
)
from gpubroker_server.core.domain.submission import Fields
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import TaskId

Payload = Struct | Mapping[str, Any] | str
"""A value, some fields by name, or the JSON of either."""
S = TypeVar("S", bound=Struct)


def encode(payload: Payload) -> str:
    """Return the payload as JSON. Raises UnicodeEncodeError for text that UTF-8 cannot encode."""
    return payload if isinstance(payload, str) else json.encode(payload).decode()


def read(payload: Payload, kind: type[S]) -> S:
    """Return the value of this kind that the payload holds. Raises msgspec.ValidationError if it holds
    another kind."""
    if isinstance(payload, kind):
        return payload
    return json.decode(payload, type=kind) if isinstance(payload, str) else convert(payload, kind)


class HolderFields(Struct, frozen=True):
    """The fields of one kind of task in texts and rows, which hold them beside those of the common part."""

    array: TaskId | None = None
    external: External | None = None
    model: Model | None = None
    members: tuple[Member, ...] = ()


HOLDER_FIELDS = HolderFields.__struct_fields__
NO_HOLDER_FIELDS = HolderFields()
COMMON_FIELDS = tuple(name for name in Task.__struct_fields__ if name != "holder")


def fields_of_holder(holder: Holder) -> HolderFields:
    """Return the fields that only tasks with this kind of holder have."""
    match holder:
        case Run() | Inference():
            return NO_HOLDER_FIELDS
        case Gang(members):
            return HolderFields(members=members) if members else NO_HOLDER_FIELDS
        case WorkerSeat(array):
            return HolderFields(array=array)
        case External():
            return HolderFields(external=holder)
        case Model():
            return HolderFields(model=holder)
        case _:
            assert_never(holder)


def holder_with(
    demand: Demand,
    array: TaskId | None,
    external: External | None,
    model: Model | None,
    members: tuple[Member, ...],
) -> Holder:
    """Return the holder of a task with this demand and these fields, in the order of HOLDER_FIELDS."""
    if model is not None:
        return model
    if external is not None:
        return external
    if array is not None:
        return WorkerSeat(array)
    return Gang(members) if members else holder_of(demand)


def _field(info: FieldInfo) -> tuple[str, Any, Any]:
    if info.default_factory is not NODEFAULT:
        return info.name, info.type, field(default_factory=info.default_factory)
    return (info.name, info.type, info.default)


StoredTask: Any = defstruct(
    "StoredTask",
    [_field(info) for info in (*fields(Task)[:-1], *fields(HolderFields))],
    frozen=True,
    omit_defaults=True,
)
"""A task in the form of texts and rows, with the fields of its holder beside the common ones."""
_common: Callable[[Any], tuple[Any, ...]] = attrgetter(*COMMON_FIELDS)
_of_holder: Callable[[Any], tuple[Any, ...]] = attrgetter(*HOLDER_FIELDS)
_DEMAND = COMMON_FIELDS.index("demand")


def payload_of(task: Task) -> Payload:
    """Return the payload of all fields of a task. The payload of a run is the task itself, which has only the
    common fields."""
    if isinstance(task.holder, Run):
        return task
    text: Struct = StoredTask(*_common(task), *_of_holder(fields_of_holder(task.holder)))
    return text


def read_task(payload: Payload) -> Task:
    """Return the task. Its demand is one object for all equal demands, so that a queue keeps each demand
    once."""
    if isinstance(payload, Task):
        return payload
    text = read(payload, StoredTask)
    common = list(_common(text))
    demand = common[_DEMAND] = interned(text.demand)
    common.append(holder_with(demand, *_of_holder(text)))
    return Task(*common)


def changed_task(before: Task, payload: Payload, version: int) -> Task:
    """Return the task with the fields that the payload has."""
    changes = _given(payload, StoredTask)
    match before.holder:
        case Gang() if "members" in changes:
            changes["holder"] = Gang(changes["members"])
        case Model() if "model" in changes:
            changes["holder"] = changes["model"]
        case _:
            pass  # no other holder changes
    for name in HOLDER_FIELDS:
        changes.pop(name, None)
    return replace(before, **changes, version=version)


def changed(before: S, payload: Payload, **more: Any) -> S:
    """Return the value with the fields that the payload has, and with `more`."""
    return replace(before, **_given(payload, type(before)) | more)


def _given(payload: Payload, kind: type[Struct]) -> dict[str, Any]:
    """Return the fields that the payload has."""
    fields = read(payload, _partial(kind))
    return {name: value for name in fields.__struct_fields__ if (value := getattr(fields, name)) is not UNSET}


@cache
def _partial(kind: type[Struct]) -> type[Struct]:
    """Return a struct that has the fields of this one, each of which may be absent."""
    return defstruct(f"Changed{kind.__name__}", [(f.name, f.type | UnsetType, UNSET) for f in fields(kind)])


def fields_of(payload: Payload) -> Fields:
    """Return plain JSON values, for readers of the log."""
    plain_fields: Fields = json.decode(encode(payload))
    return plain_fields


def without(value: Struct, names: Iterable[str]) -> Mapping[str, Any]:
    """Return all fields of a value but these."""
    return {name: getattr(value, name) for name in value.__struct_fields__ if name not in names}


def released_members(members: Iterable[Member]) -> list[list[Any]]:
    """Return members in the form that release 0.2.0 reads: lists without the last fields, where those have
    their defaults.

    A rank that was added to a running gang has all fields. Release 0.2.0 does not read it, because of the
    event's reader number. The usual encoding of Member, with all fields of each, can be read already; it can
    be written once no process of release 0.2.0 runs beside this one.
    """
    return [[getattr(m, name) for name in m.__struct_fields__[: _length(m)]] for m in members]


def _length(member: Member) -> int:
    if member.is_late:
        return 8
    return 5 if member.takes_part else 7
