"""A full disk is named to whoever asks, said once in the log, and over as soon as there is room."""

import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.bootstrap.refusals import WAITING
from tests.chaos.forked import ForkedService
from tests.e2e.service_process import ServiceProcess, until
from tests.mounts import mounted

SMALL_BYTES = 32 * 1024
SAID, OVER = "disk full; make room", "the disk has room again"


def readiness(service: ServiceProcess) -> tuple[int, str]:
    answer = httpx.get(f"{service.url}/readyz")
    return answer.status_code, answer.json()["parts"]["disk"]


def is_told_while_it_lasts(
    service: ServiceProcess, fill: Callable[[], Any], clear: Callable[[], Any]
) -> None:
    broker = service.broker
    before = broker.submit("tests.e2e.work:add", cpu=0.5)
    broker.wait(before)
    fill()
    until(lambda: readiness(service)[0] == 503, "it is not ready")
    said = readiness(service)[1]
    assert said.startswith(f"disk full: {service.data_dir} (")
    assert broker.stats().disk_full == said
    assert "service-disk-full" in {one.kind for one in broker.diagnostics()}
    bearer = {"Authorization": f"Bearer {service.token}"}
    large = {"run": {"entrypoint": "tests.e2e.work:add", "args": ["x" * 50_000]}}
    refused = httpx.post(f"{service.url}/tasks", json=large, headers=bearer)
    assert (refused.status_code, refused.json()["code"]) == (503, "store-unavailable")
    assert refused.json()["detail"].startswith("disk full: ")
    assert broker.get(before).state == "succeeded", "what is there can be read"
    clear()
    until(lambda: readiness(service) == (200, "ok"), "it is ready again")
    assert broker.wait(broker.submit("tests.e2e.work:add", cpu=0.5)).state == "succeeded"
    log = service.log()
    assert (log.count(SAID), log.count(OVER)) == (1, 1)


@pytest.mark.provokes("service-disk-full")
def test_files_that_cannot_grow_are_a_full_disk(tmp_path: Path) -> None:
    with ForkedService(tmp_path / "data", **WAITING) as service:
        soft, hard = resource.prlimit(service.pid, resource.RLIMIT_FSIZE)
        is_told_while_it_lasts(
            service,
            lambda: resource.prlimit(service.pid, resource.RLIMIT_FSIZE, (SMALL_BYTES, hard)),
            lambda: resource.prlimit(service.pid, resource.RLIMIT_FSIZE, (soft, hard)),
        )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Needs the right to mount."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=8m", "none"):
        yield tmp_path / "disk"


@pytest.mark.evidence
def test_a_file_system_without_room_is_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    data, filler = small_disk / "data", small_disk / "filler"
    data.mkdir()
    (tmp_path / "data").symlink_to(data)

    def fill() -> None:
        with filler.open("wb", buffering=0) as file:
            for size in (65536, 4096, 1):
                while True:
                    try:
                        file.write(bytes(size))
                    except OSError:
                        break

    with ForkedService(tmp_path / "data", **WAITING) as service:
        is_told_while_it_lasts(service, fill, filler.unlink)
