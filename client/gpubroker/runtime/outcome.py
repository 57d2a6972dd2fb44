"""Turns what user code returned or raised into an outcome that can travel."""

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from gpubroker.runtime.carrying import faulty_part, is_not_json, is_not_pickled
from gpubroker.runtime.messages import MESSAGE_CHARS, TRACEBACK_BYTES, RunOutcome, failed
from gpubroker.runtime.objects import pickled_buffers
from gpubroker.runtime.task import Stopped

_OURS = str(Path(__file__).parent)


Store = Callable[[bytes], str]
"""A function that makes an object of a result and returns its id. It raises NotStored or Stopped."""


class NotStored(Exception):
    """A large result cannot become an object; the text says why."""


def succeeded(value: Any, result_format: str, limit_bytes: int, store: Store) -> RunOutcome:
    """Return the outcome with the value in its wire form, or a failure that says why it cannot be written. A
    value larger than the limit becomes an object."""
    try:
        data = cloudpickle.dumps(value) if result_format == "cloudpickle" else _as_json(value)
        if len(data) <= limit_bytes:
            return RunOutcome("succeeded", result=data, result_format=result_format)
        if result_format == "cloudpickle":
            data = b"".join(pickled_buffers(value))
    except Exception as fault:
        return failed("unserializable_result", _cannot_carry(value, result_format, fault))
    try:
        named = {"object": store(data)}
    except Stopped:
        return RunOutcome("stopped")
    except NotStored as fault:
        return failed(
            "result_too_large",
            f"the result takes {len(data) / 2**20:.1f} MiB, more than {limit_bytes / 2**20:.1f} MiB, and "
            f"cannot become an object: {fault}",
        )
    return RunOutcome("succeeded", result=_as_json(named), result_format="object")


def raised(fault: BaseException) -> RunOutcome:
    """Return the outcome for an exception of user code: `Stopped` ends the run as stopped, any other
    exception as failed."""
    if isinstance(fault, Stopped):
        return RunOutcome("stopped")
    return failed("exception", describe(fault), trace_of(fault))


def describe(fault: BaseException) -> str:
    """Return `ValueError: text`, even if the exception's own `__str__` raises."""
    name = type(fault).__qualname__
    try:
        text = str(fault)
        return (f"{name}: {text}" if text else name)[:MESSAGE_CHARS]
    except BaseException:
        return f"{name}: (its message cannot be read)"[:MESSAGE_CHARS]


def trace_of(fault: BaseException) -> str:
    """Return the traceback without the frames of this package; a long traceback is cut in its middle."""
    frames = fault.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_OURS):
        frames = frames.tb_next
    try:
        text = "".join(traceback.format_exception(type(fault), fault, frames))
    except BaseException:
        return describe(fault)
    data = text.encode(errors="replace")
    if len(data) <= TRACEBACK_BYTES:
        return data.decode()
    half = TRACEBACK_BYTES // 2 - 32
    return data[:half].decode(errors="ignore") + "\n  [...]\n" + data[-half:].decode(errors="ignore")


def _as_json(value: Any) -> bytes:
    # JSON has no NaN and no infinity: other languages refuse the whole document.
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()


def _cannot_carry(value: Any, result_format: str, fault: Exception) -> str:
    part = faulty_part(
        [("the result", value)], is_not_pickled if result_format == "cloudpickle" else is_not_json
    )
    inside = f", because of {part}" if part not in (None, "the result") else ""
    problem = (
        f"a result of type {type(value).__qualname__} cannot be carried as {result_format}{inside}: {fault}"
    )
    if result_format == "cloudpickle":
        return f"{problem}; return plain data instead of open files, locks or connections"[:MESSAGE_CHARS]
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return (
        f"{problem}; return dicts with text keys, lists, text, finite numbers, booleans or None, or submit "
        f"with result_format=cloudpickle, which the SDK opens under Python {python}"
    )[:MESSAGE_CHARS]
