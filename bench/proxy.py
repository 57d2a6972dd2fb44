"""What asking a model through the service costs, against asking Triton directly, in the same run.

A real Triton with a model that gives back what it gets is asked over HTTP with binary tensors: directly and
through the service, which checks the token, counts the request and passes it on. One of the two is loaded at
a time, in short alternating rounds; client, service and Triton share the machine's cores, so that what the
service computes is taken from the others as well.
"""

import json
import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from bench.http import Target
from bench.load import Load, Measured
from bench.measuring import Figure, Pair, median_ratio, percentile, say
from bench.processes import Service, service
from bench.triton import triton

MODEL = "identity_fp32"


@dataclass(frozen=True)
class Shape:
    """How a model is asked."""

    name: str
    tensor_bytes: int
    clients: int


SHAPES = (
    Shape("small.c16", 64, 16),
    Shape("small.c1", 64, 1),
    Shape("1mb", 2**20, 1),
    Shape("16mb", 2**24, 1),
)


def add_options(parser: ArgumentParser) -> None:
    names = [shape.name for shape in SHAPES]
    parser.add_argument("--shape", choices=[*names, "all"], default="all", help="size of tensors and clients")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of load per round and side")


def measure(options: Namespace) -> Iterator[Figure]:
    with triton([MODEL]) as server:
        servers = json.dumps({"servers": [{"name": "main", "http_url": server.url}]})
        with service(ENGINE="simulated", TRITON=servers) as running, Load() as load:
            for shape in SHAPES:
                if options.shape in (shape.name, "all"):
                    yield from rounds(shape, server.http_port, running, load, options)


def rounds(shape: Shape, port: int, running: Service, load: Load, options: Namespace) -> Iterator[Figure]:
    direct, proxied = a_target(port, shape), a_target(running.port, shape, running.token)

    def one_round(target: Target) -> Measured:
        measured = load.measure(target, connections=shape.clients, seconds=options.seconds)
        return measured.must_all_be(200)

    one_round(direct), one_round(proxied)
    pairs: list[Pair] = []
    ours: list[Measured] = []
    theirs: list[Measured] = []
    cpu_us: list[float] = []
    for number in range(1, options.rounds + 1):
        theirs.append(one_round(direct))
        before = cpu_seconds(running.process)
        ours.append(one_round(proxied))
        used = cpu_seconds(running.process) - before
        cpu_us.append(1e6 * used / len(ours[-1].latencies_ms))
        pairs.append(Pair(ours[-1].per_second, theirs[-1].per_second))
        said = f"{ours[-1].per_second:,.0f}/s, direct {theirs[-1].per_second:,.0f}/s, {cpu_us[-1]:.0f} µs"
        say(f"  {shape.name} round {number}: {said}")
    n = sum(len(measured.latencies_ms) for measured in ours)
    rates = [
        statistics.median(side)
        for side in zip(*((p.ours_per_second, p.baseline_per_second) for p in pairs), strict=True)
    ]
    yield Figure(
        "proxy",
        f"proxy.http.{shape.name}",
        rates[0],
        "requests/s",
        n,
        baseline=rates[1],
        ratio=median_ratio(pairs),
    )
    yield p50(shape, ours, theirs, n)
    if shape.name == "small.c16":
        yield Figure("proxy", "proxy.cpu_us", statistics.median(cpu_us), "µs/request", n)


def p50(shape: Shape, ours: list[Measured], theirs: list[Measured], n: int) -> Figure:
    """What half of the requests take longer at least."""
    added = [
        percentile(mine.latencies_ms, 50) - percentile(direct.latencies_ms, 50)
        for mine, direct in zip(ours, theirs, strict=True)
    ]
    return Figure("proxy", f"proxy.http.{shape.name}.added_p50_ms", statistics.median(added), "ms", n)


def a_target(port: int, shape: Shape, token: str = "") -> Target:
    """One infer, binary both ways."""
    tensor = {
        "name": "INPUT0",
        "shape": [1, shape.tensor_bytes // 4],
        "datatype": "FP32",
        "parameters": {"binary_data_size": shape.tensor_bytes},
    }
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}})
    headers = {"Inference-Header-Content-Length": str(len(head))}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    return Target(port, "POST", f"/v2/models/{MODEL}/infer", headers, head, zeros=shape.tensor_bytes)


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
