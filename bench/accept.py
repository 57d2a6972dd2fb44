"""How many tasks per second are accepted durably, against a bare FastAPI route that returns a constant.

Each POST is one row, its event and its place in the queue, on disk before the answer leaves; the sender is
identified by its token, and the leader plans a queue that does not fit its one device. The bare app runs
under the same server settings. One of the two is loaded at a time, in short alternating rounds. With two
gateways half of the connections go to each.
"""

import json
import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager

from bench.http import Target
from bench.load import Load, Measured
from bench.measuring import Figure, Pair, median_ratio, percentile, say
from bench.processes import bare_app
from bench.sites import Site, add_variants, site, variants_of

DEVICE_MB = 24_576
PATIENCE_SECONDS = 10.0
"""For a gateway to hear what the other one has taken in."""

FULL_SETTINGS = {
    "ENGINE": "simulated",
    "SIMULATED_DEVICES": json.dumps([{"memory_mb": DEVICE_MB}]),
    "ENTRYPOINTS": "bench.tasks:*",
}

TASK = {"run": {"entrypoint": "bench.tasks:noop"}, "resources": {"gpu_mb": 1024}}


def add_options(parser: ArgumentParser) -> None:
    add_variants(parser)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0, help="of load per round and side")


def measure(options: Namespace) -> Iterator[Figure]:
    for variant in variants_of(options):
        with full_site(variant) as running:
            yield from rounds_against_bare(running, variant, options)


@contextmanager
def full_site(variant: str) -> Iterator[Site]:
    """A site whose only device is held by a task that stays, so that nothing else fits."""
    with site(variant, **FULL_SETTINGS) as running:
        fill_device(running)
        yield running


def fill_device(running: Site) -> str:
    """The id of the task that holds all of it."""
    door = running.doors[0]
    stays = {"entrypoint": "bench.tasks:noop", "kwargs": {"seconds": 86_400}}
    holder = door.ask("POST", "/tasks", {"run": stays, "resources": {"gpu_mb": DEVICE_MB}})
    door.wait_until(holder["id"], "running")
    return str(holder["id"])


def rounds_against_bare(running: Site, name: str, options: Namespace) -> Iterator[Figure]:
    ours = [Target(door.port, "POST", "/tasks", door.headers, json.dumps(TASK)) for door in running.doors]
    accepted: list[Measured] = []
    pairs: list[Pair] = []
    with bare_app() as port, Load() as load:
        bare = Target(port, "GET", "/")

        def one_round(seconds: float) -> tuple[Measured, Measured]:
            constant = load.measure(bare, connections=options.connections, seconds=seconds)
            posted = load.measure(*ours, connections=options.connections, seconds=seconds)
            running.settle()
            return posted.must_all_be(202), constant.must_all_be(200)

        warm_up, _ = one_round(0.5 * options.seconds)
        for number in range(1, options.rounds + 1):
            posted, constant = one_round(options.seconds)
            accepted.append(posted)
            pairs.append(Pair(posted.per_second, constant.per_second))
            say(f"  {name} round {number}: {posted.per_second:,.0f}/s, bare {constant.per_second:,.0f}/s")
    latencies = [ms for measured in accepted for ms in measured.latencies_ms]
    must_be_queued(running, len(latencies) + len(warm_up.latencies_ms))
    yield Figure(
        bench="accept",
        figure=f"accept.{name}",
        value=statistics.median(pair.ours_per_second for pair in pairs),
        unit="tasks/s",
        n=len(latencies),
        durability=running.durability,
        baseline=statistics.median(pair.baseline_per_second for pair in pairs),
        ratio=median_ratio(pairs),
    )
    yield Figure(
        bench="accept",
        figure=f"accept.{name}.p99_ms",
        value=percentile(latencies, 99),
        unit="ms",
        n=len(latencies),
        durability=running.durability,
    )


def must_be_queued(running: Site, accepted: int) -> None:
    """An answer without its task would make every figure here worthless. Raises RuntimeError."""
    for door in running.doors:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (queued := door.ask("GET", "/stats")["tasks"]["pending"]) != accepted:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{accepted} tasks were accepted and {queued} are queued")
            time.sleep(0.2)
