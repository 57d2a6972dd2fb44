"""Sends one request again and again at random moments, from a process of its own.

The moments do not wait for answers, as those of many clients who know nothing of each other would not.
"""

import asyncio
import random
import time
from collections import Counter
from dataclasses import asdict
from typing import Any

import uvloop

from bench.companion import Companion, answer_commands
from bench.http import Connection, Target

CONNECTIONS = 16
SEED = 20261122


class Pace(Companion):
    module = "bench.pace"

    def send(self, targets: list[Target], *, per_second: float, seconds: float, status: int) -> int:
        """How many were sent, to the targets in turn. Raises RuntimeError unless all are answered so."""
        answer = self.ask(
            targets=[asdict(target) for target in targets], per_second=per_second, seconds=seconds
        )
        if set(answer["statuses"]) != {str(status)}:
            raise RuntimeError(f"every answer had to be {status}; got {answer['statuses']}")
        return sum(answer["statuses"].values())


class _Sender(Connection):
    """One of several to one target, idle unless it waits for an answer."""

    def __init__(self, idle: "asyncio.Queue[_Sender]", statuses: Counter[str]) -> None:
        super().__init__()
        self._idle = idle
        self._statuses = statuses

    def on_answer(self, status: str, _ms: float, /) -> None:
        self._statuses[status] += 1
        self._idle.put_nowait(self)


async def _opened(target: Target, statuses: Counter[str]) -> asyncio.Queue[_Sender]:
    idle: asyncio.Queue[_Sender] = asyncio.Queue()
    connect = asyncio.get_running_loop().create_connection
    for _ in range(CONNECTIONS):
        _, sender = await connect(lambda: _Sender(idle, statuses), "127.0.0.1", target.port)
        idle.put_nowait(sender)
    return idle


async def _send(targets: list[Target], per_second: float, seconds: float) -> dict[str, int]:
    chance = random.Random(SEED)
    statuses: Counter[str] = Counter()
    doors = [(await _opened(target, statuses), target.encoded()) for target in targets]
    began = time.perf_counter()
    moment, sent = began, 0
    while (moment := moment + chance.expovariate(per_second)) < began + seconds:
        await asyncio.sleep(max(0.0, moment - time.perf_counter()))
        idle, request = doors[sent % len(doors)]
        (await idle.get()).send(request)
        sent += 1
    for idle, _ in doors:
        for _ in range(CONNECTIONS):
            (await idle.get()).close()
    return dict(statuses)


def carry_out(targets: list[dict[str, Any]], per_second: float, seconds: float) -> dict[str, Any]:
    return {"statuses": uvloop.run(_send([Target(**target) for target in targets], per_second, seconds))}


if __name__ == "__main__":
    answer_commands(carry_out)
