"""The door of the leader to what servers of models answer. One call, one answer."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from gpubroker_server.core.serving.batching import Answer, Question


class AskFault(StrEnum):
    UNREACHABLE = "unreachable"
    """Nothing was sent, or the server takes nothing just now: to be asked again later."""
    NOT_THERE = "not_there"
    """It does not have the model (any more), or not yet."""
    REFUSED = "refused"
    """The request is none that the model takes; the same one would be refused again."""
    FAILED = "failed"
    """The model, or its server, failed at it."""
    DEAD = "dead"
    """The process of the model is gone, and its server has not missed it. The request may have ended it."""
    BROKEN = "broken"
    """It was sent, and no answer came: nobody knows how far it got."""


class AskRefused(Exception):
    """A question that was not answered; the text has the server's words."""

    def __init__(self, fault: AskFault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class Batching:
    """Whether several questions may be put to a model as one."""

    most_rows: int = 1
    """So many rows at once, as its configuration says; 1: it takes no batches, or keeps what they are about
    from one request to the next."""


class ModelAsker(Protocol):
    """One server of models. Each call raises AskRefused. Whoever waits in it may be cancelled."""

    @property
    def name(self) -> str: ...

    async def ask(self, model: str, question: Question) -> Answer: ...

    async def batching(self, model: str, version: str) -> Batching: ...

    async def close(self) -> None: ...
