"""The baselines of `bench array`: maps on a Ray of their own, without the service."""

import time
from collections.abc import Callable
from typing import Any

import ray

from bench.plain_ray import answer_on_plain_ray
from bench.tasks import spin

POOLS: dict[int, Any] = {}


class Timed:
    """One item that takes `ms` milliseconds of CPU time."""

    def __init__(self, ms: float) -> None:
        self._ms = ms

    def __call__(self, number: int) -> int:
        return spin(number, self._ms)


def some(first: int, behind: int, ms: float) -> list[int]:
    return [spin(number, ms) for number in range(first, behind)]


def with_pool(items: int, ms: float, processes: int, chunk: int) -> list[int]:
    from ray.util.multiprocessing import Pool

    if processes not in POOLS:
        POOLS[processes] = Pool(processes)
    numbers: list[int] = POOLS[processes].map(Timed(ms), range(items), chunksize=chunk)
    return numbers


def with_tasks(items: int, ms: float, processes: int, chunk: int) -> list[int]:
    """Run as many tasks at once as there are processes, and submit one more whenever one is ready."""
    remote: Any = ray.remote(num_cpus=1)(some)
    starts = list(range(0, items, chunk))
    running: list[Any] = []
    numbers: list[int] = []
    while starts or running:
        while starts and len(running) < processes:
            first = starts.pop(0)
            running.append(remote.remote(first, min(items, first + chunk), ms))
        done, running = ray.wait(running, num_returns=1)
        numbers += ray.get(done[0])
    return numbers


WAYS: dict[str, Callable[[int, float, int, int], list[int]]] = {"pool": with_pool, "tasks": with_tasks}


def carry_out(how: str, items: int, ms: float, processes: int, chunk: int) -> float:
    began = time.perf_counter()
    found = WAYS[how](items, ms, processes, chunk)
    seconds = time.perf_counter() - began
    if sorted(found) != list(range(items)):
        raise RuntimeError(f"{how}: {len(found)} results of {items} items")
    return seconds


if __name__ == "__main__":
    answer_on_plain_ray(carry_out, num_cpus=8)
