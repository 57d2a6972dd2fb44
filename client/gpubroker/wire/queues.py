"""Queues of tenants and of work streams that are paused."""

from typing import Annotated

from msgspec import Meta

from gpubroker.wire.answered import Answered, Time


class Paused(Answered, frozen=True):
    """A queue that starts nothing. What runs goes on."""

    queue: Annotated[str, Meta(description="`tenant:NAME` or `stream:NAME`.")]
    since: Time
    by: Annotated[str, Meta(description="The name of the token that paused it.")]
    reason: str
    waiting: Annotated[
        int, Meta(description="The number of tasks that nothing but this pause keeps from being planned.")
    ]


class Queue(Answered, frozen=True):
    """The queue of a tenant or of a work stream."""

    queue: Annotated[str, Meta(description="`tenant:NAME` or `stream:NAME`.")]
    paused: Annotated[Paused | None, Meta(description="The pause; null if the queue is not paused.")]
