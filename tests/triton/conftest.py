"""One real Triton for all tests of this folder, and one service in front. Who harms either opens its own."""

from collections.abc import Iterator

import pytest

from tests.chaos.forked import ForkedService
from tests.e2e.service_process import ServiceProcess
from tests.triton.server import Triton, free_ports

LOADED = ("any_type", "doubles", "echo_bytes", "identity_fp32", "line_fp32", "queued", "stream_n")
"""From the start; the others of the folder `models` are for tests of loading."""


@pytest.fixture(scope="session")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    with Triton(tmp_path_factory.mktemp("triton"), loaded=LOADED) as running:
        yield running


@pytest.fixture(scope="session")
def call_port() -> int:
    """Where the service speaks gRPC."""
    [port] = free_ports(1)
    return port


@pytest.fixture(scope="session")
def service(
    triton: Triton, call_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServiceProcess]:
    home = tmp_path_factory.mktemp("service") / "data"
    server = {"name": "main", "http_url": triton.url, "grpc_url": f"http://127.0.0.1:{triton.grpc_port}"}
    running = ForkedService(
        home,
        engine="simulated",
        triton={"servers": [server], "grpc_port": call_port, "slots": {"queued": 64}},
        model_types={"nightly": {"priority": 30, "max_retries": 2, "timeout_seconds": 0.5}},
    ).start()
    yield running
    assert running.terminate() == 0
