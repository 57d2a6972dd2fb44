"""Lines of many runs, each followed by a reader, from the print to the reader's hands.

Each run prints numbered lines with their times, all from the same moment on; each has a reader that follows
it through a gateway, with the SDK, on the same machine and so by the same clock. A line that is missing, out
of order or read twice counts as lost.
"""

import asyncio
import json
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpubroker import AsyncBroker

from bench.deployment import Deployment, add_variants, deployed, prefix_of, variants_of
from bench.measuring import Figure, percentile
from bench.processes import Service

START_SECONDS = 300.0


def add_options(parser: ArgumentParser) -> None:
    add_variants(parser)
    parser.add_argument("--runs", type=int, default=20, help="runs that are followed at once")
    parser.add_argument("--per-second", type=float, default=1000.0, help="lines of all runs together")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long they print")


def measure(options: Namespace) -> Iterator[Figure]:
    devices = json.dumps([{"memory_mb": 64 * options.runs}])
    for variant in variants_of(options):
        with (
            deployed(variant, SIMULATED_DEVICES=devices, ENTRYPOINTS="bench.tasks:*") as running,
            tempfile.TemporaryDirectory(prefix="gpb-gate-") as folder,
        ):
            gate = Path(folder) / "gate"
            found = asyncio.run(_followed(running, gate, options))
        yield from figures(variant, *found, running.durability)


def figures(
    variant: str,
    delays: Sequence[float],
    lost: int,
    durability: str,
) -> Iterator[Figure]:
    values = {
        "lost_lines": (float(lost), "lines"),
        "p50_s": (percentile(delays, 50), "s"),
        "p99_s": (percentile(delays, 99), "s"),
        "longest_s": (max(delays), "s"),
    }
    for name, (value, unit) in values.items():
        yield Figure(
            "logs", f"{prefix_of('logs', variant)}.{name}", value, unit, len(delays) + lost, durability
        )


async def _followed(running: Deployment, gate: Path, options: Namespace) -> tuple[list[float], int]:
    """Return the seconds from print to reader of each line, and the number of lost lines."""
    each = options.per_second / options.runs
    first = running.gateways[0]
    body = {
        "run": {"entrypoint": "bench.tasks:talk", "args": [str(gate), each, options.seconds]},
        "resources": {"gpu_mb": 64, "cpu": 0.01},
    }
    tasks = [first.ask("POST", "/tasks", body)["id"] for _ in range(options.runs)]
    delays: list[list[tuple[int, float]]] = [[] for _ in tasks]
    readers = [
        asyncio.create_task(_read(running.gateways[at % len(running.gateways)], task, delays[at]))
        for at, task in enumerate(tasks)
    ]
    for task in tasks:
        await asyncio.to_thread(first.wait_until, task, "running")
    await asyncio.to_thread(gate.touch)
    async with asyncio.timeout(options.seconds + START_SECONDS):
        await asyncio.gather(*readers)
    expected = round(each * options.seconds)
    lost = sum(lost_of([number for number, _ in read], expected) for read in delays)
    return [delay for read in delays for _, delay in read], lost


def lost_of(numbers: Sequence[int], expected: int) -> int:
    """Return the number of lines that did not arrive exactly once and in their place."""
    if list(numbers) == list(range(expected)):
        return 0
    distinct = len(set(numbers))
    return max(1, expected - distinct + len(numbers) - distinct)


async def _read(gateway: Service, task: str, found: list[tuple[int, float]]) -> None:
    async with AsyncBroker(f"http://127.0.0.1:{gateway.port}", gateway.token) as broker:
        async for line in broker.logs(task, follow=True):
            number, printed_at = line.split()
            found.append((int(number), time.time() - float(printed_at)))
