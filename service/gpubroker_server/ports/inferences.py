"""The port of the leader to the models that answer queued inferences."""

from collections.abc import AsyncIterator, Callable
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from gpubroker_server.core.serving.batching import InferenceRequest, InferenceResponse


class InferenceFault(StrEnum):
    UNREACHABLE = "unreachable"
    """Nothing was sent, or the server takes nothing now: send it again later."""
    NOT_THERE = "not_there"
    """The server does not have the model now."""
    REFUSED = "refused"
    """The model does not take such a request; the same one would be refused again."""
    FAILED = "failed"
    """The model, or its server, failed."""
    DEAD = "dead"
    """The model's process is gone, and its server has not noticed. The request may have ended it."""
    BROKEN = "broken"
    """The request was sent, and no answer came: it may have been carried out."""


class InferenceFailed(Exception):
    """A request without a response; the text has the server's words."""

    def __init__(self, fault: InferenceFault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


class Batching(Struct, frozen=True):
    """Tells if several requests may be sent to a model as one."""

    most_rows: int = 1
    """The most rows at once, as its configuration says; 1 if it takes no batches, or keeps state between
    requests."""


ReadObject = Callable[[str, int], AsyncIterator[bytes]]
"""Yields the bytes of an object of that digest and size, in parts. Raises InferenceFailed if it is gone."""


class InferenceClient(Protocol):
    """Sends inferences to one model server. Each call raises InferenceFailed, and may be cancelled."""

    @property
    def name(self) -> str: ...

    async def infer(
        self, model: str, request: InferenceRequest, read: ReadObject | None = None
    ) -> InferenceResponse:
        """`read` gives the data of the tensors that name objects. Raises InferenceFailed, also what `read`
        raises."""

    async def batching(self, model: str, version: str) -> Batching: ...

    async def close(self) -> None: ...
