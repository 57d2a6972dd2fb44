"""Triton's own load generator, in C++: it asks for metadata, configuration and statistics besides."""

import json
from pathlib import Path

import pytest

from tests.e2e.service_process import ServiceProcess
from tests.triton.analyzer import analyzed, analyzer_libraries

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
    data = tmp_path / "data.json"
    given = {"text_input": ["abc"], "N": [3], "DELAY_MS": [0], "FAIL_AT": [-1]}
    data.write_text(json.dumps({"data": [given]}), encoding="utf-8")
    stream = ("-i", "grpc", "-u", f"127.0.0.1:{call_port}", "--streaming", "-m", "stream_n")
    assert measure(service, libraries, tmp_path, *stream, "--input-data", str(data)) >= REQUESTS


IDENTITY = ("-m", "identity_fp32", "--shape", "INPUT0:1,16")


def measure(service: ServiceProcess, libraries: Path, folder: Path, *options: str) -> int:
    """How many requests it has had answered."""
    given = ("-H", f"authorization: Bearer {service.token}", "--concurrency-range", "4")
    told = folder / "told.json"
    return len(analyzed(libraries, told, *options, *given, "--request-count", str(REQUESTS)))
