"""Two real Tritons behind one service: clients see one, and one that is killed is missed by nobody."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from gpubroker_server.core.serving.circuit_breaker import BreakerRules
from tritonclient.utils import InferenceServerException

from tests.chaos.forked import ForkedService
from tests.e2e.service_process import GIB, ServiceProcess, until
from tests.patience import PATIENCE_SECONDS
from tests.triton.analyzer import analyzer_libraries
from tests.triton.raw import Door, directly, through
from tests.triton.script import given
from tests.triton.server import Triton, free_ports
from tests.triton.test_perf_analyzer import FORMS, IDENTITY, REQUESTS, measure

LOADED = {"a": ("identity_fp32", "echo_bytes"), "b": ("identity_fp32", "line_fp32")}
MODELS = "/v2/models"
BODY = json.dumps(
    {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}]}
).encode()


def settings_of(name: str, triton: Triton, **more: object) -> dict[str, object]:
    grpc_url = f"http://127.0.0.1:{triton.grpc_port}"
    return {"name": name, "http_url": triton.url, "grpc_url": grpc_url, **more}


class Scene:
    def __init__(self, a: Triton, b: Triton, service: ServiceProcess, call_port: int) -> None:
        self.a = a
        self.b = b
        self.service = service
        self.address = f"127.0.0.1:{call_port}"

    @property
    def token(self) -> dict[str, str]:
        """A new one each time: the client over HTTP adds to it."""
        return {"authorization": f"Bearer {self.service.token}"}

    def door(self) -> Door:
        return through(self.service)

    def infer(self, door: Door, model: str = "identity_fp32", **headers: str) -> int:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        return door.ask("POST", f"{MODELS}/{model}/infer", BODY, sent).status

    def is_up(self, name: str) -> bool:
        [server] = [one for one in self.service.broker.stats().model_servers if one.name == name]
        assert server.grpc is not None
        return server.http.up and server.grpc.up and not server.http.fault

    def know_all(self) -> None:
        """What each has, has been read."""
        until(lambda: all(self.is_up(name) for name in LOADED), "both servers answer")
        for model in ("line_fp32", "echo_bytes"):
            until(lambda: self.knows(model), "what they have is known")  # noqa: B023  # called at once

    def knows(self, model: str) -> bool:
        return self.door().ask("GET", f"{MODELS}/{model}/ready").status == 200


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder, [port] = tmp_path_factory.mktemp("several"), free_ports(1)
    with Triton(folder / "a", LOADED["a"]) as a, Triton(folder / "b", LOADED["b"]) as b:
        servers = [settings_of("a", a), settings_of("b", b)]
        triton = {"servers": servers, "grpc_port": port}
        with ForkedService(folder / "data", engine="simulated", triton=triton) as service:
            running = Scene(a, b, service, port)
            running.know_all()
            yield running


def executions(triton: Triton, model: str = "identity_fp32") -> int:
    """It counts a request shortly after it has answered it."""
    answer = directly(triton).ask("GET", f"{MODELS}/{model}/stats").body
    return int(json.loads(answer)["model_stats"][0]["execution_count"])


def test_clients_of_both_kinds_find_each_model_where_it_is(scene: Scene) -> None:
    array = np.ones((1, 1), np.float32)
    with (
        tritonclient.http.InferenceServerClient(scene.service.url.removeprefix("http://")) as over_http,
        tritonclient.grpc.InferenceServerClient(scene.address) as over_grpc,
    ):
        for kit, client in ((tritonclient.http, over_http), (tritonclient.grpc, over_grpc)):
            for model, values in (("identity_fp32", array), ("line_fp32", array[0])):
                answer = client.infer(model, [given(kit, "INPUT0", "FP32", values)], headers=scene.token)
                assert answer.as_numpy("OUTPUT0").tolist() == values.tolist()
            texts = np.array([b"ab"], dtype=np.object_)
            answer = client.infer(
                "echo_bytes", [given(kit, "text_input", "BYTES", texts)], headers=scene.token
            )
            assert answer.as_numpy("text_output").tolist() == [b"ba"]
            assert client.is_model_ready("line_fp32", headers=scene.token)
            assert client.is_server_ready(headers=scene.token)


def test_requests_are_shared_out_and_statistics_and_index_cover_both(scene: Scene) -> None:
    before = [executions(one) for one in (scene.a, scene.b)]
    door = scene.door()
    assert {scene.infer(door) for _ in range(10)} == {200}
    after = [count + 5 for count in before]
    until(lambda: [executions(one) for one in (scene.a, scene.b)] == after, "each has answered five")
    [told] = json.loads(door.ask("GET", f"{MODELS}/identity_fp32/stats").body)["model_stats"]
    assert told["execution_count"] == sum(after)
    with tritonclient.grpc.InferenceServerClient(scene.address) as client:
        summed = client.get_inference_statistics("identity_fp32", headers=scene.token, as_json=True)
        assert summed["model_stats"][0]["execution_count"] == str(sum(after))
        index = client.get_model_repository_index(headers=scene.token, as_json=True)["models"]
        assert {row["name"] for row in index if row.get("state") == "READY"} == set(LOADED["a"] + LOADED["b"])
        assert len(index) == len({row["name"] for row in index})
    rows = json.loads(door.ask("POST", "/v2/repository/index").body)
    assert sorted(row["name"] for row in rows) == sorted(row["name"] for row in index)
    listed = {
        (one.server, one.name) for one in scene.service.broker.models().items if one.state == "resident"
    }
    assert listed == {(name, model) for name, models in LOADED.items() for model in models}


@pytest.mark.evidence
def test_tritons_load_generator_measures_both_as_one(scene: Scene, tmp_path: Path) -> None:
    """It is particular about statistics, which it asks for before and after."""
    libraries = analyzer_libraries(tmp_path / "libraries")
    address = scene.service.url.removeprefix("http://")
    for way in (("-i", "http", "-u", address, *FORMS["binary"]), ("-i", "grpc", "-u", scene.address)):
        folder = tmp_path / way[1]
        folder.mkdir()
        assert measure(scene.service, libraries, folder, *way, *IDENTITY) >= REQUESTS


def test_a_server_killed_under_load_costs_only_its_requests_in_flight(scene: Scene) -> None:
    """Half of the clients say that their requests may be done twice: those lose nothing. The others lose what
    was at it, and what was sent to it until so many had failed that it is asked no more."""
    killed, clients, asked = [False], 4, 20

    def ask(**headers: str) -> list[int]:
        door, told = scene.door(), []
        for number in count():
            told.append(scene.infer(door, **headers))
            if killed[0] and number >= asked:
                return told[-asked:]
        raise AssertionError

    with ThreadPoolExecutor() as pool:
        plain = [pool.submit(ask) for _ in range(clients)]
        twice = [pool.submit(ask, x_idempotent="true") for _ in range(clients)]
        until(lambda: executions(scene.b) > 20, "both are at work")
        scene.b.kill()
        killed[0] = True
        after = Counter(status for one in plain for status in one.result())
        assert [set(one.result()) for one in twice] == [{200}] * clients
    assert after[502] <= clients + BreakerRules().faults
    assert after[200] + after[502] == clients * asked
    check_through_only_a(scene)
    scene.b.start()
    scene.know_all()
    before = executions(scene.b)
    assert {scene.infer(scene.door()) for _ in range(4)} == {200}
    until(lambda: executions(scene.b) == before + 2, "it has its share again")


def check_through_only_a(scene: Scene) -> None:
    """What was only at the other one cannot be reached, which its client is told."""
    door = scene.door()
    assert {scene.infer(door) for _ in range(4)} == {200}
    assert scene.infer(door, "line_fp32") == 503
    assert door.ask("GET", "/v2/health/ready").status == 200


def test_a_model_of_a_dead_server_is_brought_at_another_one(tmp_path: Path) -> None:
    size = {"identity_fp32": {"gpu_mb": 20 * GIB}}
    with Triton(tmp_path / "a") as a, Triton(tmp_path / "b") as b:
        held: dict[str, Any] = {"node": "local", "models": size}
        servers = [
            settings_of("a", a, devices=["GPU-sim-local-0"], **held),
            settings_of("b", b, devices=["GPU-sim-local-1"], **held),
        ]
        with ForkedService(
            tmp_path / "data", engine="simulated", ray={"node_name": "local"}, triton={"servers": servers}
        ) as service:
            scene = Scene(a, b, service, 0)
            assert scene.infer(scene.door()) == 200
            [first] = [one.server for one in service.broker.models().items if one.state == "resident"]
            (a if first == "a" else b).kill()
            until(lambda: scene.infer(scene.door()) == 200, "the other one has it")
            stood = {one.server: one.state for one in service.broker.models().items if one.task}
            assert stood == {"a": "resident", "b": "resident"}, "who may have it still counts"


def called(scene: Scene) -> str:
    """How a call of Triton's client ends."""
    with tritonclient.grpc.InferenceServerClient(scene.address) as client:
        tensor = given(tritonclient.grpc, "INPUT0", "FP32", np.ones([1, 1], np.float32))
        try:
            client.infer("identity_fp32", [tensor], headers=scene.token)
        except InferenceServerException as refused:
            return str(refused)
    return "answered"


def streamed(scene: Scene) -> str:
    """How the first message of a stream of Triton's client ends."""
    heard: SimpleQueue[tuple[object, Exception | None]] = SimpleQueue()
    with tritonclient.grpc.InferenceServerClient(scene.address) as client:
        tensor = given(tritonclient.grpc, "INPUT0", "FP32", np.ones([1, 1], np.float32))
        client.start_stream(lambda result, error: heard.put((result, error)), headers=scene.token)
        client.async_stream_infer("identity_fp32", [tensor])
        _, error = heard.get(timeout=PATIENCE_SECONDS)
        client.stop_stream()
    return "answered" if error is None else str(error)


@pytest.mark.parametrize("how", [called, streamed, None], ids=["called", "streamed", "over HTTP"])
def test_a_restarted_server_traps_no_request_while_another_has_the_model(
    tmp_path: Path, how: Callable[[Scene], str] | None
) -> None:
    """It comes back empty and without the model's files, so waiting for it would be in vain."""
    size = {"identity_fp32": {"gpu_mb": 20 * GIB}}
    [port] = free_ports(1)
    with Triton(tmp_path / "a") as a, Triton(tmp_path / "b") as b:
        held: dict[str, Any] = {"node": "local", "models": size}
        servers = [
            settings_of("a", a, devices=["GPU-sim-local-0"], **held),
            settings_of("b", b, devices=["GPU-sim-local-1"], **held),
        ]
        triton = {"servers": servers, "grpc_port": port}
        with ForkedService(
            tmp_path / "data", engine="simulated", ray={"node_name": "local"}, triton=triton
        ) as service:
            scene = Scene(a, b, service, port)
            for name in ("a", "b"):
                loaded = scene.door().ask(
                    "POST", f"/models/identity_fp32/load?server={name}", b'{"wait_seconds": 30}'
                )
                assert loaded.status == 200
            a.kill()
            a.repository.joinpath("identity_fp32").rename(tmp_path / "away")
            a.start()
            with ThreadPoolExecutor(12) as pool:
                if how is None:
                    asked = [pool.submit(scene.infer, scene.door(), x_idempotent="true") for _ in range(12)]
                    assert [one.result(timeout=20) for one in asked] == [200] * 12
                else:
                    told = [pool.submit(how, scene) for _ in range(12)]
                    assert [one.result(timeout=20) for one in told] == ["answered"] * 12
