"""Requests wait in front of a real model of one instance, in the order of our priorities."""

import json
import queue
import re
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import ModuleType

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.chaos.forked import ForkedService
from tests.e2e.service_process import ServiceProcess, until
from tests.patience import PATIENCE_SECONDS
from tests.triton.raw import Answer, Door, through
from tests.triton.script import given
from tests.triton.server import Triton, free_ports

PATH = "/v2/models/slow/infer"
BODY = json.dumps(
    {
        "inputs": [
            {"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [1.0]},
            {"name": "SLEEP_MS", "datatype": "INT32", "shape": [1], "data": [20]},
        ]
    }
).encode()


class Scene:
    """Triton is asked one request at once, two more may wait."""

    def __init__(self, triton: Triton, service: ServiceProcess, call_port: int) -> None:
        self.triton = triton
        self.service = service
        self.call_port = call_port
        self._pool = ThreadPoolExecutor()

    def door(self) -> Door:
        return through(self.service)

    def asks(self, count: int, **headers: str) -> Future[Answer]:
        """So many wait then."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        asked = self._pool.submit(self.door().ask, "POST", PATH, BODY, sent)
        self.wait(count)
        return asked

    def wait(self, count: int) -> None:
        until(lambda: self.figure("requests_waiting") == count, f"{count} requests wait")

    def holds(self) -> Future[Answer]:
        """Nothing is answered any more; one request is at it."""
        self.triton.pause()
        asked = self.asks(0)
        until(lambda: self.figure("requests_in_flight") == 1, "a request is under way")
        return asked

    def figure(self, name: str) -> int:
        request = urllib.request.Request(
            f"{self.service.url}/metrics", headers={"Authorization": f"Bearer {self.service.token}"}
        )
        with urllib.request.urlopen(request) as answer:
            lines = answer.read().decode().splitlines()
        begin = f'gpubroker_model_{name}{{model="slow"}} '
        return sum(int(float(line.removeprefix(begin))) for line in lines if line.startswith(begin))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder, [port] = tmp_path_factory.mktemp("lanes"), free_ports(1)
    with Triton(folder / "triton", loaded=("slow",)) as triton:
        server = {"name": "main", "http_url": triton.url, "grpc_url": f"http://127.0.0.1:{triton.grpc_port}"}
        lanes = {"slots": {"slow": 1}, "waiting": 2, "tenant_share": 1.0}
        settings = {"servers": [server], "grpc_port": port, **lanes}
        with ForkedService(folder / "data", engine="simulated", triton=settings) as service:
            yield Scene(triton, service, port)


@pytest.fixture
def scene(running: Scene) -> Iterator[Scene]:
    yield running
    running.triton.go_on()
    until(lambda: running.figure("requests_in_flight") == 0, "nothing is under way")


def waited(asked: Future[Answer]) -> float:
    answer = asked.result()
    assert answer.status == 200, answer
    return float(dict(answer.headers)["x-queue-seconds"])


def test_a_higher_priority_overtakes_waiting_requests(scene: Scene) -> None:
    first = scene.holds()
    low = scene.asks(1, x_priority="background")
    high = scene.asks(2, x_priority="critical")
    scene.triton.go_on()
    assert "x-queue-seconds" not in dict(first.result().headers)
    assert waited(low) > waited(high)


def test_the_place_of_a_client_that_goes_is_free(scene: Scene) -> None:
    first = scene.holds()
    door = scene.door()
    door.connection.request("POST", PATH, BODY, {"Authorization": f"Bearer {scene.service.token}"})
    scene.wait(1)
    door.connection.close()
    scene.wait(0)
    scene.triton.go_on()
    assert first.result().status == 200


KITS: list[ModuleType] = [tritonclient.http, tritonclient.grpc]


@pytest.mark.parametrize("kit", KITS)
def test_tritons_client_shows_why_it_must_come_again(scene: Scene, kit: ModuleType) -> None:
    scene.holds()
    late = refusal(scene, kit, {"x-timeout-seconds": "0.01"})
    assert re.match(r"the request waited \d+\.\d s for a slot of this model, as long as it may", late)
    scene.asks(1)
    scene.asks(2)
    assert refusal(scene, kit, {"x-priority": "1"}).startswith("all waiting places of this model are taken")
    assert refusal(scene, kit, {"x-priority": "most"}).startswith('the header x-priority is "most"; write 0')


def refusal(scene: Scene, kit: ModuleType, headers: dict[str, str]) -> str:
    address = scene.service.url.removeprefix("http://")
    if kit is tritonclient.grpc:
        address = f"127.0.0.1:{scene.call_port}"
    inputs = [given(kit, "INPUT0", "FP32", np.zeros(1, np.float32))]
    with kit.InferenceServerClient(address) as client, pytest.raises(InferenceServerException) as found:
        client.infer("slow", inputs, headers={"authorization": f"Bearer {scene.service.token}", **headers})
    return str(found.value.message())


def test_an_idle_stream_blocks_no_other_and_goes_on_when_it_is_used_again(scene: Scene) -> None:
    """The model has one slot; both streams stay open."""
    kit, headers = tritonclient.grpc, {"authorization": f"Bearer {scene.service.token}"}
    inputs = [given(kit, "INPUT0", "FP32", np.ones(1, np.float32))]
    with (
        kit.InferenceServerClient(f"127.0.0.1:{scene.call_port}") as first,
        kit.InferenceServerClient(f"127.0.0.1:{scene.call_port}") as second,
    ):
        answers: queue.Queue[tuple[str, object, object]] = queue.Queue()
        for name, client in (("first", first), ("second", second)):
            said = partial(lambda name, result, error: answers.put((name, result, error)), name)
            client.start_stream(said, headers=headers)
        for name, client in (("first", first), ("second", second), ("first", first)):
            client.async_stream_infer("slow", inputs)
            told, result, error = answers.get(timeout=PATIENCE_SECONDS)
            assert (told, error) == (name, None)
            assert result is not None
