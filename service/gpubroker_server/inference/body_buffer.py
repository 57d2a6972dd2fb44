"""The buffered body of a request, and how much memory all that wait may take."""

from collections import Counter
from typing import Final

from gpubroker_server.http.problems import Problem

BUFFER_BYTES: Final = 1024 * 1024
"""How much of a body is buffered while its request waits, or may be sent again, or must be complete before it
is sent. A client with a longer body waits with the rest."""


class BodyBuffer:
    """What has come of one body, as it came: nothing is copied."""

    __slots__ = ("_charged", "_tenant", "_waiting", "pieces", "size")

    def __init__(self, waiting: "WaitingBytes") -> None:
        self.pieces: list[bytes] = []
        self.size = 0
        self._waiting = waiting
        self._charged = 0
        """Bytes that count as waiting."""
        self._tenant = ""

    def add(self, data: bytes) -> None:
        self.pieces.append(data)
        self.size += len(data)

    def charge(self, size: int, tenant: str) -> None:
        """Count so many bytes as waiting. Raises Problem if that is too much."""
        self._waiting.take(size, tenant)
        self._tenant = tenant
        self._charged += size

    def release(self) -> None:
        """The request no longer waits."""
        if self._charged:
            self._waiting.give_back(self._charged, self._tenant)
            self._charged = 0

    def clear(self) -> None:
        self.release()
        self.pieces.clear()
        self.size = 0


class WaitingBytes:
    def __init__(self, most_bytes: int, tenant_share: float) -> None:
        """`tenant_share`: the part of it that one tenant may have."""
        self._most_bytes = most_bytes
        self._most_each = int(most_bytes * tenant_share)
        self._held: Counter[str] = Counter()
        """Bytes, by tenant."""

    def take(self, size: int, tenant: str) -> None:
        """Count `size` bytes for the tenant until `give_back`. Raises Problem if the limit is reached, except
        for a request that is alone: a body larger than the limit could otherwise never wait."""
        held_bytes, mine = self._held.total(), self._held[tenant]
        if held_bytes and held_bytes + size > self._most_bytes:
            raise Problem(
                "model-queue-full",
                f"requests that wait for a model hold {held_bytes} bytes of the {self._most_bytes} that "
                f"they may, and this one has {size} more, of which nothing was sent; send it again later, or "
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
