"""A task's text apart from its run's: tasks of a batch differ mostly in that, and share all other work."""

from typing import Annotated, Any, NamedTuple

import msgspec
from pydantic import TypeAdapter, ValidationError

from gpubroker_server.gateway.submission.task_body import Command, Entrypoint, Function


class Around(NamedTuple):
    """What tasks that are alike have in common, as they were written."""

    before: bytes
    """The text before the run."""
    behind: bytes
    kind: str
    """Of run."""
    entrypoint: str


DEEPEST = 100
"""What is nested more deeply is left to the reader that says so."""


class EntrypointCall(NamedTuple):
    """Read without asking whether there may be such an entrypoint."""

    entrypoint: str
    arguments: bytes
    """As `arguments_of` makes them."""


class Cut(NamedTuple):
    around: Around
    run: EntrypointCall | Command | Function


class _Task(msgspec.Struct):
    run: msgspec.Raw


class _Call(msgspec.Struct, forbid_unknown_fields=True):
    """The same as `Entrypoint`, but for what its name must look like."""

    entrypoint: str
    args: Annotated[list[Any], msgspec.Meta(max_length=10_000)] = []
    kwargs: dict[str, Any] = {}


_task = msgspec.json.Decoder(_Task)
_call = msgspec.json.Decoder(_Call)
_encoded = msgspec.json.Encoder().encode
_validate = {kind.tag: TypeAdapter(kind).validator.validate_json for kind in (Command, Function)}
_PROBE = b'{"probe":0}'


def cut_at_run(text: bytes) -> Cut | None:
    """None for what is not read here; what is wrong with it is told by who reads all of the task."""
    try:
        run = bytes(_task.decode(text).run)
    except msgspec.MsgspecError:
        return None
    found = _run_in(run)
    if found is None:
        return None
    before, _, behind = text.partition(run)
    return Cut(Around(before, behind, *found[:2]), found[2])


def is_cut_at_run(cut: Cut) -> bool:
    """Whether it is the run that stands between both texts, and not the same words somewhere else."""
    around = cut.around
    try:
        return bytes(_task.decode(around.before + _PROBE + around.behind).run) == _PROBE
    except msgspec.MsgspecError:
        return False


def call_within(text: bytes, around: Around) -> EntrypointCall | None:
    """The run of a task, if it is the same call and has the same around it, of which `is_cut_at_run` holds:
    then whatever JSON stands in between is its run."""
    before, behind, _, entrypoint = around
    if not (text.startswith(before) and text.endswith(behind)):
        return None
    found = _call_in(text[len(before) : len(text) - len(behind)])
    return None if found is None or found.entrypoint != entrypoint else found


def _run_in(text: bytes) -> tuple[str, str, EntrypointCall | Command | Function] | None:
    call = _call_in(text)
    return _other_run_in(text) if call is None else (Entrypoint.tag, call.entrypoint, call)


def _call_in(text: bytes) -> EntrypointCall | None:
    if text.count(b"[") + text.count(b"{") > DEEPEST:
        return None
    try:
        call = _call.decode(text)
    except msgspec.MsgspecError:
        return None
    return EntrypointCall(call.entrypoint, _encoded({"args": call.args, "kwargs": call.kwargs}))


def _other_run_in(text: bytes) -> tuple[str, str, Command | Function] | None:
    for kind, validate in _validate.items():
        try:
            return kind, "", validate(text)
        except ValidationError:
            continue
    return None
