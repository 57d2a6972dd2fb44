"""`python -m bench proxy` with rounds of a tenth of a second."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import psutil

from bench.inference_servers import perf_analyzer
from bench.load import ClosedLoop
from bench.processes import Service
from bench.proxy import (
    BUSIEST,
    SHAPES,
    GrpcComparison,
    HttpComparison,
    beside_relay,
    calls_beside_relay,
    figures,
    grpc_figures,
)
from tests.e2e.service_process import ServiceProcess
from tests.triton.server import Triton


def test_every_shape_is_measured_on_both_sides_and_has_its_figures(
    triton: Triton, service: ServiceProcess
) -> None:
    port = int(service.url.rpartition(":")[2])
    found: set[str] = set()
    with ClosedLoop() as load:
        for shape in SHAPES:
            comparison = HttpComparison(
                shape, triton.http_port, port, service.token, psutil.Process(service.pid)
            )
            one = comparison.one_round(load, 0.1)
            assert min(len(one.direct.latencies_ms), len(one.proxied.latencies_ms)) >= shape.clients
            found |= {figure.figure for figure in figures(shape, [one])}
    expected = {f"proxy.http.{shape.name}" for shape in SHAPES}
    assert found == expected | {f"{name}.added_p50_ms" for name in expected} | {"proxy.cpu_us"}
    assert BUSIEST in {shape.name for shape in SHAPES}


def test_a_relay_is_measured_in_the_same_rounds(triton: Triton, service: ServiceProcess) -> None:
    port = int(service.url.rpartition(":")[2])
    process: Any = psutil.Process(service.pid)
    running = Service(process, port, service.token, Path())
    with ClosedLoop() as load:
        measured = list(beside_relay(load, triton.http_port, running, Namespace(rounds=1, seconds=0.1)))
    found = {figure.figure: figure for figure in measured}
    assert found["proxy.relay.small.c16"].baseline == found["proxy.http.small.c16"].baseline
    assert found["proxy.relay.small.c1"].baseline == found["proxy.http.small.c1"].baseline
    assert found["proxy.relay.cpu_us"].value > 0


def test_calls_are_measured_beside_a_relay_of_the_same_library(
    triton: Triton, service: ServiceProcess, call_port: int
) -> None:
    process: Any = psutil.Process(service.pid)
    running = Service(process, 0, service.token, Path())
    with perf_analyzer() as generator:
        few = Namespace(rounds=1, calls=50)
        measured = list(calls_beside_relay(generator, triton.grpc_port, call_port, running, few))
    assert [figure.figure for figure in measured] == ["proxy.grpc.c1", "proxy.relay.grpc.c1"]
    assert all(figure.n >= 50 for figure in measured)


def test_grpc_requests_are_measured_on_both_sides(
    triton: Triton, service: ServiceProcess, call_port: int
) -> None:
    with perf_analyzer() as generator:
        calls = GrpcComparison(
            generator, triton.grpc_port, call_port, service.token, psutil.Process(service.pid)
        )
        one = calls.one_round(100)
    assert min(len(one.direct.latencies_ms), len(one.proxied.latencies_ms)) >= 100
    found = {figure.figure for figure in grpc_figures([one])}
    assert found == {"proxy.grpc.small", "proxy.grpc.small.cpu_us"}
