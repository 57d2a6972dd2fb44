"""Submits every task of a shape when its time has come, from a process of its own, over many connections.

They take turns, so that none is idle for so long that the server closes it.
"""

import asyncio
import json
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import uvloop

from bench.churn.shapes import UNIT_MB, Arrival, Shape, Sort
from bench.companion import answer_commands
from bench.http import Connection, Target

BEAT_SECONDS = 0.002


class _Due:
    """What is to be sent by now, and the connections that have nothing to do."""

    def __init__(self) -> None:
        self.requests: deque[bytes] = deque()
        self.idle: deque[_Submitter] = deque()
        self.statuses: Counter[str] = Counter()

    def hand_out(self) -> None:
        while self.idle and self.requests:
            self.idle.popleft().send(self.requests.popleft())


class _Submitter(Connection):
    def __init__(self, due: _Due) -> None:
        super().__init__()
        self._due = due

    def on_answer(self, status: str, _ms: float, /) -> None:
        self._due.statuses[status] += 1
        self._due.idle.append(self)
        self._due.hand_out()


def _request(arrival: Arrival, queues: int, port: int, tokens: Sequence[str]) -> bytes:
    sort = arrival.sort
    task = {
        "name": sort.name,
        "run": {"entrypoint": "bench.tasks:noop", "kwargs": {"seconds": sort.runs_seconds}},
        "priority": sort.priority,
        "resources": {"gpu_mb": sort.units * UNIT_MB, "pool": f"cohort-{arrival.cohort}"},
    }
    token = tokens[arrival.cohort * queues + arrival.queue]
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    return Target(port, "POST", "/tasks", headers, json.dumps(task)).encoded()


async def _send(shape: Shape, port: int, tokens: Sequence[str], connections: int) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    coming = deque(
        (arrival.at_seconds, _request(arrival, shape.queues, port, tokens)) for arrival in shape.arrivals()
    )
    due = _Due()
    lines = [
        (await loop.create_connection(lambda: _Submitter(due), "127.0.0.1", port))[1]
        for _ in range(connections)
    ]
    due.idle.extend(lines)
    began = time.perf_counter()
    while coming or len(due.idle) < connections:
        lost = next((line.ended for line in lines if line.ended.done()), None)
        if lost is not None:
            lost.result()
        while coming and coming[0][0] <= time.perf_counter() - began:
            due.requests.append(coming.popleft()[1])
        due.hand_out()
        await asyncio.sleep(BEAT_SECONDS)
    took = time.perf_counter() - began
    for line in lines:
        line.close()
    return {"seconds": took, "statuses": dict(due.statuses)}


def carry_out(shape: dict[str, Any], port: int, tokens: list[str], connections: int) -> dict[str, Any]:
    sorts = tuple(Sort(**sort) for sort in shape.pop("sorts"))
    return uvloop.run(_send(Shape(**shape, sorts=sorts), port, tokens, connections))


if __name__ == "__main__":
    answer_commands(carry_out)
