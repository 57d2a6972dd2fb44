"""Submits every task of a load at its arrival time, from a process of its own.

Connections are used in turn, so that the server does not close one for being idle.
"""

import asyncio
import json
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import uvloop

from bench.child_process import answer_commands
from bench.churn.shapes import UNIT_MB, Arrival, Shape, WorkClass
from bench.http import Connection, Target

TICK_SECONDS = 0.002


class _Due:
    """Holds requests that are due and idle connections."""

    def __init__(self) -> None:
        self.requests: deque[bytes] = deque()
        self.idle: deque[_Submitter] = deque()
        self.statuses: Counter[str] = Counter()

    def send(self) -> None:
        while self.idle and self.requests:
            self.idle.popleft().send(self.requests.popleft())


class _Submitter(Connection):
    def __init__(self, due: _Due) -> None:
        super().__init__()
        self._due = due

    def on_answer(self, status: str, _ms: float, /) -> None:
        self._due.statuses[status] += 1
        self._due.idle.append(self)
        self._due.send()


def _request(arrival: Arrival, queues: int, port: int, tokens: Sequence[str]) -> bytes:
    work = arrival.work
    task = {
        "name": work.name,
        "run": {"entrypoint": "bench.tasks:noop", "kwargs": {"seconds": work.runs_seconds}},
        "priority": work.priority,
        "resources": {"gpu_mb": work.units * UNIT_MB, "pool": f"cohort-{arrival.cohort}"},
    }
    token = tokens[arrival.cohort * queues + arrival.queue]
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    return Target(port, "POST", "/tasks", headers, json.dumps(task)).encoded()


async def _send(shape: Shape, port: int, tokens: Sequence[str], connections: int) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    arrivals = deque(
        (arrival.at_seconds, _request(arrival, shape.queues, port, tokens)) for arrival in shape.arrivals()
    )
    due = _Due()
    lines = [
        (await loop.create_connection(lambda: _Submitter(due), "127.0.0.1", port))[1]
        for _ in range(connections)
    ]
    due.idle.extend(lines)
    began = time.perf_counter()
    while arrivals or len(due.idle) < connections:
        lost = next((line.ended for line in lines if line.ended.done()), None)
        if lost is not None:
            lost.result()
        while arrivals and arrivals[0][0] <= time.perf_counter() - began:
            due.requests.append(arrivals.popleft()[1])
        due.send()
        await asyncio.sleep(TICK_SECONDS)
    took = time.perf_counter() - began
    for line in lines:
        line.close()
    return {"seconds": took, "statuses": dict(due.statuses)}


def carry_out(shape: dict[str, Any], port: int, tokens: list[str], connections: int) -> dict[str, Any]:
    classes = tuple(WorkClass(**one) for one in shape.pop("classes"))
    return uvloop.run(_send(Shape(**shape, classes=classes), port, tokens, connections))


if __name__ == "__main__":
    answer_commands(carry_out)
