"""The port of the leader to the models that answer queued inferences."""

from collections.abc import AsyncIterator, Callable
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from gpubroker_server.core.serving.batching import InferenceRequest, InferenceResponse


class InferenceFault(StrEnum):
    UNREACHABLE = "unreachable"
    """Nothing was sent, or the server takes no requests now. The request may be sent again later."""
    NOT_THERE = "not_there"
    """The server does not have the model now."""
    REFUSED = "refused"
    """The model does not take such a request, and would refuse it again."""
    FAILED = "failed"
    """The model, or its server, failed."""
    DEAD = "dead"
    """The model's process is gone, and its server has not noticed. The request may have ended it."""
    BROKEN = "broken"
    """The request was sent, and no answer came: it may have been carried out."""


class InferenceFailed(Exception):
    """Raised for a request without a response. The text contains the server's message."""

    def __init__(self, fault: InferenceFault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


class Batching(Struct, frozen=True):
    """Says whether several requests may be sent to a model as one."""

    most_rows: int = 1
    """The most rows of one request, as the model's configuration says; 1 if the model takes no batches, or
    keeps state between requests."""


ReadObject = Callable[[str, int], AsyncIterator[bytes]]
"""Function that yields the bytes of the object with this digest and size, in parts. The size is in bytes.
Raises InferenceFailed if the object is gone."""


class InferenceClient(Protocol):
    """Sends inferences to one model server. Each call raises InferenceFailed, and may be cancelled."""

    @property
    def name(self) -> str: ...

    async def infer(
        self, model: str, request: InferenceRequest, read: ReadObject | None = None
    ) -> InferenceResponse:
        """Send a request, and return its response. `read` yields the data of tensors that name objects.
        Raises InferenceFailed, and also what `read` raises."""

    async def batching(self, model: str, version: str) -> Batching: ...

    async def close(self) -> None: ...
