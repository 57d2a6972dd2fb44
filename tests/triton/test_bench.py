"""The short form of `python -m bench proxy`."""

from argparse import Namespace
from pathlib import Path

import psutil

from bench.analyzer import analyzer
from bench.load import Load
from bench.processes import Service
from bench.proxy import BUSIEST, SHAPES, Calls, Sides, beside_relay, call_figures, figures
from tests.e2e.service_process import ServiceProcess
from tests.triton.server import Triton


def test_every_shape_is_asked_on_both_sides_and_has_its_figures(
    triton: Triton, service: ServiceProcess
) -> None:
    port = int(service.url.rpartition(":")[2])
    told: set[str] = set()
    with Load() as load:
        for shape in SHAPES:
            sides = Sides(shape, triton.http_port, port, service.token, psutil.Process(service.pid))
            one = sides.one_round(load, 0.1)
            assert min(len(one.direct.latencies_ms), len(one.proxied.latencies_ms)) >= shape.clients
            told |= {figure.figure for figure in figures(shape, [one])}
    expected = {f"proxy.http.{shape.name}" for shape in SHAPES}
    assert told == expected | {f"{name}.added_p50_ms" for name in expected} | {"proxy.cpu_us"}
    assert BUSIEST in {shape.name for shape in SHAPES}


def test_what_only_passes_bytes_on_is_measured_in_the_same_rounds(
    triton: Triton, service: ServiceProcess
) -> None:
    port = int(service.url.rpartition(":")[2])
    running = Service(psutil.Process(service.pid), port, service.token, Path())
    with Load() as load:
        measured = list(beside_relay(load, triton.http_port, running, Namespace(rounds=1, seconds=0.1)))
    told = {figure.figure: figure for figure in measured}
    assert told["proxy.relay.small.c16"].baseline == told["proxy.http.small.c16"].baseline
    assert told["proxy.relay.small.c1"].baseline == told["proxy.http.small.c1"].baseline
    assert told["proxy.relay.cpu_us"].value > 0


def test_calls_over_grpc_are_measured_on_both_sides(
    triton: Triton, service: ServiceProcess, call_port: int
) -> None:
    with analyzer() as asking:
        calls = Calls(asking, triton.grpc_port, call_port, service.token, psutil.Process(service.pid))
        one = calls.one_round(100)
    assert min(len(one.direct.latencies_ms), len(one.proxied.latencies_ms)) >= 100
    told = {figure.figure for figure in call_figures([one])}
    assert told == {"proxy.grpc.small", "proxy.grpc.small.cpu_us"}
