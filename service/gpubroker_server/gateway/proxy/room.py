"""Room for what requests that wait for their model have brought: the gateway's memory, whatever the model."""

from collections import Counter
from collections.abc import Awaitable, Coroutine
from typing import Final, TypeVar

from gpubroker_server.gateway.http.problems import Problem

USUAL_BYTES: Final = 2**30

T = TypeVar("T")


class Room:
    def __init__(self, most_bytes: int = USUAL_BYTES, tenant_share: float = 1.0) -> None:
        """`tenant_share`: so much of it one tenant may have."""
        self._most_bytes = most_bytes
        self._most_each = int(most_bytes * tenant_share)
        self._held: Counter[str] = Counter()
        """Bytes, by tenant."""

    @property
    def held_bytes(self) -> int:
        return self._held.total()

    def take(self, size: int, tenant: str) -> None:
        """Until it is given back. Raises Problem, but for what is alone: nothing else could let it in."""
        held_bytes, mine = self._held.total(), self._held[tenant]
        if held_bytes and held_bytes + size > self._most_bytes:
            raise Problem(
                "model-queue-full",
                f"requests that wait for a model hold {held_bytes} bytes of the {self._most_bytes} that "
                f"they may, and this one has {size} more, of which nothing was sent; come again later, or "
                "have the operator raise triton.waiting_bytes",
            )
        if mine and mine + size > self._most_each:
            raise Problem(
                "model-queue-share",
                f'requests of tenant "{tenant}" that wait for a model hold {mine} bytes of the '
                f"{self._most_each} that they may, and this one has {size} more, of which nothing was sent; "
                "send less at once, or have the operator raise triton.waiting_bytes or triton.tenant_share",
            )
        self._held[tenant] += size

    def give_back(self, size: int, tenant: str) -> None:
        self._held[tenant] -= size
        if not self._held[tenant]:
            del self._held[tenant]

    async def hold(self, size: int, tenant: str, ready: Awaitable[T]) -> T:
        """Wait for that. Raises Problem."""
        try:
            self.take(size, tenant)
        except Problem:
            if isinstance(ready, Coroutine):
                ready.close()  # nobody will wait for it
            raise
        try:
            return await ready
        finally:
            self.give_back(size, tenant)
