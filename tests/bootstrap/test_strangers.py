"""A client with a token beside thousands of connections without one, which all come from its own address."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from msgspec import Struct

from tests.bootstrap.refusals import WAITING
from tests.chaos.forked import ForkedService
from tests.e2e.service_process import ROOT, ServiceProcess
from tests.patience import PATIENCE_SECONDS

PER_SECOND = 20
MOST_P99_SECONDS = 0.1
MAX_GROWTH_BYTES = 50 * 2**20


class Measured(Struct, frozen=True):
    p50_seconds: float
    p99_seconds: float
    growth_bytes: int
    most_connections: int


@contextmanager
def strangers(service: ServiceProcess, idle: int) -> Iterator[None]:
    port = urlsplit(service.url).port
    arguments = [sys.executable, "-m", "tests.bootstrap.strangers", str(port), str(idle)]
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline(), "all are connected"
            yield
        finally:
            process.kill()


def connected(service: ServiceProcess) -> HTTPConnection:
    return HTTPConnection("127.0.0.1", urlsplit(service.url).port, PATIENCE_SECONDS)


def ask(connection: HTTPConnection, token: str) -> None:
    connection.request("GET", "/tasks", headers={"Authorization": f"Bearer {token}"})
    answer = connection.getresponse()
    answer.read()
    assert answer.status == 200


def measured(service: ServiceProcess, idle: int, seconds: float) -> Measured:
    """Every second request comes on a connection of its own."""
    process = psutil.Process(service.pid)
    took, connections = [], []
    with closing(connected(service)) as kept:
        ask(kept, service.token)
        before = most = process.memory_info().rss
        with strangers(service, idle):
            began = time.monotonic()
            for number in range(int(seconds * PER_SECOND)):
                time.sleep(max(0.0, began + number / PER_SECOND - time.monotonic()))  # the rate
                asked = time.monotonic()
                if number % 2:
                    ask(kept, service.token)
                else:
                    with closing(connected(service)) as another:
                        ask(another, service.token)
                took.append(time.monotonic() - asked)
                most = max(most, process.memory_info().rss)
                connections.append(process.num_fds())
    took.sort()
    return Measured(took[len(took) // 2], took[int(len(took) * 0.99)], most - before, max(connections))


def test_a_client_with_a_token_is_answered_beside_many_without(tmp_path: Path) -> None:
    """The short form: it judges no time."""
    with ForkedService(tmp_path / "data", **WAITING) as service:
        found = measured(service, idle=600, seconds=2.0)
    assert found.growth_bytes < MAX_GROWTH_BYTES, found
    assert found.most_connections < 600, found


@pytest.mark.evidence
def test_three_thousand_connections_without_a_token_slow_no_client_down(tmp_path: Path) -> None:
    with ForkedService(tmp_path / "data", **WAITING) as service:
        found = measured(service, idle=3000, seconds=30.0)
    print(found)
    assert found.p99_seconds <= MOST_P99_SECONDS, found
    assert found.growth_bytes <= MAX_GROWTH_BYTES, found
