"""What a request asks of its model server, whatever protocol it came by: the terms in which lanes, the choice
of a server and the state machine see it."""

from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct

from gpubroker_server.http.identity import Scope


class FanOut(StrEnum):
    """How several servers are asked, and what is made of their answers."""

    ANY = "any"
    """All at once: the answer is positive if one of them is."""
    EACH = "each"
    """All, one after the other: the first error is the answer."""
    INDEX = "index"
    """All at once: the answer lists the models of all."""
    STATISTICS = "statistics"
    """All at once: counts and times are added."""


class Operation(Struct, frozen=True):
    name: str
    """The label in metrics and logs, without names that clients choose."""
    scope: Scope | None = Scope.MODELS_INFER
    """None: no token is needed."""
    fan_out: FanOut | None = None
    """None: one server gets the request as it came, and its answer is passed on."""
    reads: bool = False
    """It changes nothing, so that it may be sent twice."""
    takes_slot: bool = False
    """It makes the model work."""
    needs_model: bool = False
    """It waits until the model is in memory."""
    loads: bool = False
    """It loads a model."""
    unloads: bool = False
    """It unloads a model, and waits until the model is gone."""

    @property
    def is_audited(self) -> bool:
        return self.loads or self.unloads


class Target(NamedTuple):
    """An operation, and the model that this request names."""

    operation: Operation
    model: bytes = b""
    """Decoded. Empty if the request names none."""
    version: bytes = b""
    is_encoded: bool = False
    """The path spells the name with escapes. A server that does not decode them denies a model that it has:
    its denial proves nothing."""
