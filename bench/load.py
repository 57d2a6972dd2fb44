"""A load generator of its own process: many keep-alive connections, each sends again once it was answered.

Speaks just enough HTTP/1.1 to keep the server the busy side. `Load` starts it and asks it for measurements.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self, cast

import uvloop

from bench.companion import Companion, answer_commands


@dataclass(frozen=True)
class Target:
    """One request, as it is sent over and over."""

    port: int
    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str = ""

    def encoded(self) -> bytes:
        body = self.body.encode()
        headers = {"Host": f"127.0.0.1:{self.port}", **self.headers, "Content-Length": str(len(body))}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"{self.method} {self.path} HTTP/1.1\r\n{head}\r\n".encode() + body


@dataclass(frozen=True)
class Measured:
    seconds: float
    statuses: dict[str, int]
    latencies_ms: list[float]

    @property
    def per_second(self) -> float:
        return len(self.latencies_ms) / self.seconds

    def must_all_be(self, status: int) -> Self:
        """Figures of refused requests are worthless. Raises RuntimeError."""
        if set(self.statuses) != {str(status)}:
            raise RuntimeError(f"every answer had to be {status}; got {self.statuses}")
        return self


class Load(Companion):
    module = "bench.load"

    def measure(self, target: Target, *, connections: int, seconds: float) -> Measured:
        """Send for so many seconds, then let what is under way be answered; both count."""
        return Measured(**self.ask(target=asdict(target), connections=connections, seconds=seconds))


class _Connection(asyncio.Protocol):
    """Sends the request, waits for the whole answer, and sends again until the deadline."""

    def __init__(self, request: bytes) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.latencies_ms: list[float] = []
        self.statuses: Counter[str] = Counter()
        self._request = request
        self._deadline = 0.0
        self._received = bytearray()
        self._expected = 0
        self._sent_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one, but does not inherit from it

    def begin(self, deadline: float) -> None:
        self._deadline = deadline
        self._send()

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._expected:
            self._read_head()
        if self._expected and len(self._received) >= self._expected:
            self._answered()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(error or ConnectionError("the server closed a keep-alive connection"))

    def close(self) -> None:
        self._transport.close()

    def _send(self) -> None:
        self._sent_at = time.perf_counter()
        self._transport.write(self._request)

    def _read_head(self) -> None:
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._received[: end + 2]).lower()
        self.statuses[head[9:12].decode()] += 1
        _, named, rest = head.partition(b"\r\ncontent-length:")
        length = int(rest[: rest.index(b"\r\n")]) if named else 0
        self._expected = end + 4 + length

    def _answered(self) -> None:
        now = time.perf_counter()
        self.latencies_ms.append(1000 * (now - self._sent_at))
        self._received.clear()
        self._expected = 0
        if now < self._deadline:
            self._send()
        else:
            self.ended.set_result(None)


async def _measure(target: Target, connections: int, seconds: float) -> Measured:
    loop = asyncio.get_running_loop()
    request = target.encoded()
    lines = [
        (await loop.create_connection(lambda: _Connection(request), "127.0.0.1", target.port))[1]
        for _ in range(connections)
    ]
    began = time.perf_counter()
    for line in lines:
        line.begin(began + seconds)
    await asyncio.gather(*(line.ended for line in lines))
    took = time.perf_counter() - began
    for line in lines:
        line.close()
    statuses = sum((line.statuses for line in lines), Counter[str]())
    return Measured(took, dict(statuses), [round(ms, 3) for line in lines for ms in line.latencies_ms])


def carry_out(target: dict[str, Any], connections: int, seconds: float) -> dict[str, Any]:
    return asdict(uvloop.run(_measure(Target(**target), connections, seconds)))


if __name__ == "__main__":
    answer_commands(carry_out)
