"""Queued inferences answered per second, joined into batches compared with one by one.

A real Triton serves a model that doubles its input, up to eight rows at once. Inferences of one row each
depend on one that is still running; from its end to the last answer is measured.
"""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from datetime import datetime

from gpubroker import Broker, Task, TaskState

from bench.inference_servers import triton
from bench.measuring import Figure, Pair, compared, report
from bench.processes import SQLITE_DURABILITY, service

MODEL = "doubles"
SLEEP_MS = 10_000
"""An input this large makes the model sleep for as many milliseconds."""


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--inferences", type=int, default=500, help="inferences per round and side")
    parser.add_argument("--rounds", type=int, default=3, help="rounds to measure")


def measure(options: Namespace) -> Iterator[Figure]:
    sizes = {"batches": 8, "alone": 1}
    rates: dict[str, list[float]] = {name: [] for name in sizes}
    with triton([MODEL]) as server:
        for _ in range(options.rounds):
            for name, size in sizes.items():
                rates[name].append(per_second(server.url, size, options.inferences))
                report(f"  {name}: {rates[name][-1]:,.0f}/s")
    pairs = [Pair(*both) for both in zip(rates["batches"], rates["alone"], strict=True)]
    n = options.inferences * options.rounds
    yield compared("inferences", "inferences.batches", "1/s", pairs, n, SQLITE_DURABILITY)


def per_second(url: str, max_size: int, count: int) -> float:
    """Return the inferences answered per second, from the end of the one they depend on to the last answer,
    by the service's clock."""
    settings = {"servers": [{"name": "main", "http_url": url}], "batch": {MODEL: {"max_size": max_size}}}
    with service(ENGINE="simulated", TRITON=json.dumps(settings)) as running:
        broker = Broker(url=f"http://127.0.0.1:{running.port}", token=running.token)
        first = broker.infer_later(MODEL, {"INPUT0": a_row(SLEEP_MS)})
        tasks = [broker.infer_later(MODEL, {"INPUT0": a_row(n % 100)}, after=[first]) for n in range(count)]
        began = _ended_at(broker.wait(first))
        ends = [_ended_at(broker.wait(task)) for task in tasks]
        return count / (max(ends) - began).total_seconds()


def a_row(value: int) -> dict[str, object]:
    return {"datatype": "FP32", "shape": [1, 1], "data": [value]}


def _ended_at(task: Task) -> datetime:
    assert task.state is TaskState.SUCCEEDED, task.raw
    assert task.finished_at is not None
    return task.finished_at
