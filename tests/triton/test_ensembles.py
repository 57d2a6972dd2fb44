"""An ensemble of two models at a real Triton: its size, its steps, and what follows the settings."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc
import tritonclient.http
from gpubroker import Broker
from tritonclient.utils import InferenceServerException

from tests.chaos.forked import ForkedService
from tests.e2e.service_process import GIB, ServiceProcess, until
from tests.triton.raw import through
from tests.triton.server import Triton, free_ports
from tests.triton.test_residency import infer, leased_mb, ready, settings, state_of

STEPS = {"first_step": {"gpu_mb": 10 * GIB}, "second_step": {"gpu_mb": 3 * GIB}}
PAIR = """
name: "pair"
platform: "ensemble"
max_batch_size: 0
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
ensemble_scheduling {
  step [
    { model_name: "first_step" model_version: -1
      input_map { key: "INPUT0" value: "INPUT0" } output_map { key: "OUTPUT0" value: "BETWEEN" } },
    { model_name: "second_step" model_version: -1
      input_map { key: "INPUT0" value: "BETWEEN" } output_map { key: "OUTPUT0" value: "OUTPUT0" } }
  ]
}
"""
WHOLE = ["first_step", "pair", "second_step"]


@pytest.fixture(scope="module")
def own_triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    """Its repository has the ensemble `pair` of two different models."""
    with Triton(tmp_path_factory.mktemp("ensembles")) as running:
        for name in STEPS:
            shutil.copytree(running.repository / "line_fp32", running.repository / name)
            config = running.repository / name / "config.pbtxt"
            config.write_text(config.read_text("utf-8").replace("line_fp32", name), "utf-8")
        (running.repository / "pair" / "1").mkdir(parents=True)
        (running.repository / "pair" / "config.pbtxt").write_text(PAIR, "utf-8")
        yield running


@pytest.fixture(autouse=True)
def is_empty(own_triton: Triton) -> Iterator[None]:
    """No test leaves a model in the server."""
    yield
    with tritonclient.http.InferenceServerClient(own_triton.url.removeprefix("http://")) as client:
        for model in ready(own_triton):
            client.unload_model(model, unload_dependents=model == "pair")
    until(lambda: ready(own_triton) == [], "nothing is left in the server")


def chosen(triton: Triton, models: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """`more`: settings of the server."""
    found = settings(triton, "simulated")
    found["triton"]["servers"][0] |= {"models": STEPS if models is None else models, **more}
    return found


def shown(broker: Broker) -> dict[str, str]:
    """The state of each model that is part of the ensemble."""
    return {model.name: model.state for model in broker.models().items if model.name in WHOLE}


def load(service: ServiceProcess, model: str = "pair") -> None:
    answer = through(service).ask("POST", f"/models/{model}/load", b'{"wait_seconds": 30}')
    assert answer.status == 200, answer.body


def test_ensemble_of_two_models_has_the_size_of_both_and_shows_them(
    own_triton: Triton, tmp_path: Path
) -> None:
    with ForkedService(tmp_path / "data", **chosen(own_triton)) as service:
        assert infer(service, "pair") == [1, 2, 3]
        assert ready(own_triton) == WHOLE
        assert leased_mb(service.broker) == [13 * GIB]
        assert shown(service.broker) == dict.fromkeys(WHOLE, "resident")
        service.broker.unload_model("pair")
        until(lambda: ready(own_triton) == [], "the steps leave with it")
        until(lambda: leased_mb(service.broker) == [0], "their memory is free")
        assert shown(service.broker) == dict.fromkeys(WHOLE, "cold")


def test_step_of_a_resident_ensemble_answers_without_memory_of_its_own(
    own_triton: Triton, tmp_path: Path
) -> None:
    with ForkedService(tmp_path / "data", **chosen(own_triton)) as service:
        load(service)
        assert infer(service, "first_step") == [1, 2, 3]
        assert infer(service, "pair") == [1, 2, 3]
        assert leased_mb(service.broker) == [13 * GIB]
        load(service, "second_step")
        assert leased_mb(service.broker) == [13 * GIB]


def test_no_door_unloads_a_step_of_a_resident_ensemble(own_triton: Triton, tmp_path: Path) -> None:
    [port] = free_ports(1)
    settings_of = chosen(own_triton)
    settings_of["triton"]["grpc_port"] = port
    with ForkedService(tmp_path / "data", **settings_of) as service:
        load(service)
        refused = through(service).ask("POST", "/models/second_step/unload", b"{}")
        assert (refused.status, b'the ensemble \\"pair\\"' in refused.body) == (409, True)
        token = {"authorization": f"Bearer {service.token}"}
        http = tritonclient.http.InferenceServerClient(service.url.removeprefix("http://"))
        grpc = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}")
        with http, grpc:
            for client in (http, grpc):
                with pytest.raises(InferenceServerException, match='the ensemble "pair"'):
                    client.unload_model("first_step", headers=dict(token))
        assert ready(own_triton) == WHOLE
        assert infer(service, "pair") == [1, 2, 3]


def test_resident_ensemble_stays_one_holder_when_the_service_starts_again(
    own_triton: Triton, tmp_path: Path
) -> None:
    with ForkedService(tmp_path / "data", **chosen(own_triton)) as before:
        load(before)
        holder = before.broker.model("pair").task
    with ForkedService(tmp_path / "data", **chosen(own_triton)) as after:
        until(lambda: shown(after.broker) == dict.fromkeys(WHOLE, "resident"), "its index was read")
        assert {after.broker.model(name).task for name in WHOLE} == {holder}
        assert leased_mb(after.broker) == [13 * GIB]
        refused = through(after).ask("POST", "/models/first_step/unload", b"{}")
        assert refused.status == 409


def test_server_that_is_killed_has_neither_its_ensemble_nor_the_steps(
    own_triton: Triton, tmp_path: Path
) -> None:
    with ForkedService(tmp_path / "data", **chosen(own_triton)) as service:
        load(service)
        own_triton.kill()
        own_triton.start()
        until(lambda: infer(service, "pair") == [1, 2, 3], "it is loaded again for the request")
        assert ready(own_triton) == WHOLE
        assert leased_mb(service.broker) == [13 * GIB]


def test_base_cost_and_gpu_of_a_server_follow_the_settings_at_a_start(
    own_triton: Triton, tmp_path: Path
) -> None:
    def held(service: ServiceProcess) -> list[int]:
        return leased_mb(service.broker)

    devices = [{"kind": "sim-24g", "memory_mb": 24 * GIB, "count": 2}]
    for gpu, base_mb, expected in (
        ("GPU-sim-local-0", 1 * GIB, [1 * GIB, 0]),
        ("GPU-sim-local-0", 2 * GIB, [2 * GIB, 0]),
        ("GPU-sim-local-1", 2 * GIB, [0, 2 * GIB]),
        ("GPU-sim-local-1", 0, [0, 0]),
    ):
        now = chosen(own_triton, base_mb=base_mb, devices=[gpu]) | {"simulated_devices": devices}
        with ForkedService(tmp_path / "data", **now) as service:
            until(lambda: held(service) == expected, f"{base_mb} MiB are held on {gpu}")  # noqa: B023  # called at once
            load(service)
            place = gpu == "GPU-sim-local-1"
            assert held(service)[place] == base_mb + 13 * GIB
            service.broker.unload_model("pair")
            until(lambda: ready(own_triton) == [], "it has left")


def test_corrected_size_of_a_step_lets_a_waiting_ensemble_load(own_triton: Triton, tmp_path: Path) -> None:
    too_large = {**STEPS, "line_fp32": {"gpu_mb": 12 * GIB}}
    with ForkedService(tmp_path / "data", **chosen(own_triton, too_large)) as before:
        load(before, "line_fp32")
        pinned = through(before).ask("POST", "/models/line_fp32/pin", b'{"pinned": true}')
        assert pinned.status == 200, pinned.body
        asked = through(before).ask("POST", "/models/pair/load", b'{"wait_seconds": 0}')
        assert asked.status == 202, asked.body
        assert state_of(before.broker, "pair") == "waiting"
    fitting = {**too_large, "first_step": {"gpu_mb": 6 * GIB}}
    with ForkedService(tmp_path / "data", **chosen(own_triton, fitting)) as after:
        door = through(after)
        until(
            lambda: door.ask("POST", "/models/pair/load", b'{"wait_seconds": 5}').status == 200,
            "it fits by now",
        )
        assert shown(after.broker) == dict.fromkeys(WHOLE, "resident")
        assert leased_mb(after.broker) == [12 * GIB + 9 * GIB]
