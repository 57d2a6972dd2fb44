"""Splits the JSON of a task into its run and the rest, because tasks of a batch mostly differ only in their
run."""

from typing import Annotated, Any, NamedTuple

import msgspec
from pydantic import TypeAdapter, ValidationError

from gpubroker_server.gateway.submission.task_body import Command, Entrypoint, Function
from gpubroker_server.http.bodies import key_given_twice


class Surroundings(NamedTuple):
    """What tasks that differ only in their run have in common: the text before and after the run, the kind of
    the run, and its entrypoint."""

    before: bytes
    after: bytes
    kind: str
    entrypoint: str


MAX_DEPTH = 100
"""The largest number of brackets in a run that is split here. Full validation handles other runs."""


class EntrypointCall(NamedTuple):
    """A call of an entrypoint. Nothing has checked that the entrypoint is valid and allowed."""

    entrypoint: str
    arguments: bytes
    """The arguments, in the form that `arguments_of` returns."""


class SplitTask(NamedTuple):
    surroundings: Surroundings
    run: EntrypointCall | Command | Function


class _Task(msgspec.Struct):
    run: msgspec.Raw


class _Call(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of `Entrypoint`, without the pattern of its name."""

    entrypoint: str
    args: Annotated[list[Any], msgspec.Meta(max_length=10_000)] = []
    kwargs: dict[str, Any] = {}


_task = msgspec.json.Decoder(_Task)
_decode_call = msgspec.json.Decoder(_Call).decode
_encoded = msgspec.json.Encoder().encode
_validate = {kind.tag: TypeAdapter(kind).validator.validate_json for kind in (Command, Function)}
_PROBE = b'{"probe":0}'
_NOT_READ = msgspec.MsgspecError, UnicodeDecodeError, RecursionError
"""The exceptions of msgspec for text that is not JSON of this form, is not UTF-8, or is nested too deeply."""


def split_at_run(text: bytes) -> SplitTask | None:
    """Return the parts of a task's text; None if the text cannot be split. Full validation then reports what
    is wrong with it."""
    try:
        run = bytes(_task.decode(text).run)
    except _NOT_READ:
        return None
    parsed = _run_in(run)
    if parsed is None:
        return None
    before, _, after = text.partition(run)
    return SplitTask(Surroundings(before, after, *parsed[:2]), parsed[2])


def is_split_at_run(split: SplitTask) -> bool:
    """Return True if the text was split at its run, and not at an equal text in another place."""
    surroundings = split.surroundings
    try:
        return bytes(_task.decode(surroundings.before + _PROBE + surroundings.after).run) == _PROBE
    except _NOT_READ:
        return False


def arguments_within(text: bytes, surroundings: Surroundings) -> bytes | None:
    """Return the arguments of a task with these surroundings and their entrypoint; None for any other task,
    and for a run that has a key twice.

    `is_split_at_run` must be true of the surroundings: any JSON between them is then the run.
    """
    before, after, _, entrypoint = surroundings
    if not (text.startswith(before) and text.endswith(after)):
        return None
    run = text[len(before) : len(text) - len(after)]
    call = _decoded(run)
    if call is None or call.entrypoint != entrypoint or key_given_twice(run):
        return None
    return _encoded({"args": call.args, "kwargs": call.kwargs})


def _run_in(text: bytes) -> tuple[str, str, EntrypointCall | Command | Function] | None:
    """Return the kind of a run, its entrypoint, and the run; None if the text is not a valid run."""
    call = _call_in(text)
    return _other_run_in(text) if call is None else (Entrypoint.tag, call.entrypoint, call)


def _call_in(text: bytes) -> EntrypointCall | None:
    call = _decoded(text)
    if call is None:
        return None
    return EntrypointCall(call.entrypoint, _encoded({"args": call.args, "kwargs": call.kwargs}))


def _decoded(text: bytes) -> _Call | None:
    if len(text) > MAX_DEPTH and text.count(b"[") + text.count(b"{") > MAX_DEPTH:
        return None
    try:
        return _decode_call(text)
    except _NOT_READ:
        return None


def _other_run_in(text: bytes) -> tuple[str, str, Command | Function] | None:
    for kind, validate in _validate.items():
        try:
            return kind, "", validate(text)
        except ValidationError:
            continue
    return None
