"""What is too large for the body of a submit is sent as objects: arguments, and functions that refer to large
data. The function gets the values."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from gpubroker.runtime.objects import JSON_MARK, ObjectRef, named_object, pickled_buffers
from gpubroker.tasks.object_api import upload_call
from gpubroker.tasks.submission import (
    MOST_BODY_BYTES,
    SubmitOptions,
    Target,
    is_to_upload,
    pickled_function,
    submission_body,
    with_defaults,
)
from gpubroker.tasks.uploading import with_stored
from gpubroker.transport.exchange import Answer, Call, Steps

LEAST_BYTES = 64 * 1024
"""Smaller arguments stay in the body: an object of their own would cost more."""

Send = Callable[[Call], Steps[Answer]]


def fitting_body(send: Send, target: Target, args: Sequence[Any], options: SubmitOptions) -> Steps[bytes]:
    """Return the JSON of a submit; if it is too long, large arguments are replaced by objects. The directory
    and the environment's project that `options` name are sent. Raises as `submission_body` does, and Refused
    if the service takes no more objects."""
    if is_to_upload(options, target):
        options = yield from with_stored(send, target, options)
    body = submission_body(target, args, options)
    if len(body) <= MOST_BODY_BYTES or not (callable(target) or isinstance(target, str)):
        return body
    given = options.get("kwargs") or {}
    small_args, small_kwargs = yield from small_arguments(send, args, given, pickles=callable(target))
    if small_kwargs:
        options = cast("SubmitOptions", {**options, "kwargs": small_kwargs})
    body = submission_body(target, small_args, options)
    if len(body) <= MOST_BODY_BYTES or not callable(target):
        return body
    stored = yield from _stored(send, pickled_function(target, options.get("modules")))
    kwargs = {**small_kwargs, FUNCTION: stored}
    return submission_body(caller(), small_args, caller_options(target, options, kwargs))


FUNCTION = "gpubroker_function"
"""The keyword argument with which a stored function comes to the function that calls it."""


def caller() -> Callable[..., Any]:
    """Return a function that calls the function it gets as the keyword argument `FUNCTION` with its other
    arguments. It is pickled with its code, so that nodes of an earlier release can run it."""
    return lambda *args, gpubroker_function, **kwargs: gpubroker_function(*args, **kwargs)


def caller_options(target: Target, options: SubmitOptions, kwargs: Mapping[str, Any]) -> SubmitOptions:
    """Return the options of a task that runs `caller` in place of `target`, with these keyword arguments."""
    stated = with_defaults(target, options)
    kept: Mapping[str, Any] = {name: value for name, value in stated.items() if name != "modules"}
    return cast("SubmitOptions", {**kept, "kwargs": kwargs})


def small_arguments(
    send: Send, args: Sequence[Any], kwargs: Mapping[str, Any], *, pickles: bool
) -> Steps[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the arguments of a call, with large ones replaced by objects."""
    small_args: list[Any] = []
    for value in args:
        small_args.append((yield from _or_object(send, value, pickles=pickles)))
    small_kwargs: dict[str, Any] = {}
    for name, value in kwargs.items():
        small_kwargs[name] = yield from _or_object(send, value, pickles=pickles)
    return tuple(small_args), small_kwargs


def small_items(send: Send, target: Target, items: Sequence[Any]) -> Steps[Sequence[Any]]:
    """Return the items of an array, with large ones replaced by objects."""
    small = []
    for item in items:
        small.append((yield from _or_object(send, item, pickles=callable(target))))
    return small


def without_arguments(options: SubmitOptions) -> SubmitOptions:
    kept: Mapping[str, Any] = {name: value for name, value in options.items() if name != "kwargs"}
    return cast("SubmitOptions", kept)


def _or_object(send: Send, value: Any, *, pickles: bool) -> Steps[Any]:
    if isinstance(value, ObjectRef) or named_object(value) is not None:
        return value
    data = _packed(value, pickles=pickles)
    if len(data) <= LEAST_BYTES:
        return value
    return (yield from _stored(send, data))


def _stored(send: Send, data: bytes) -> Steps[ObjectRef]:
    stored = (yield from send(upload_call(data))).json()
    return ObjectRef(stored["id"], stored["size_bytes"])


def _packed(value: Any, *, pickles: bool) -> bytes:
    """Return the bytes of an object from which each run gets a copy of its own, which it may change."""
    if pickles:
        return b"".join(pickled_buffers(value, beside=False))
    return JSON_MARK + json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
