"""Triton's own load generator, in C++: it asks for metadata, configuration and statistics besides."""

import json
from pathlib import Path

import pytest

from tests.e2e.service_process import ServiceProcess
from tests.triton.analyzer import (
    HANGS_WITH_4_CLIENTS,
    HANGS_WITH_16_CLIENTS,
    OF_THESE_TESTS,
    Hangs,
    analyzed,
    analyzer_libraries,
)
from tests.triton.server import Triton

REQUESTS = 60


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return analyzer_libraries(tmp_path_factory.mktemp("libraries"))


FORMS = {
    "binary": ("--input-tensor-format", "binary", "--output-tensor-format", "binary"),
    "json": ("--input-tensor-format", "json", "--output-tensor-format", "json"),
}


@pytest.mark.parametrize("form", FORMS)
def test_it_measures_a_model_through_the_broker(
    service: ServiceProcess, libraries: Path, tmp_path: Path, form: str
) -> None:
    address = service.url.removeprefix("http://")
    measured = measure(service, libraries, tmp_path, "-i", "http", "-u", address, *IDENTITY, *FORMS[form])
    assert measured >= REQUESTS


def test_it_measures_a_model_over_grpc(
    service: ServiceProcess, call_port: int, libraries: Path, tmp_path: Path
) -> None:
    over_grpc = ("-i", "grpc", "-u", f"127.0.0.1:{call_port}")
    assert measure(service, libraries, tmp_path, *over_grpc, *IDENTITY) >= REQUESTS


def test_it_measures_a_stream_over_grpc(
    service: ServiceProcess, call_port: int, libraries: Path, tmp_path: Path
) -> None:
    over_grpc = ("-i", "grpc", "-u", f"127.0.0.1:{call_port}")
    assert measure(service, libraries, tmp_path, *over_grpc, *stream_options(tmp_path)) >= REQUESTS


def stream_options(folder: Path) -> tuple[str, ...]:
    data = folder / "data.json"
    given = {"text_input": ["abc"], "N": [3], "DELAY_MS": [0], "FAIL_AT": [-1]}
    data.write_text(json.dumps({"data": [given]}), encoding="utf-8")
    return ("--streaming", "-m", "stream_n", "--input-data", str(data))


def test_hangs_that_are_no_accident_are_an_error() -> None:
    seldom = Hangs(HANGS_WITH_4_CLIENTS)
    for tries in range(100):
        seldom.note(hung=tries % 40 == 0)
    often = Hangs(HANGS_WITH_4_CLIENTS)
    often.note(hung=True)
    with pytest.raises(RuntimeError, match=r"hung 2 times in 2; with Triton alone it hangs in at most 3\.1%"):
        often.note(hung=True)


@pytest.mark.evidence
@pytest.mark.timeout(3600)
def test_with_triton_alone_it_hangs_no_more_often_than_is_accepted(
    triton: Triton, libraries: Path, tmp_path: Path
) -> None:
    over_http = ("-i", "http", "-u", triton.url.removeprefix("http://"))
    over_grpc = ("-i", "grpc", "-u", f"127.0.0.1:{triton.grpc_port}")
    few, many = Hangs(HANGS_WITH_4_CLIENTS), Hangs(HANGS_WITH_16_CLIENTS)
    ways: list[tuple[Hangs, str, tuple[str, ...]]] = [
        (few, "4", (*over_http, *IDENTITY)),
        (few, "4", (*over_grpc, *IDENTITY)),
        (few, "4", (*over_grpc, *stream_options(tmp_path))),
        (many, "16", (*over_http, *IDENTITY)),
    ]
    for n, (hangs, clients, way) in enumerate(ways):
        for run in range(60):
            told = tmp_path / f"told-{n}-{run}.json"
            analyzed(libraries, told, hangs, *way, *("--concurrency-range", clients, "--request-count", "60"))
    for clients, hangs in (("4", few), ("16", many)):
        print(f"{clients} clients: {hangs.hung} of {hangs.tries} hung")


IDENTITY = ("-m", "identity_fp32", "--shape", "INPUT0:1,16")


def measure(service: ServiceProcess, libraries: Path, folder: Path, *options: str) -> int:
    """How many requests it has had answered."""
    given = ("-H", f"authorization: Bearer {service.token}", "--concurrency-range", "4")
    told = folder / "told.json"
    return len(analyzed(libraries, told, OF_THESE_TESTS, *options, *given, "--request-count", str(REQUESTS)))
