"""Models of a real Triton and tasks of a real Ray on one GPU: each makes room for the other by one policy."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http
from gpubroker_server.adapters.sql.store import open_store
from tritonclient.utils import InferenceServerException

from tests.chaos.forked import ForkedServiceOnRay
from tests.chaos.history import violations
from tests.contracts.scenes import log_of
from tests.e2e.hands import Hands
from tests.e2e.policy import POLICY
from tests.e2e.service_process import GIB, ServiceProcess, until
from tests.triton.server import Triton

MODEL = "identity_fp32"
ROOM_SECONDS = 60.0
"""A fifth of what `triton.wanted_seconds` is by default."""


@pytest.fixture
def triton(tmp_path: Path) -> Iterator[Triton]:
    with Triton(tmp_path / "triton") as running:
        yield running


@pytest.fixture
def served(triton: Triton, tmp_path: Path) -> Iterator[ServiceProcess]:
    with serving(triton, tmp_path, policy=POLICY) as running:
        yield running


@contextmanager
def serving(triton: Triton, folder: Path, **settings: Any) -> Iterator[ServiceProcess]:
    """One simulated GPU of 24 GiB, of which the model takes 20."""
    server = {
        "name": "main",
        "http_url": triton.url,
        "grpc_url": f"http://127.0.0.1:{triton.grpc_port}",
        "node": "local",
        "models": {MODEL: {"gpu_mb": 20 * GIB}},
    }
    with ForkedServiceOnRay(
        folder / "data",
        ray={"node_name": "local", "spares": 1, "warm_runners": 1},
        simulated_devices=[{"kind": "sim-24g", "memory_mb": 24 * GIB, "count": 1}],
        triton={"servers": [server]},
        **settings,
    ) as running:
        yield running


def infer(service: ServiceProcess, seconds: float = 60.0, priority: int = 79) -> list[float]:
    """By a client that waits so long."""
    tensor = tritonclient.http.InferInput("INPUT0", [1, 2], "FP32")
    tensor.set_data_from_numpy(np.array([[1, 2]], np.float32))
    address = service.url.removeprefix("http://")
    headers = {"Authorization": f"Bearer {service.token}", "x-priority": str(priority)}
    with tritonclient.http.InferenceServerClient(address, network_timeout=seconds) as client:
        answer: Any = client.infer(MODEL, [tensor], headers=headers).as_numpy("OUTPUT0")
    found: list[float] = answer.flatten().tolist()
    return found


def is_answered(service: ServiceProcess, seconds: float, priority: int) -> bool:
    try:
        return infer(service, seconds, priority) == [1, 2]
    except (InferenceServerException, TimeoutError, OSError):
        return False


def test_models_and_tasks_take_each_others_room_and_no_byte_is_given_twice(
    served: ServiceProcess, triton: Triton, tmp_path: Path
) -> None:
    hands, broker = Hands(served.broker, tmp_path), served.broker
    assert infer(served) == [1, 2]
    first = broker.model(MODEL)

    critical = hands.at_work("critical", gpu_mb=20 * GIB, priority=95)
    assert broker.model(MODEL).state == "waiting", "it is wanted still, and has left for the task"
    hands.end(critical)
    until(lambda: broker.model(MODEL).state == "resident", "it is back when there is room")
    broker.unload_model(MODEL)
    until(lambda: broker.model(MODEL).state == "cold", "it has left")

    stubborn = broker.submit(
        "tests.e2e.work:stand_still",
        kwargs={"go": str(tmp_path / "never")},
        gpu_mb=20 * GIB,
        priority=10,
        grace_seconds=2,
    )
    until(lambda: broker.get(stubborn).state == "running", "it runs, and hears no notice")
    until(lambda: is_answered(served, 0.5, 96), "who gives up after half a second is answered in the end")
    preempted = broker.get(stubborn)
    assert (preempted.state, preempted.preemptions) == ("pending", 1), "it was stopped once for all of them"
    assert first.task != broker.model(MODEL).task
    broker.cancel(stubborn)

    served.stop()
    assert violations(asyncio.run(history(served))) == []


@pytest.mark.parametrize("priority", ["interactive", pytest.param("batch", marks=pytest.mark.evidence)])
def test_an_idle_model_leaves_for_a_task_by_the_settings_as_shipped(
    triton: Triton, tmp_path: Path, priority: str
) -> None:
    """The task has the priority that requests have by default, or that of tasks, which is lower."""
    with serving(triton, tmp_path) as served:
        broker, hands = served.broker, Hands(served.broker, tmp_path)
        assert infer(served) == [1, 2]
        began_at = time.monotonic()
        [task] = hands.end(hands.at_work("task", gpu_mb=20 * GIB, priority=priority))
        assert time.monotonic() - began_at < ROOM_SECONDS, "not as late as the model is no more wanted"
        assert (task.attempt, task.preemptions) == (1, 0)
        assert broker.model(MODEL).state == "cold"
        assert infer(served) == [1, 2], "it is back for the next request"


async def history(service: ServiceProcess) -> Any:
    store = await open_store(f"sqlite:///{service.data_dir / 'gpubroker.db'}")
    try:
        return await log_of(store)
    finally:
        await store.close()
