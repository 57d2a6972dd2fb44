"""The baseline of `bench run`: one asyncio driver and plain warm actors on their own Ray."""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import ray

from bench.child_process import answer_commands
from bench.tasks import noop


class PlainActor:
    def call(self) -> None:
        return noop()


ACTORS: list[Any] = []


async def call_for(seconds: float, in_flight: int) -> dict[str, float]:
    """Keep `in_flight` calls in flight, round robin over the actors, for `seconds`. `p50_ms` is the median of
    one call."""
    began = time.perf_counter()
    took_ms: list[float] = []

    async def one_line(number: int) -> None:
        actor = ACTORS[number % len(ACTORS)]
        while (sent_at := time.perf_counter()) < began + seconds:
            await actor.call.remote()
            took_ms.append(1000 * (time.perf_counter() - sent_at))

    await asyncio.gather(*(one_line(number) for number in range(in_flight)))
    ended = time.perf_counter()
    return {"calls": len(took_ms), "seconds": ended - began, "p50_ms": median(took_ms)}


def carry_out(processes: int, in_flight: int, seconds: float) -> dict[str, float]:
    remote_class: Any = ray.remote(num_cpus=0)(PlainActor)
    while len(ACTORS) < processes:
        ACTORS.append(remote_class.remote())
    return asyncio.run(call_for(seconds, in_flight))


def answer_on_plain_ray(carry_out: Callable[..., Any], **options: Any) -> None:
    """Carry out the benchmark's commands on a local Ray, which is started with these options and ended
    afterwards."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=128 * 2**20,
        _node_ip_address="127.0.0.1",
        **options,
    )
    try:
        answer_commands(carry_out)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    answer_on_plain_ray(carry_out)
