"""How many no-op tasks per second go from POST to result on warm runners, against plain warm Ray actors.

The baseline is one asyncio driver that calls the same function one by one, 64 in flight, on as many plain
actor processes of a Ray beside the service's. The two take turns in short rounds.
"""

import json
import secrets
import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator

from bench.companion import Companion
from bench.http import Target
from bench.load import Load, Measured
from bench.measuring import Figure, Pair, median_ratio, say
from bench.processes import SQLITE_DURABILITY, Service, service, settle

TASK = {"run": {"entrypoint": "bench.tasks:noop"}, "resources": {"cpu": 0.02}}


class PlainRay(Companion):
    module = "bench.plain_ray"

    def environment(self) -> dict[str, str]:
        """A token of its own, before Ray is imported: reachable as little as the service's Ray is."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

    def calls_per_second(self, *, processes: int, in_flight: int, seconds: float) -> float:
        answer = self.ask(processes=processes, in_flight=in_flight, seconds=seconds)
        return float(answer["calls"] / answer["seconds"])


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--processes", type=int, default=1, help="warm runners, and plain actors beside them")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0, help="of load per round and side")


def measure(options: Namespace) -> Iterator[Figure]:
    settings = {
        "ENTRYPOINTS": "bench.tasks:*",
        "RAY__WARM_RUNNERS": str(options.processes),
        "SIMULATED_DEVICES": json.dumps([{"memory_mb": 1024}]),
    }
    with service(**settings) as running, Load() as load:
        target = Target(
            running.port, "POST", "/tasks", {**running.headers, "Prefer": "wait=30"}, json.dumps(TASK)
        )
        load.measure(target, connections=options.in_flight, seconds=options.seconds)
        yield from one_at_a_time(load, target, options)
        yield from rounds_against_ray(running, load, target, options)


def one_at_a_time(load: Load, target: Target, options: Namespace) -> Iterator[Figure]:
    single = load.measure(target, connections=1, seconds=options.seconds).must_all_be(201)
    latencies = single.latencies_ms
    p50 = statistics.median(latencies)
    yield Figure("run", "run.single.p50_ms", p50, "ms", len(latencies), SQLITE_DURABILITY)


def rounds_against_ray(running: Service, load: Load, target: Target, options: Namespace) -> Iterator[Figure]:
    ran: list[Measured] = []
    pairs: list[Pair] = []
    with PlainRay() as plain:

        def plain_calls(seconds: float) -> float:
            return plain.calls_per_second(
                processes=options.processes, in_flight=options.in_flight, seconds=seconds
            )

        plain_calls(1.0)
        for number in range(1, options.rounds + 1):
            plainly = plain_calls(options.seconds)
            measured = load.measure(target, connections=options.in_flight, seconds=options.seconds)
            ran.append(measured.must_all_be(201))
            pairs.append(Pair(measured.per_second, plainly))
            settle(running.process)
            say(f"  round {number}: {measured.per_second:,.0f}/s, plain Ray {plainly:,.0f}/s")
    yield Figure(
        bench="run",
        figure="run.warm",
        value=statistics.median(pair.ours_per_second for pair in pairs),
        unit="tasks/s",
        n=sum(len(measured.latencies_ms) for measured in ran),
        durability=SQLITE_DURABILITY,
        baseline=statistics.median(pair.baseline_per_second for pair in pairs),
        ratio=median_ratio(pairs),
    )
