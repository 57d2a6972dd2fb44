"""Inference requests through the service, compared with requests to Triton directly.

A real Triton serves a model that returns its input. It gets requests over HTTP with binary tensors, and over
gRPC from Triton's own load generator: directly, and through the service, which checks the token, counts the
request and forwards it. The two are loaded in turn, in short rounds; client, service and Triton share the
machine's cores, so the service's CPU time also slows down the other two.
"""

import json
import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence

import psutil
from msgspec import Struct
from msgspec.structs import replace

from bench.http import Target
from bench.inference_servers import PerfAnalyzer, mlserver, perf_analyzer, triton
from bench.load import ClosedLoop, Measured
from bench.measuring import Figure, Pair, compared, percentile, report
from bench.processes import Service, service
from bench.relay import relay
from tests.triton.server import free_ports

MODEL = "identity_fp32"


class Shape(Struct, frozen=True):
    """The size of requests, and the number of concurrent ones."""

    name: str
    tensor_bytes: int
    clients: int
    is_json: bool = False
    """True for JSON tensors; otherwise the tensors are binary in both directions."""


SMALL_BYTES = 64
SHAPES = (
    Shape("small.c16", SMALL_BYTES, 16),
    Shape("small.c1", SMALL_BYTES, 1),
    Shape("1mb", 2**20, 1),
    Shape("16mb", 2**24, 1),
    Shape("json.c16", SMALL_BYTES, 16, is_json=True),
)

GRPC_SMALL = "grpc.small"
GRPC_CLIENTS = 16

BUSIEST = "small.c16"
"""The shape for which CPU per request and memory growth are reported."""


def add_options(parser: ArgumentParser) -> None:
    names = [shape.name for shape in SHAPES]
    parser.add_argument(
        "--shape", choices=[*names, GRPC_SMALL, "all"], default="all", help="size of the tensors and clients"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds to measure")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of load per round and side")
    parser.add_argument("--calls", type=int, default=5000, help="requests over gRPC per round and side")
    parser.add_argument(
        "--beside",
        choices=["mlserver", "relay"],
        help="also measure MLServer with shape json.c16 (`make mlserver` first), or with all other shapes a "
        "relay that only forwards bytes",
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=0,
        help="if not 0, only send this many requests and report the memory kept",
    )


def measure(options: Namespace) -> Iterator[Figure]:
    chosen = [shape for shape in SHAPES if options.shape in (shape.name, "all")]
    with triton([MODEL]) as server:
        [grpc_port] = free_ports(1)
        main = {"name": "main", "http_url": server.url, "grpc_url": f"http://127.0.0.1:{server.grpc_port}"}
        triton_settings = json.dumps({"servers": [main], "grpc_port": grpc_port})
        with service(ENGINE="simulated", TRITON=triton_settings) as running, ClosedLoop() as load:
            if options.requests:
                yield from memory_kept(load, running, options.requests)
                return
            if options.beside == "mlserver":
                yield from beside_mlserver(load, server.http_port, running, options)
                return
            if options.beside == "relay" and options.shape == GRPC_SMALL:
                with perf_analyzer() as generator:
                    ports = server.grpc_port, grpc_port
                    yield from calls_beside_relay(generator, *ports, running, options)
                return
            if options.beside == "relay":
                yield from beside_relay(load, server.http_port, running, options)
                return
            for shape in chosen:
                comparison = HttpComparison(
                    shape, server.http_port, running.port, running.token, running.process
                )
                comparison.one_round(load, options.seconds)  # warm-up
                before = resident_mb(running.process)
                rounds = [
                    reported(shape, comparison.one_round(load, options.seconds))
                    for _ in range(options.rounds)
                ]
                yield from figures(shape, rounds)
                if shape.name == BUSIEST:
                    grown = resident_mb(running.process) - before
                    yield Figure("proxy", "proxy.grown_mb", grown, "MiB", answered(rounds))
            if options.shape in (GRPC_SMALL, "all"):
                with perf_analyzer() as generator:
                    grpc = GrpcComparison(
                        generator, server.grpc_port, grpc_port, running.token, running.process
                    )
                    grpc.one_round(options.calls // 5)
                    yield from grpc_figures([grpc.one_round(options.calls) for _ in range(options.rounds)])


def beside_mlserver(
    load: ClosedLoop, triton_port: int, running: Service, options: Namespace
) -> Iterator[Figure]:
    """Compare equal JSON requests to Triton, to the service in front of it, and to MLServer."""
    with mlserver(MODEL) as other:
        [shape] = [shape for shape in SHAPES if shape.is_json]
        comparison = HttpComparison(shape, triton_port, running.port, running.token, running.process)
        yield from beside("mlserver", *other, comparison, load, options)


def beside_relay(
    load: ClosedLoop, triton_port: int, running: Service, options: Namespace
) -> Iterator[Figure]:
    """Compare equal binary requests to Triton, to the service in front of it, and to a relay in front of
    it."""
    with relay(triton_port) as other:
        for shape in SHAPES:
            if not shape.is_json:
                comparison = HttpComparison(shape, triton_port, running.port, running.token, running.process)
                yield from beside("relay", *other, comparison, load, options)


def calls_beside_relay(
    generator: PerfAnalyzer, triton_port: int, grpc_port: int, running: Service, options: Namespace
) -> Iterator[Figure]:
    """Compare equal calls, one at a time, to Triton, to the service in front of it, and to a relay that is
    made with the same library."""
    with relay(triton_port, "calls") as (port, _):
        through_service = GrpcComparison(
            generator, triton_port, grpc_port, running.token, running.process, clients=1
        )
        through_relay = replace(through_service, service_port=port, token="")
        through_service.one_round(options.calls // 5)
        rounds = [
            (through_service.one_round(options.calls), through_relay.one_round(options.calls))
            for _ in range(options.rounds)
        ]
    yield against_direct("proxy.grpc.c1", [one for one, _ in rounds])
    yield against_direct("proxy.relay.grpc.c1", [other for _, other in rounds])


def beside(
    name: str,
    port: int,
    process: psutil.Process,
    comparison: "HttpComparison",
    load: ClosedLoop,
    options: Namespace,
) -> Iterator[Figure]:
    """Compare the server on this port, and in the same rounds the service, with Triton."""
    shape, theirs, cpu_us, rounds = comparison.shape, [], [], []
    for _ in range(options.rounds + 1):
        rounds.append(reported(shape, comparison.one_round(load, options.seconds)))
        before = cpu_seconds(process)
        measured = load.measure(target_of(port, shape), connections=shape.clients, seconds=options.seconds)
        theirs.append(measured.must_all_be(200))
        cpu_us.append(1e6 * (cpu_seconds(process) - before) / len(measured.latencies_ms))
        report(f"  {name}: {measured.per_second:,.0f}/s, {cpu_us[-1]:.0f} µs of CPU")
    del rounds[0], theirs[0], cpu_us[0]  # warm-up
    pairs = [Pair(one.per_second, other.direct.per_second) for one, other in zip(theirs, rounds, strict=True)]
    n = sum(len(one.latencies_ms) for one in theirs)
    yield compared("proxy", f"proxy.{name}.{shape.name}", "requests/s", pairs, n)
    if shape.name == BUSIEST:
        yield Figure("proxy", f"proxy.{name}.cpu_us", statistics.median(cpu_us), "µs", n)
    yield from figures(shape, rounds)


def memory_kept(load: ClosedLoop, running: Service, requests: int) -> Iterator[Figure]:
    """Measure the resident memory of the service before and after `requests` small requests, after a
    warm-up."""
    target = target_of(running.port, SHAPES[0], running.token)
    load.measure(target, connections=SHAPES[0].clients, seconds=3.0).must_all_be(200)
    before, done = resident_mb(running.process), 0
    while done < requests:
        measured = load.measure(target, connections=SHAPES[0].clients, seconds=5.0).must_all_be(200)
        done += len(measured.latencies_ms)
        report(f"  {done:,} requests: {resident_mb(running.process):.1f} MiB")
    after = resident_mb(running.process)
    yield Figure("proxy", "proxy.resident_mb", after, "MiB", done, baseline=before, ratio=after / before)


class Round(Struct, frozen=True):
    direct: Measured
    proxied: Measured
    cpu_us: float
    """The CPU time of the service per request, in microseconds."""


class HttpComparison(Struct, frozen=True):
    """Sends equal HTTP requests to Triton and to the service in front of it."""

    shape: Shape
    triton_port: int
    service_port: int
    token: str
    process: psutil.Process

    def one_round(self, load: ClosedLoop, seconds: float) -> Round:
        direct = self._ask(load, target_of(self.triton_port, self.shape), seconds)
        before = cpu_seconds(self.process)
        proxied = self._ask(load, target_of(self.service_port, self.shape, self.token), seconds)
        used = cpu_seconds(self.process) - before
        return Round(direct, proxied, 1e6 * used / len(proxied.latencies_ms))

    def _ask(self, load: ClosedLoop, target: Target, seconds: float) -> Measured:
        return load.measure(target, connections=self.shape.clients, seconds=seconds).must_all_be(200)


def reported(shape: Shape, done: Round) -> Round:
    ours, theirs = done.proxied.per_second, done.direct.per_second
    report(f"  {shape.name}: {ours:,.0f}/s, direct {theirs:,.0f}/s, {done.cpu_us:.0f} µs of CPU")
    return done


def against_direct(name: str, rounds: Sequence[Round]) -> Figure:
    pairs = [Pair(one.proxied.per_second, one.direct.per_second) for one in rounds]
    return compared("proxy", name, "requests/s", pairs, answered(rounds))


def figures(shape: Shape, rounds: Sequence[Round]) -> Iterator[Figure]:
    n, name = answered(rounds), f"proxy.http.{shape.name}"
    yield against_direct(name, rounds)
    added = [
        percentile(one.proxied.latencies_ms, 50) - percentile(one.direct.latencies_ms, 50) for one in rounds
    ]
    yield Figure("proxy", f"{name}.added_p50_ms", statistics.median(added), "ms", n)
    if shape.name == BUSIEST:
        yield Figure("proxy", "proxy.cpu_us", statistics.median(one.cpu_us for one in rounds), "µs", n)


class GrpcComparison(Struct, frozen=True):
    """Sends equal gRPC requests to Triton and to the service in front of it."""

    generator: PerfAnalyzer
    triton_port: int
    service_port: int
    token: str
    process: psutil.Process
    clients: int = GRPC_CLIENTS

    def one_round(self, requests: int) -> Round:
        direct = self._ask(self.triton_port, requests)
        before = cpu_seconds(self.process)
        proxied = self._ask(self.service_port, requests, self.token)
        used = cpu_seconds(self.process) - before
        done = Round(direct, proxied, 1e6 * used / len(proxied.latencies_ms))
        ours, theirs = proxied.per_second, direct.per_second
        report(f"  {GRPC_SMALL}: {ours:,.0f}/s, direct {theirs:,.0f}/s, {done.cpu_us:.0f} µs of CPU")
        return done

    def _ask(self, port: int, requests: int, token: str = "") -> Measured:
        return self.generator.measure(port, MODEL, 16, clients=self.clients, requests=requests, token=token)


def grpc_figures(rounds: Sequence[Round]) -> Iterator[Figure]:
    n, name = answered(rounds), f"proxy.{GRPC_SMALL}"
    yield against_direct(name, rounds)
    yield Figure("proxy", f"{name}.cpu_us", statistics.median(one.cpu_us for one in rounds), "µs", n)


def answered(rounds: Sequence[Round]) -> int:
    """Return the number of requests that the service answered."""
    return sum(len(one.proxied.latencies_ms) for one in rounds)


def target_of(port: int, shape: Shape, token: str = "") -> Target:
    """Return the target for one inference request."""
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
    """Return the CPU seconds of a process in nanosecond steps: /proc counts in hundredths of a second, which
    is coarser than a short round."""
    scheduler_clock = (~process.pid << 3) | 2  # what clock_getcpuclockid(3) returns on Linux
    return time.clock_gettime(scheduler_clock)


def resident_mb(process: psutil.Process) -> float:
    return float(process.memory_info().rss) / 2**20
