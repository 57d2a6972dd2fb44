"""An array that tasks read: stored and read for the first time, and read again, compared with plain Ray.

`stored`: from the call that stores it until the first task has read it there, against `ray.put` and the first
`ray.get` in a warm actor of a second Ray. `read`: tasks that read an array which their node has, against
calls of that actor that `ray.get` it. The sides take turns.
"""

import json
import secrets
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from gpubroker import Broker, Submission

from bench.child_process import ChildProcess
from bench.deployment import add_variants, deployed, prefix_of, variants_of
from bench.measuring import Figure, Pair, compared, report

READ = "bench.tasks:last_of"
SMALL = 0.02
"""The CPUs of a task, few enough that it runs in a warm process."""


IN_FLIGHT = 16
"""The number of requests for results in flight."""


class Seconds(NamedTuple):
    stored: float
    read: float


class PlainObjects(ChildProcess):
    module = "bench.plain_objects"

    def environment(self) -> dict[str, str]:
        """The token of this Ray, set before Ray is imported: it is protected like the service's Ray."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

    def seconds(self, mb: int, reads: int) -> Seconds:
        return Seconds(*self.ask(mb=mb, reads=reads))


def add_options(parser: ArgumentParser) -> None:
    add_variants(parser)
    parser.add_argument("--mb", type=int, default=32, help="MiB of the array")
    parser.add_argument("--reads", type=int, default=500, help="tasks that read it again")
    parser.add_argument("--rounds", type=int, default=5, help="rounds to measure")


def measure(options: Namespace) -> Iterator[Figure]:
    settings = {
        "ENTRYPOINTS": "bench.tasks:*",
        "RAY__WARM_RUNNERS": "1",
        "SIMULATED_DEVICES": json.dumps([{"memory_mb": 1024}]),
    }
    for variant in variants_of(options):
        with deployed(variant, **settings) as running:
            gateway = running.gateways[0]
            with Broker(f"http://127.0.0.1:{gateway.port}", gateway.token) as broker:
                yield from against_ray(broker, variant, options, running.durability)


def against_ray(broker: Broker, variant: str, options: Namespace, durability: str) -> Iterator[Figure]:
    mb, reads, rounds = options.mb, options.reads, options.rounds
    stored: list[Pair] = []
    read: list[Pair] = []
    with PlainObjects() as plain:
        plain.seconds(1, 1)
        seconds_of_ours(broker, 1, 1)
        for number in range(1, rounds + 1):
            theirs, ours = plain.seconds(mb, reads), seconds_of_ours(broker, mb, reads)
            stored.append(Pair(mb / ours.stored, mb / theirs.stored))
            read.append(Pair(reads / ours.read, reads / theirs.read))
            said = f"{mb / ours.stored:,.0f} MiB/s, {reads / ours.read:,.0f} reads/s"
            report(f"  {variant} round {number}: {said}")
    prefix = prefix_of("objects", variant)
    yield compared("objects", f"{prefix}.stored_{mb}mb", "MiB/s", stored, rounds, durability)
    yield compared("objects", f"{prefix}.read_{mb}mb", "reads/s", read, rounds * reads, durability)


def seconds_of_ours(broker: Broker, mb: int, reads: int) -> Seconds:
    array = an_array(mb)
    began = time.perf_counter()
    stored = broker.put(array)
    found = [broker.result(broker.submit(READ, stored, cpu=SMALL))]
    first = time.perf_counter() - began
    began = time.perf_counter()
    sent = broker.submit_many([Submission(READ, stored, cpu=SMALL)] * reads)
    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        found += threads.map(broker.result, map(str, sent))
    seconds = Seconds(first, time.perf_counter() - began)
    broker.delete_object(stored)
    if found != [float(array[-1])] * (reads + 1):
        raise RuntimeError(f"{len(found)} tasks read an array that ends with {array[-1]}: {set(found)}")
    return seconds


def an_array(mb: int) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """Return a different array at each call."""
    array = np.zeros(mb * 2**17)
    array[-1] = secrets.randbits(48)
    return array
