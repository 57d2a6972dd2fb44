"""Tasks accepted durably per second, compared with a FastAPI route that returns a constant.

Each POST writes a row and its event, which are on disk before the answer; the token is checked, and the
leader plans a queue that does not fit on its one device. The baseline runs under the same server settings.
The two are loaded in turn, in short rounds. With two gateways, half of the connections go to each.
"""

import json
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager

from bench.deployment import Deployment, add_variants, deployed, variants_of
from bench.http import Target
from bench.load import ClosedLoop, Measured
from bench.measuring import Figure, Pair, compared, percentile, report
from bench.processes import bare_app

DEVICE_MB = 24_576
PATIENCE_SECONDS = 10.0
"""The time in which a gateway must learn of the tasks that the other one accepted."""

FULL_SETTINGS = {
    "ENGINE": "simulated",
    "SIMULATED_DEVICES": json.dumps([{"memory_mb": DEVICE_MB}]),
    "ENTRYPOINTS": "bench.tasks:*",
}

TASK = {"run": {"entrypoint": "bench.tasks:noop"}, "resources": {"gpu_mb": 1024}}


def add_options(parser: ArgumentParser) -> None:
    add_variants(parser)
    parser.add_argument("--connections", type=int, default=32, help="keep-alive connections")
    parser.add_argument("--rounds", type=int, default=7, help="rounds to measure")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of load per round and side")


def measure(options: Namespace) -> Iterator[Figure]:
    for variant in variants_of(options):
        with full_deployment(variant) as running:
            yield from rounds_against_bare(running, variant, options)


@contextmanager
def full_deployment(variant: str) -> Iterator[Deployment]:
    """Yield a deployment whose only device is held by a task that does not end."""
    with deployed(variant, **FULL_SETTINGS) as running:
        fill_device(running)
        yield running


def fill_device(running: Deployment) -> str:
    """Submit a task that holds all memory of the device, and return its id."""
    gateway = running.gateways[0]
    run = {"entrypoint": "bench.tasks:noop", "kwargs": {"seconds": 86_400}}
    holder = gateway.ask("POST", "/tasks", {"run": run, "resources": {"gpu_mb": DEVICE_MB}})
    gateway.wait_until(holder["id"], "running")
    return str(holder["id"])


def rounds_against_bare(running: Deployment, name: str, options: Namespace) -> Iterator[Figure]:
    ours = [
        Target(gateway.port, "POST", "/tasks", gateway.headers, json.dumps(TASK))
        for gateway in running.gateways
    ]
    accepted: list[Measured] = []
    pairs: list[Pair] = []
    with bare_app() as port, ClosedLoop() as load:
        bare = Target(port, "GET", "/")

        def one_round(seconds: float) -> tuple[Measured, Measured]:
            constant = load.measure(bare, connections=options.connections, seconds=seconds)
            posted = load.measure(*ours, connections=options.connections, seconds=seconds)
            running.wait_until_idle()
            return posted.must_all_be(202), constant.must_all_be(200)

        warm_up, _ = one_round(0.5 * options.seconds)
        for number in range(1, options.rounds + 1):
            posted, constant = one_round(options.seconds)
            accepted.append(posted)
            pairs.append(Pair(posted.per_second, constant.per_second))
            report(f"  {name} round {number}: {posted.per_second:,.0f}/s, bare {constant.per_second:,.0f}/s")
    latencies = [ms for measured in accepted for ms in measured.latencies_ms]
    must_be_queued(running, len(latencies) + len(warm_up.latencies_ms))
    n, durability = len(latencies), running.durability
    yield compared("accept", f"accept.{name}", "tasks/s", pairs, n, durability)
    yield Figure("accept", f"accept.{name}.p99_ms", percentile(latencies, 99), "ms", n, durability)


def must_be_queued(running: Deployment, accepted: int) -> None:
    """Check that every accepted task is in the queue. Raises RuntimeError if not."""
    for gateway in running.gateways:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (queued := gateway.ask("GET", "/stats")["tasks"]["pending"]) != accepted:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{accepted} tasks were accepted, but {queued} are queued")
            time.sleep(0.2)
