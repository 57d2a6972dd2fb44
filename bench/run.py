"""No-op tasks per second from POST to result on warm runners, compared with plain warm Ray actors.

The baseline is one asyncio driver that calls the same function, 64 calls in flight, on as many plain actors
of a second Ray. The two are loaded in turn, in short rounds.
"""

import json
import secrets
import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence

from bench.child_process import ChildProcess
from bench.deployment import Deployment, add_variants, deployed, prefix_of, variants_of
from bench.http import Target
from bench.load import ClosedLoop, Measured
from bench.measuring import Figure, Pair, compared, report

TASK = {"run": {"entrypoint": "bench.tasks:noop"}, "resources": {"cpu": 0.02}}


class PlainRay(ChildProcess):
    module = "bench.plain_ray"

    def environment(self) -> dict[str, str]:
        """The token of this Ray, set before Ray is imported: it is protected like the service's Ray."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

    def calls_per_second(self, *, processes: int, in_flight: int, seconds: float) -> float:
        answer = self.ask(processes=processes, in_flight=in_flight, seconds=seconds)
        return float(answer["calls"] / answer["seconds"])

    def p50_ms(self, seconds: float) -> float:
        """Return the median milliseconds of calls that are made one after the other."""
        return float(self.ask(processes=1, in_flight=1, seconds=seconds)["p50_ms"])


def add_options(parser: ArgumentParser) -> None:
    add_variants(parser)
    parser.add_argument("--in-flight", type=int, default=64, help="requests in flight")
    parser.add_argument("--processes", type=int, default=1, help="warm runners, and as many plain actors")
    parser.add_argument("--rounds", type=int, default=7, help="rounds to measure")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of load per round and side")


def measure(options: Namespace) -> Iterator[Figure]:
    settings = {
        "ENTRYPOINTS": "bench.tasks:*",
        "RAY__WARM_RUNNERS": str(options.processes),
        "SIMULATED_DEVICES": json.dumps([{"memory_mb": 1024}]),
    }
    for variant in variants_of(options):
        with deployed(variant, **settings) as running, ClosedLoop() as load:
            targets = [
                Target(
                    gateway.port, "POST", "/tasks", {**gateway.headers, "Prefer": "wait=30"}, json.dumps(TASK)
                )
                for gateway in running.gateways
            ]
            load.measure(*targets, connections=options.in_flight, seconds=options.seconds)
            yield one_at_a_time(running, variant, load, targets, options)
            yield rounds_against_ray(running, variant, load, targets, options)


def one_at_a_time(
    running: Deployment, variant: str, load: ClosedLoop, targets: Sequence[Target], options: Namespace
) -> Figure:
    single = load.measure(targets[0], connections=1, seconds=options.seconds).must_all_be(201)
    p50 = statistics.median(single.latencies_ms)
    n = len(single.latencies_ms)
    return Figure("run", f"{prefix_of('run', variant)}.single.p50_ms", p50, "ms", n, running.durability)


def rounds_against_ray(
    running: Deployment, variant: str, load: ClosedLoop, targets: Sequence[Target], options: Namespace
) -> Figure:
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
            measured = load.measure(*targets, connections=options.in_flight, seconds=options.seconds)
            ran.append(measured.must_all_be(201))
            pairs.append(Pair(measured.per_second, plainly))
            running.wait_until_idle()
            report(f"  {variant} round {number}: {measured.per_second:,.0f}/s, plain Ray {plainly:,.0f}/s")
    n = sum(len(measured.latencies_ms) for measured in ran)
    return compared("run", f"{prefix_of('run', variant)}.warm", "tasks/s", pairs, n, running.durability)
