"""Splits the JSON of a task into its run and the rest: tasks of a batch mostly differ in their run alone."""

from typing import Annotated, Any, NamedTuple

import msgspec
from pydantic import TypeAdapter, ValidationError

from gpubroker_server.gateway.submission.task_body import Command, Entrypoint, Function
from gpubroker_server.http.bodies import key_given_twice


class Surroundings(NamedTuple):
    """The part that is equal in tasks that differ only in their run: the text before and after it, and its
    kind."""

    before: bytes
    after: bytes
    kind: str
    entrypoint: str


MAX_DEPTH = 100
"""A run with more nesting is left to the full validation, which refuses it."""


class EntrypointCall(NamedTuple):
    """A call of an entrypoint. Nothing has checked that the entrypoint is valid and allowed."""

    entrypoint: str
    arguments: bytes
    """The arguments that `arguments_of` makes."""


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
"""The exceptions of msgspec for text that is no JSON of this form, no UTF-8, or nested too deeply."""


def split_at_run(text: bytes) -> SplitTask | None:
    """Return the parts of a task's text; None if it cannot be split here. Full validation of the task then
    says what is wrong."""
    try:
        run = bytes(_task.decode(text).run)
    except _NOT_READ:
        return None
    found = _run_in(run)
    if found is None:
        return None
    before, _, after = text.partition(run)
    return SplitTask(Surroundings(before, after, *found[:2]), found[2])


def is_split_at_run(split: SplitTask) -> bool:
    """Return True if the run was cut out, and not the same text in another place."""
    surroundings = split.surroundings
    try:
        return bytes(_task.decode(surroundings.before + _PROBE + surroundings.after).run) == _PROBE
    except _NOT_READ:
        return False


def arguments_within(text: bytes, surroundings: Surroundings) -> bytes | None:
    """Return the arguments of a task with the same surroundings and entrypoint; None for any other task, and
    for a run in which a key stands twice.

    `is_split_at_run` must hold for the surroundings: then any JSON between them is the run.
    """
    before, after, _, entrypoint = surroundings
    if not (text.startswith(before) and text.endswith(after)):
        return None
    run = text[len(before) : len(text) - len(after)]
    found = _decoded(run)
    if found is None or found.entrypoint != entrypoint or key_given_twice(run):
        return None
    return _encoded({"args": found.args, "kwargs": found.kwargs})


def _run_in(text: bytes) -> tuple[str, str, EntrypointCall | Command | Function] | None:
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
