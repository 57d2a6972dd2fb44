"""The operation that a request asks of its model server. Lanes, the choice of a server and the state machine
know requests in these terms, whatever their protocol."""

from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct

from gpubroker_server.http.identity import Scope


class FanOut(StrEnum):
    """Ways to ask several servers and to make one answer of their answers."""

    ANY = "any"
    """All servers are asked at once. The answer is positive if at least one server answers positively."""
    EACH = "each"
    """The servers are asked one after the other. The first error is the answer."""
    INDEX = "index"
    """All servers are asked at once. The answer lists the models of all."""
    STATISTICS = "statistics"
    """All servers are asked at once. Their counts and times are added."""


class Operation(Struct, frozen=True):
    name: str
    """The label in metrics and logs, without names that clients choose."""
    scope: Scope | None = Scope.MODELS_INFER
    """The scope that the token needs; None if no token is needed."""
    fan_out: FanOut | None = None
    """The way to ask several servers; None if one server gets the request as it came, and its answer is
    passed on."""
    reads: bool = False
    """True if the request changes nothing, so that it may be sent twice."""
    takes_slot: bool = False
    """True if the request makes the model work."""
    needs_model: bool = False
    """True if the request waits until the model is in memory."""
    loads: bool = False
    """True if the request loads a model."""
    unloads: bool = False
    """True if the request unloads a model. It waits until the model is gone."""

    @property
    def is_audited(self) -> bool:
        return self.loads or self.unloads


class Target(NamedTuple):
    """An operation, and the model that this request names."""

    operation: Operation
    model: bytes = b""
    """The decoded name; empty if the request names no model."""
    version: bytes = b""
    is_encoded: bool = False
    """True if the path spells the name with escapes. A server that does not decode them denies a model that
    it has: its denial proves nothing."""
