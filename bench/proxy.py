"""What asking a model through the service costs, against asking Triton directly, in the same run.

A real Triton with a model that gives back what it gets is asked over HTTP with binary tensors, and over gRPC
by Triton's own load generator: directly and through the service, which checks the token, counts the request
and passes it on. One of the two is loaded at a time, in short alternating rounds; client, service and Triton
share the machine's cores, so that what the service computes is taken from the others as well.
"""

import json
import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil

from bench.analyzer import Analyzer, analyzer
from bench.http import Target
from bench.load import Load, Measured
from bench.measuring import Figure, Pair, median_ratio, percentile, say
from bench.mlserver import mlserver
from bench.processes import Service, service
from bench.relay import relay
from bench.triton import triton
from tests.triton.server import free_ports

MODEL = "identity_fp32"


@dataclass(frozen=True)
class Shape:
    """How a model is asked."""

    name: str
    tensor_bytes: int
    clients: int
    is_json: bool = False
    """Else binary both ways."""


SMALL_BYTES = 64
SHAPES = (
    Shape("small.c16", SMALL_BYTES, 16),
    Shape("small.c1", SMALL_BYTES, 1),
    Shape("1mb", 2**20, 1),
    Shape("16mb", 2**24, 1),
    Shape("json.c16", SMALL_BYTES, 16, is_json=True),
)

CALLS = "grpc.small"
CALL_CLIENTS = 16

BUSIEST = "small.c16"
"""The shape that tells what a request costs the service in CPU, and in memory that it keeps."""


def add_options(parser: ArgumentParser) -> None:
    names = [shape.name for shape in SHAPES]
    parser.add_argument(
        "--shape", choices=[*names, CALLS, "all"], default="all", help="size of tensors and clients"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of load per round and side")
    parser.add_argument("--calls", type=int, default=5000, help="over gRPC, per round and side")
    parser.add_argument(
        "--beside",
        choices=["mlserver", "relay"],
        help="ask this server the shape json.c16 as well (`make mlserver` first), or what does nothing but "
        "pass bytes on, all others",
    )
    parser.add_argument("--requests", type=int, default=0, help="ask so often, and tell the memory kept")


def measure(options: Namespace) -> Iterator[Figure]:
    chosen = [shape for shape in SHAPES if options.shape in (shape.name, "all")]
    with triton([MODEL]) as server:
        [call_port] = free_ports(1)
        main = {"name": "main", "http_url": server.url, "grpc_url": f"http://127.0.0.1:{server.grpc_port}"}
        triton_settings = json.dumps({"servers": [main], "grpc_port": call_port})
        with service(ENGINE="simulated", TRITON=triton_settings) as running, Load() as load:
            if options.requests:
                yield from memory_kept(load, running, options.requests)
                return
            if options.beside == "mlserver":
                yield from beside_mlserver(load, server.http_port, running, options)
                return
            if options.beside == "relay":
                yield from beside_relay(load, server.http_port, running, options)
                return
            for shape in chosen:
                sides = Sides(shape, server.http_port, running.port, running.token, running.process)
                sides.one_round(load, options.seconds)  # until all connections and buffers are there
                before = resident_mb(running.process)
                rounds = [told(shape, sides.one_round(load, options.seconds)) for _ in range(options.rounds)]
                yield from figures(shape, rounds)
                if shape.name == BUSIEST:
                    grown = resident_mb(running.process) - before
                    yield Figure("proxy", "proxy.grown_mb", grown, "MiB", answered(rounds))
            if options.shape in (CALLS, "all"):
                with analyzer() as asking:
                    call = Calls(asking, server.grpc_port, call_port, running.token, running.process)
                    call.one_round(options.calls // 5)
                    yield from call_figures([call.one_round(options.calls) for _ in range(options.rounds)])


def beside_mlserver(load: Load, triton_port: int, running: Service, options: Namespace) -> Iterator[Figure]:
    """The same JSON to Triton, to the service in front of it, and to a server of the same protocol."""
    with mlserver(MODEL) as other:
        [shape] = [shape for shape in SHAPES if shape.is_json]
        sides = Sides(shape, triton_port, running.port, running.token, running.process)
        yield from beside("mlserver", *other, sides, load, options)


def beside_relay(load: Load, triton_port: int, running: Service, options: Namespace) -> Iterator[Figure]:
    """The same tensors to Triton, to the service in front of it, and to a relay in front of it."""
    with relay(triton_port) as other:
        for shape in SHAPES:
            if not shape.is_json:
                sides = Sides(shape, triton_port, running.port, running.token, running.process)
                yield from beside("relay", *other, sides, load, options)


def beside(
    name: str, port: int, process: psutil.Process, sides: "Sides", load: Load, options: Namespace
) -> Iterator[Figure]:
    """What answers on this port, against Triton; then the service in the same rounds."""
    shape, theirs, cpu_us, rounds = sides.shape, [], [], []
    for _ in range(options.rounds + 1):
        rounds.append(told(shape, sides.one_round(load, options.seconds)))
        before = cpu_seconds(process)
        measured = load.measure(a_target(port, shape), connections=shape.clients, seconds=options.seconds)
        theirs.append(measured.must_all_be(200))
        cpu_us.append(1e6 * (cpu_seconds(process) - before) / len(measured.latencies_ms))
        say(f"  {name}: {measured.per_second:,.0f}/s, {cpu_us[-1]:.0f} µs of CPU")
    del rounds[0], theirs[0], cpu_us[0]  # until all connections and buffers are there
    pairs = [Pair(one.per_second, other.direct.per_second) for one, other in zip(theirs, rounds, strict=True)]
    n = sum(len(one.latencies_ms) for one in theirs)
    yield against(f"proxy.{name}.{shape.name}", pairs, n)
    if shape.name == BUSIEST:
        yield Figure("proxy", f"proxy.{name}.cpu_us", statistics.median(cpu_us), "µs", n)
    yield from figures(shape, rounds)


def memory_kept(load: Load, running: Service, requests: int) -> Iterator[Figure]:
    """Of the service, before and after so many small requests, once the first have been answered."""
    target = a_target(running.port, SHAPES[0], running.token)
    load.measure(target, connections=SHAPES[0].clients, seconds=3.0).must_all_be(200)
    before, done = resident_mb(running.process), 0
    while done < requests:
        measured = load.measure(target, connections=SHAPES[0].clients, seconds=5.0).must_all_be(200)
        done += len(measured.latencies_ms)
        say(f"  {done:,} requests: {resident_mb(running.process):.1f} MiB")
    after = resident_mb(running.process)
    yield Figure("proxy", "proxy.resident_mb", after, "MiB", done, baseline=before, ratio=after / before)


@dataclass(frozen=True)
class Round:
    direct: Measured
    proxied: Measured
    cpu_us: float
    """Of the service, for each request."""


@dataclass(frozen=True)
class Sides:
    """The same request to Triton and to the service in front of it."""

    shape: Shape
    triton_port: int
    service_port: int
    token: str
    process: psutil.Process

    def one_round(self, load: Load, seconds: float) -> Round:
        direct = self._ask(load, a_target(self.triton_port, self.shape), seconds)
        before = cpu_seconds(self.process)
        proxied = self._ask(load, a_target(self.service_port, self.shape, self.token), seconds)
        used = cpu_seconds(self.process) - before
        return Round(direct, proxied, 1e6 * used / len(proxied.latencies_ms))

    def _ask(self, load: Load, target: Target, seconds: float) -> Measured:
        return load.measure(target, connections=self.shape.clients, seconds=seconds).must_all_be(200)


def told(shape: Shape, done: Round) -> Round:
    ours, theirs = done.proxied.per_second, done.direct.per_second
    say(f"  {shape.name}: {ours:,.0f}/s, direct {theirs:,.0f}/s, {done.cpu_us:.0f} µs of CPU")
    return done


def against_direct(name: str, rounds: Sequence[Round]) -> Figure:
    pairs = [Pair(one.proxied.per_second, one.direct.per_second) for one in rounds]
    return against(name, pairs, answered(rounds))


def against(name: str, pairs: Sequence[Pair], n: int) -> Figure:
    return Figure(
        bench="proxy",
        figure=name,
        value=statistics.median(pair.ours_per_second for pair in pairs),
        unit="requests/s",
        n=n,
        baseline=statistics.median(pair.baseline_per_second for pair in pairs),
        ratio=median_ratio(pairs),
    )


def figures(shape: Shape, rounds: Sequence[Round]) -> Iterator[Figure]:
    n, name = answered(rounds), f"proxy.http.{shape.name}"
    yield against_direct(name, rounds)
    added = [
        percentile(one.proxied.latencies_ms, 50) - percentile(one.direct.latencies_ms, 50) for one in rounds
    ]
    yield Figure("proxy", f"{name}.added_p50_ms", statistics.median(added), "ms", n)
    if shape.name == BUSIEST:
        yield Figure("proxy", "proxy.cpu_us", statistics.median(one.cpu_us for one in rounds), "µs", n)


@dataclass(frozen=True)
class Calls:
    """The same call to Triton and to the service in front of it."""

    asking: Analyzer
    triton_port: int
    service_port: int
    token: str
    process: psutil.Process

    def one_round(self, requests: int) -> Round:
        direct = self._ask(self.triton_port, requests)
        before = cpu_seconds(self.process)
        proxied = self._ask(self.service_port, requests, self.token)
        used = cpu_seconds(self.process) - before
        done = Round(direct, proxied, 1e6 * used / len(proxied.latencies_ms))
        ours, theirs = proxied.per_second, direct.per_second
        say(f"  {CALLS}: {ours:,.0f}/s, direct {theirs:,.0f}/s, {done.cpu_us:.0f} µs of CPU")
        return done

    def _ask(self, port: int, requests: int, token: str = "") -> Measured:
        return self.asking.measure(port, MODEL, 16, clients=CALL_CLIENTS, requests=requests, token=token)


def call_figures(rounds: Sequence[Round]) -> Iterator[Figure]:
    n, name = answered(rounds), f"proxy.{CALLS}"
    yield against_direct(name, rounds)
    yield Figure("proxy", f"{name}.cpu_us", statistics.median(one.cpu_us for one in rounds), "µs", n)


def answered(rounds: Sequence[Round]) -> int:
    """By the service."""
    return sum(len(one.proxied.latencies_ms) for one in rounds)


def a_target(port: int, shape: Shape, token: str = "") -> Target:
    """One infer."""
    count = shape.tensor_bytes // 4
    tensor: dict[str, object] = {"name": "INPUT0", "shape": [1, count], "datatype": "FP32"}
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    path = f"/v2/models/{MODEL}/infer"
    if shape.is_json:
        body = json.dumps({"inputs": [{**tensor, "data": [0.5] * count}]})
        return Target(port, "POST", path, {"Content-Type": "application/json", **headers}, body)
    tensor["parameters"] = {"binary_data_size": shape.tensor_bytes}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}})
    headers["Inference-Header-Content-Length"] = str(len(head))
    return Target(port, "POST", path, headers, head, zeros=shape.tensor_bytes)


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def resident_mb(process: psutil.Process) -> float:
    return float(process.memory_info().rss) / 2**20
