"""The buffered body of a request, and the bound on the memory that all waiting bodies take."""

from collections import Counter
from typing import Final

from gpubroker_server.http.problems import Problem

BUFFER_BYTES: Final = 1024 * 1024
"""The most bytes of a body that are buffered while its request waits, while it may be sent again, or until
its body is complete if it must be complete before it is sent. A client with a longer body is told to hold the
rest back."""


class BodyBuffer:
    """The pieces of one body that have come. They are kept without a copy."""

    __slots__ = ("_charged", "_tenant", "_waiting", "pieces", "size")

    def __init__(self, waiting: "WaitingBytes") -> None:
        self.pieces: list[bytes] = []
        self.size = 0
        self._waiting = waiting
        self._charged = 0
        """Bytes of this body that count as waiting."""
        self._tenant = ""

    def add(self, data: bytes) -> None:
        self.pieces.append(data)
        self.size += len(data)

    def charge(self, size: int, tenant: str) -> None:
        """Count `size` more bytes as waiting. Raises Problem if the bodies of all waiting requests have too
        many bytes."""
        self._waiting.take(size, tenant)
        self._tenant = tenant
        self._charged += size

    def release(self) -> None:
        """Stop counting the body: the request no longer waits."""
        if self._charged:
            self._waiting.give_back(self._charged, self._tenant)
            self._charged = 0

    def clear(self) -> None:
        self.release()
        self.pieces.clear()
        self.size = 0


class WaitingBytes:
    def __init__(self, most_bytes: int, tenant_share: float) -> None:
        """`tenant_share` is the part of `most_bytes` that one tenant may have, between 0 and 1."""
        self._most_bytes = most_bytes
        self._most_each = int(most_bytes * tenant_share)
        self._held: Counter[str] = Counter()
        """Tenant -> its waiting bytes. A tenant without any has no entry."""

    def take(self, size: int, tenant: str) -> None:
        """Count `size` bytes for the tenant until `give_back`. Raises Problem if the limit is reached. A
        request that is alone is always accepted: a body larger than the limit could otherwise never wait."""
        held_bytes, tenant_bytes = self._held.total(), self._held[tenant]
        if held_bytes and held_bytes + size > self._most_bytes:
            raise Problem(
                "model-queue-full",
                f"requests that wait for a model hold {held_bytes} bytes of the {self._most_bytes} that "
                f"they may, and this one has {size} more, of which nothing was sent; send it again later, or "
                "have the operator raise triton.waiting_bytes",
            )
        if tenant_bytes and tenant_bytes + size > self._most_each:
            raise Problem(
                "model-queue-share",
                f'requests of tenant "{tenant}" that wait for a model hold {tenant_bytes} bytes of the '
                f"{self._most_each} that they may, and this one has {size} more, of which nothing was sent; "
                "send less at once, or have the operator raise triton.waiting_bytes or triton.tenant_share",
            )
        self._held[tenant] += size

    def give_back(self, size: int, tenant: str) -> None:
        self._held[tenant] -= size
        if not self._held[tenant]:
            del self._held[tenant]
