"""Room for what requests that wait for their model have brought: the gateway's memory, whatever the model."""

from collections.abc import Awaitable, Coroutine
from typing import Final, TypeVar

from service.gateway.problems import Problem

USUAL_BYTES: Final = 2**30

T = TypeVar("T")


class Room:
    def __init__(self, most_bytes: int = USUAL_BYTES) -> None:
        self._most_bytes = most_bytes
        self.held_bytes = 0

    def take(self, size: int) -> None:
        """Until it is given back. Raises Problem, but for what is alone: nothing else could let it in."""
        if self.held_bytes and self.held_bytes + size > self._most_bytes:
            raise Problem(
                "model-queue-full",
                f"requests that wait for a model hold {self.held_bytes} bytes of the {self._most_bytes} that "
                f"they may, and this one has {size} more, of which nothing was sent; come again later, or "
                "have the operator raise triton.waiting_bytes",
            )
        self.held_bytes += size

    def give_back(self, size: int) -> None:
        self.held_bytes -= size

    async def hold(self, size: int, ready: Awaitable[T]) -> T:
        """Wait for that. Raises Problem."""
        try:
            self.take(size)
        except Problem:
            if isinstance(ready, Coroutine):
                ready.close()  # nobody will wait for it
            raise
        try:
            return await ready
        finally:
            self.give_back(size)
