"""A load generator of its own process: many keep-alive connections, each sends again once it was answered.

`Load` starts it and asks it for measurements.
"""

import asyncio
import time
from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any, Self

import uvloop

from bench.companion import Companion, answer_commands
from bench.http import Connection, Target


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

    def measure(self, *targets: Target, connections: int, seconds: float) -> Measured:
        """Send for so many seconds, then let what is under way be answered; both count. Connections go to
        the targets in turn."""
        sent = [asdict(target) for target in targets]
        return Measured(**self.ask(targets=sent, connections=connections, seconds=seconds))


class _Connection(Connection):
    """Sends the request, waits for the whole answer, and sends again until the deadline."""

    def __init__(self, request: bytes) -> None:
        super().__init__()
        self.latencies_ms: list[float] = []
        self.statuses: Counter[str] = Counter()
        self._request = request
        self._deadline = 0.0

    def begin(self, deadline: float) -> None:
        self._deadline = deadline
        self.send(self._request)

    def on_answer(self, status: str, ms: float, /) -> None:
        self.statuses[status] += 1
        self.latencies_ms.append(ms)
        if time.perf_counter() < self._deadline:
            self.send(self._request)
        else:
            self.ended.set_result(None)


async def _measure(targets: list[Target], connections: int, seconds: float) -> Measured:
    loop = asyncio.get_running_loop()
    requests = [(target.port, target.encoded()) for target in targets]
    lines: list[_Connection] = []
    for port, request in islice(cycle(requests), connections):
        lines.append((await loop.create_connection(partial(_Connection, request), "127.0.0.1", port))[1])
    began = time.perf_counter()
    for line in lines:
        line.begin(began + seconds)
    await asyncio.gather(*(line.ended for line in lines))
    took = time.perf_counter() - began
    for line in lines:
        line.close()
    statuses = sum((line.statuses for line in lines), Counter[str]())
    return Measured(took, dict(statuses), [round(ms, 3) for line in lines for ms in line.latencies_ms])


def carry_out(targets: list[dict[str, Any]], connections: int, seconds: float) -> dict[str, Any]:
    return asdict(uvloop.run(_measure([Target(**target) for target in targets], connections, seconds)))


if __name__ == "__main__":
    answer_commands(carry_out)
