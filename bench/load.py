"""Load generators, each in a process of its own, over keep-alive connections.

`ClosedLoop`: every connection sends again once it has its answer. `OpenLoop`: requests are sent at random
moments that do not wait for answers, as those of many independent clients.
"""

import asyncio
import random
import time
from collections import Counter
from functools import partial
from itertools import cycle, islice
from typing import Any, Self

import uvloop
from msgspec import Struct, to_builtins

from bench.child_process import ChildProcess, answer_commands
from bench.http import Connection, Target

OPEN_CONNECTIONS = 16
"""The number of connections to each target of an open loop. A request waits if all of them wait for an
answer."""
SEED = 20261122


class Measured(Struct, frozen=True):
    seconds: float
    statuses: dict[str, int]
    latencies_ms: list[float]

    @property
    def per_second(self) -> float:
        return len(self.latencies_ms) / self.seconds

    def must_all_be(self, status: int) -> Self:
        """Check that all answers had this status. Raises RuntimeError otherwise, since the figures are
        worthless then."""
        _check(self.statuses, status)
        return self


def _check(statuses: dict[str, int], status: int) -> None:
    if set(statuses) != {str(status)}:
        raise RuntimeError(f"every answer had to be {status}; got {statuses}")


class ClosedLoop(ChildProcess):
    module = "bench.load"

    def measure(self, *targets: Target, connections: int, seconds: float) -> Measured:
        """Send requests for `seconds`, then wait for the last answers; both count. Connections are divided
        among the targets in turn."""
        sent = [to_builtins(target) for target in targets]
        return Measured(**self.ask(targets=sent, connections=connections, seconds=seconds))


class OpenLoop(ChildProcess):
    module = "bench.load"

    def send(self, targets: list[Target], *, per_second: float, seconds: float, status: int) -> int:
        """Send to the targets in turn, `per_second` on average (Poisson), and return the number of requests.
        Raises RuntimeError if any answer has another status."""
        sent = [to_builtins(target) for target in targets]
        statuses = self.ask(targets=sent, per_second=per_second, seconds=seconds)["statuses"]
        _check(statuses, status)
        return sum(statuses.values())


class _ClosedConnection(Connection):
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
    lines: list[_ClosedConnection] = []
    for port, request in islice(cycle(requests), connections):
        connection = partial(_ClosedConnection, request)
        lines.append((await loop.create_connection(connection, "127.0.0.1", port))[1])
    began = time.perf_counter()
    for line in lines:
        line.begin(began + seconds)
    await asyncio.gather(*(line.ended for line in lines))
    took = time.perf_counter() - began
    for line in lines:
        line.close()
    statuses = sum((line.statuses for line in lines), Counter[str]())
    return Measured(took, dict(statuses), [round(ms, 3) for line in lines for ms in line.latencies_ms])


class _OpenConnection(Connection):
    """A connection that is in the queue of idle connections unless it waits for an answer."""

    def __init__(self, idle: "asyncio.Queue[_OpenConnection]", statuses: Counter[str]) -> None:
        super().__init__()
        self._idle = idle
        self._statuses = statuses

    def on_answer(self, status: str, _ms: float, /) -> None:
        self._statuses[status] += 1
        self._idle.put_nowait(self)


async def _opened(target: Target, statuses: Counter[str]) -> asyncio.Queue[_OpenConnection]:
    idle: asyncio.Queue[_OpenConnection] = asyncio.Queue()
    connect = asyncio.get_running_loop().create_connection
    for _ in range(OPEN_CONNECTIONS):
        _, line = await connect(lambda: _OpenConnection(idle, statuses), "127.0.0.1", target.port)
        idle.put_nowait(line)
    return idle


async def _send(targets: list[Target], per_second: float, seconds: float) -> dict[str, int]:
    chance = random.Random(SEED)
    statuses: Counter[str] = Counter()
    lines = [(await _opened(target, statuses), target.encoded()) for target in targets]
    began = time.perf_counter()
    moment, sent = began, 0
    while (moment := moment + chance.expovariate(per_second)) < began + seconds:
        await asyncio.sleep(max(0.0, moment - time.perf_counter()))
        idle, request = lines[sent % len(lines)]
        (await idle.get()).send(request)
        sent += 1
    for idle, _ in lines:
        for _ in range(OPEN_CONNECTIONS):
            (await idle.get()).close()
    return dict(statuses)


def carry_out(
    targets: list[dict[str, Any]], seconds: float, connections: int = 0, per_second: float = 0.0
) -> dict[str, Any]:
    """Carry out one measurement. A closed loop is given `connections`, an open one `per_second`."""
    to = [Target(**target) for target in targets]
    if per_second:
        return {"statuses": uvloop.run(_send(to, per_second, seconds))}
    found: dict[str, Any] = to_builtins(uvloop.run(_measure(to, connections, seconds)))
    return found


if __name__ == "__main__":
    answer_commands(carry_out)
