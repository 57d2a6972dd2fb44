"""Time from the POST of a critical task to its first line of user code when it preempts a victim.

The victim holds the whole device and checkpoints within milliseconds of its notice; a spare process is ready.
The critical task returns the time of its first line, which is compared with the time just before the POST.
"""

import json
import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator

from bench.measuring import Figure, percentile, report
from bench.processes import SQLITE_DURABILITY, Service, service

DEVICE_MB = 24_576


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--times", type=int, default=25, help="preemptions to measure")
    parser.add_argument(
        "--pause",
        type=float,
        default=2.0,
        help="seconds between preemptions, in which a spare process starts",
    )


def measure(options: Namespace) -> Iterator[Figure]:
    simulated = {
        "SIMULATED_DEVICES": json.dumps([{"memory_mb": DEVICE_MB}]),
        "ENTRYPOINTS": "bench.tasks:*",
    }
    waits_ms: list[float] = []
    with service(**simulated) as running:
        victim = running.ask("POST", "/tasks", task("bench.tasks:victim", priority=20))["id"]
        for number in range(1, options.times + 1):
            running.wait_until(victim, "running")
            time.sleep(options.pause)
            waits_ms.append(preempted_in_ms(running))
            report(f"  preemption {number}: {waits_ms[-1]:.0f} ms")
        running.ask("POST", f"/tasks/{victim}/cancel", {"grace_seconds": 0})
    for figure, value in (("p50", statistics.median(waits_ms)), ("p90", percentile(waits_ms, 90))):
        yield Figure("preempt", f"preempt.{figure}_ms", value, "ms", len(waits_ms), SQLITE_DURABILITY)


def preempted_in_ms(running: Service) -> float:
    sent_at = time.time_ns()
    critical = running.ask("POST", "/tasks", task("bench.tasks:first_line", priority=95), prefer="wait=60")
    return float(critical["result"] - sent_at) / 1e6


def task(entrypoint: str, *, priority: int) -> dict[str, object]:
    return {
        "run": {"entrypoint": entrypoint},
        "priority": priority,
        "resources": {"gpu_mb": DEVICE_MB},
    }
