"""One service with a local Ray for all tests in this folder."""

from collections.abc import Iterator
from typing import Any

import pytest
from gpubroker import Broker

from tests.chaos.forked import ForkedServiceOnRay
from tests.e2e.guarded_disk import GuardedDisk, guarded_disk
from tests.e2e.policy import POLICY
from tests.e2e.service_process import ServiceProcess
from tests.e2e.wheels import make_wheel

NAMED = {"answers": {"requirements": ["answerlib==1.0"]}}
"""An environment of the operator, of a package that is on disk."""
OVERLOAD = {"host_memory_percent": {"high": 0.2, "low": 0.1, "seconds": 0}}
"""Any machine uses more of its memory."""


@pytest.fixture(scope="package")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedDisk]:
    """Its roots are on the service's node."""
    with guarded_disk(tmp_path_factory.mktemp("guarded")) as disk:
        yield disk


@pytest.fixture(scope="package")
def _service(tmp_path_factory: pytest.TempPathFactory, guarded: GuardedDisk) -> Iterator[ServiceProcess]:
    home = tmp_path_factory.mktemp("service") / "data"
    ray = {"spares": 4, "work_dir": str(home.with_name("work"))}
    settings: dict[str, Any] = {"ray": ray, "policy": POLICY, "limits": {"result_bytes": 2**20}}
    settings["fleet"] = {**guarded.settings, "overload": OVERLOAD}
    settings["entrypoints"] = [
        "tests.e2e.work:*",
        "tests.e2e.environment_work:*",
        "bench.tasks:*",
        "examples.elastic:*",
    ]
    wheels = make_wheel(home.with_name("wheels")).parent
    settings["environments"] = {"find_links": [str(wheels)], "offline": True, "named": NAMED}
    settings["profiles"] = {"science": {"cpu": 0.5, "environment": "answers"}}
    with ForkedServiceOnRay(home, submit_from_tasks=True, **settings) as running:
        yield running


@pytest.fixture
def service(_service: ServiceProcess) -> Iterator[ServiceProcess]:
    """With two simulated GPUs of 24 GiB, a local Ray, and nothing to do: a test may also kill it."""
    yield _service
    _service.clear()


@pytest.fixture
def broker(service: ServiceProcess) -> Broker:
    return service.broker
