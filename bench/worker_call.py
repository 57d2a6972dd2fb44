"""Calls to a worker of a set over HTTP, one after the other, against a bare route plus a bare actor call.

The baseline adds the medians of two parts: a FastAPI route that returns a constant, and one asyncio driver
that calls a plain actor of a second Ray. The three take turns.
"""

import json
import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator

from bench.deployment import VARIANTS, Deployment, add_variants, deployed, prefix_of, variants_of
from bench.http import Target
from bench.load import ClosedLoop
from bench.measuring import Figure, report
from bench.processes import NotReady, bare_app
from bench.run import PlainRay

START_SECONDS = 120.0


def add_options(parser: ArgumentParser) -> None:
    add_variants(parser)
    parser.add_argument("--rounds", type=int, default=5, help="rounds to measure")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of load per round and side")


def measure(options: Namespace) -> Iterator[Figure]:
    settings = {"ENTRYPOINTS": "bench.tasks:*", "SIMULATED_DEVICES": json.dumps([{"memory_mb": 1024}])}
    for variant in variants_of(options):
        if VARIANTS[variant]:
            report(f"  {variant}: left out; its gateways join no Ray, and call no workers")
            continue
        with (
            deployed(variant, **settings) as running,
            PlainRay() as plain,
            bare_app() as port,
            ClosedLoop() as load,
        ):
            yield call_latency(running, variant, plain, Target(port, "GET", "/"), load, options)


def call_latency(
    running: Deployment, variant: str, plain: PlainRay, route: Target, load: ClosedLoop, options: Namespace
) -> Figure:
    target = target_of_calls(running)
    plain.p50_ms(1.0)
    ours: list[float] = []
    bare: list[float] = []
    n = 0
    for number in range(1, options.rounds + 1):
        routed = load.measure(route, connections=1, seconds=options.seconds).must_all_be(200)
        called = plain.p50_ms(options.seconds)
        measured = load.measure(target, connections=1, seconds=options.seconds).must_all_be(200)
        ours.append(statistics.median(measured.latencies_ms))
        bare.append(statistics.median(routed.latencies_ms) + called)
        n += len(measured.latencies_ms)
        report(f"  {variant} round {number}: {ours[-1]:.2f} ms, a bare route and actor {bare[-1]:.2f} ms")
    ratio = statistics.median(mine / theirs for mine, theirs in zip(ours, bare, strict=True))
    name = f"{prefix_of('worker_call', variant)}.p50_ms"
    value, base = statistics.median(ours), statistics.median(bare)
    return Figure("worker_call", name, value, "ms", n, running.durability, base, ratio)


def target_of_calls(running: Deployment) -> Target:
    """Return the target for calls to a worker that is ready."""
    gateway = running.gateways[0]
    body = {"run": {"entrypoint": "bench.tasks:Worker"}, "resources": {"cpu": 0.02}}
    workers = gateway.ask("POST", "/worker-sets", body)["id"]
    call = {"method": "noop", "timeout_seconds": 30.0}
    gateway_call = f"/worker-sets/{workers}/call"
    deadline = time.monotonic() + START_SECONDS
    while gateway.ask("GET", f"/worker-sets/{workers}")["states"] != {"running": 1}:
        if time.monotonic() > deadline:
            raise NotReady(f"the worker of {workers} should run by now")
        time.sleep(0.05)
    gateway.ask("POST", gateway_call, call)
    return Target(gateway.port, "POST", gateway_call, gateway.headers, json.dumps(call))
