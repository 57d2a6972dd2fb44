"""Time of one POST /tasks/cancel that ends a whole queue, beside the batch that submitted the same tasks.

One task holds the device, so the others wait. The answer comes when the leader has cancelled all of them.
"""

import json
import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator

from bench.accept import full_deployment
from bench.batch import a_batch
from bench.deployment import Deployment, add_variants, prefix_of, variants_of
from bench.measuring import Figure, report


def add_options(parser: ArgumentParser) -> None:
    add_variants(parser)
    parser.add_argument("--tasks", type=int, default=10_000, help="tasks in the queue")
    parser.add_argument("--rounds", type=int, default=5, help="rounds to measure")


def measure(options: Namespace) -> Iterator[Figure]:
    for variant in variants_of(options):
        with full_deployment(variant) as running:
            rounds = [one_round(running, options.tasks) for _ in range(options.rounds + 1)][1:]
            for submitted, cancelled in rounds:
                report(f"  {variant}: submitted in {submitted:.2f} s, cancelled in {cancelled:.2f} s")
            yield Figure(
                "cancel",
                f"{prefix_of('cancel', variant)}.seconds",
                statistics.median(cancelled for _, cancelled in rounds),
                "s",
                options.tasks * options.rounds,
                running.durability,
                statistics.median(submitted for submitted, _ in rounds),
                statistics.median(cancelled / submitted for submitted, cancelled in rounds),
            )


def one_round(running: Deployment, tasks: int) -> tuple[float, float]:
    """Return the seconds to submit and to cancel. Raises RuntimeError unless all tasks were cancelled."""
    gateway = running.gateways[-1]
    began = time.perf_counter()
    gateway.ask("POST", "/tasks/batch", json.loads(a_batch(tasks)))
    submitted = time.perf_counter() - began
    running.wait_until_idle()
    began = time.perf_counter()
    answer = gateway.ask("POST", "/tasks/cancel", {"state": ["pending"]})
    seconds = time.perf_counter() - began
    if answer["cancelled"] != tasks:
        raise RuntimeError(f"of {tasks} tasks not all were cancelled: {answer}")
    return submitted, seconds
