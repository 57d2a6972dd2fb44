"""What a request under /v2 is about: which scope it needs, how it is counted, whose model it names.

Paths are matched as they came, still encoded, as Triton matches them; only a model's name is decoded. What
matches nothing is passed on as well: 404 and 405 are Triton's answers, not ours.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from urllib.parse import unquote_to_bytes

from gpubroker_server.gateway.http.identity import Scope


class Asked(StrEnum):
    """Of several servers, those that a request is for, and what is made of their answers."""

    ONE = "one"
    """That is sent there as it came, and answered as it is answered there."""
    ANY = "any"
    """All at once: well if one of them is."""
    EACH = "each"
    """All, one after the other: well if each of them is."""
    INDEX = "index"
    """All at once: what they have, together."""
    STATISTICS = "statistics"
    """All at once: what they have done, summed."""


@dataclass(frozen=True, slots=True)
class Aim:
    route: str
    """The path's template, under which it is counted."""
    scope: Scope | None = Scope.MODELS_INFER
    """None: open to everybody."""
    model: bytes = b""
    """Decoded: however the path spells it, it is one model. Empty if the request is about none."""
    is_encoded: bool = False
    """The path spells it otherwise. Triton does not decode, and knows no such model then."""
    version: bytes = b""
    """Of the model; empty if the path names none."""
    asked: Asked = Asked.ONE
    """If there are several servers."""
    shares_memory: bool = False
    """The client would have the server read its memory, which needs both on one machine."""
    takes_slot: bool = False
    """Of the model: it is to work."""
    loads: bool = False
    """A model, and its body may bring files."""
    needs_model: bool = False
    """It is work for the model, or is to bring it: it waits until that is there."""
    unloads: bool = False
    """A model: it waits until that is gone."""


_MODEL = re.compile(
    rb"/v2/models/([^/]+)(?:/versions/([0-9]+))?"
    rb"(?:/(infer|generate|generate_stream|ready|config|stats|trace/setting))?"
)
_WORK = frozenset({"infer", "generate", "generate_stream"})
_REPOSITORY = re.compile(rb"/v2/repository(?:/[^/]+)?/(?:models/([^/]+)/(load|unload)|index)")
_SHARED_MEMORY = re.compile(rb"/v2/(systemsharedmemory|cudasharedmemory)(?:/region/[^/]+)?/(\w+)")
_HEALTH = frozenset({b"/v2/health/live", b"/v2/health/ready"})
_SETTINGS = frozenset({b"/v2/logging", b"/v2/trace/setting"})
_METADATA = b"/v2"
_STATISTICS = b"/v2/models/stats"
_UNMATCHED = "/v2/unmatched"
_END_OF_PATH = re.compile(rb"[?#]")


def is_claimed(target: bytes) -> bool:
    """`/v2`, what is below it, and either with a query."""
    return target.startswith(b"/v2") and target[3:4] in (b"", b"/", b"?")


def aim_of(method: bytes, target: bytes) -> Aim:
    path = _END_OF_PATH.split(target, 1)[0]
    return _remembered(method, path) if len(path) <= MOST_REMEMBERED else _aim_of(method, path)


def _aim_of(method: bytes, path: bytes) -> Aim:
    changes = method != b"GET"
    if path in _HEALTH:
        return Aim(path.decode(), None, asked=Asked.ANY)
    if path in _SETTINGS:
        asked = Asked.EACH if changes else Asked.ONE
        return Aim(path.decode(), _reading_or_managing(changes), asked=asked)
    if path == _STATISTICS:
        return Aim(path.decode(), asked=Asked.STATISTICS)
    if path == _METADATA:
        return Aim(path.decode())
    if found := _MODEL.fullmatch(path):
        return _aim_at_model(changes, found[1], found[2] or b"", (found[3] or b"").decode())
    if found := _REPOSITORY.fullmatch(path):
        if found[1] is None:
            return Aim("/v2/repository/index", asked=Asked.INDEX)
        deed, model = found[2].decode(), unquote_to_bytes(found[1])
        route = f"/v2/repository/models/{{model}}/{deed}"
        if deed == "load":
            return Aim(route, Scope.MODELS_MANAGE, model, loads=True, needs_model=True)
        return Aim(route, Scope.MODELS_MANAGE, model, asked=Asked.EACH, unloads=True)
    if found := _SHARED_MEMORY.fullmatch(path):
        is_told = found[2] == b"status"
        route = f"/v2/{found[1].decode()}/{'status' if is_told else 'register'}"
        return Aim(route, shares_memory=not is_told)
    # Triton may know more than we do: what could change something needs the right to do so.
    return Aim(_UNMATCHED, _reading_or_managing(changes))


def _aim_at_model(changes: bool, model: bytes, version: bytes, action: str) -> Aim:
    works = changes and action in _WORK
    sets = changes and action == "trace/setting"
    asked = Asked.EACH if sets else Asked.STATISTICS if action == "stats" else Asked.ONE
    return Aim(
        "/v2/models/{model}" + (f"/{action}" if action else ""),
        _reading_or_managing(sets),
        unquote_to_bytes(model),
        version=version,
        asked=asked,
        is_encoded=b"%" in model,
        takes_slot=works,
        needs_model=works,
    )


_remembered = lru_cache(4096)(_aim_of)
MOST_REMEMBERED = 256
"""Bytes of a path: strangers may send any, and long ones would fill the memory."""


def _reading_or_managing(changes: bool) -> Scope:
    return Scope.MODELS_MANAGE if changes else Scope.MODELS_INFER
