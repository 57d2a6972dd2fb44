"""Models of a real Triton in the ledger beside tasks: brought, evicted, and never given memory twice."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc
import tritonclient.http
from gpubroker import Broker, TaskState
from tritonclient.utils import InferenceServerException

from tests.chaos.forked import ForkedService
from tests.e2e.service_process import GIB, ServiceProcess, until
from tests.patience import PATIENCE_SECONDS
from tests.triton.raw import through
from tests.triton.server import Triton, free_ports

SIZES = {
    "identity_fp32": {"gpu_mb": 20 * GIB},
    "line_fp32": {"gpu_mb": 20 * GIB},
    "slow": {"gpu_mb": 20 * GIB},
}


@pytest.fixture(scope="module")
def own_triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    with Triton(tmp_path_factory.mktemp("residency")) as running:
        yield running


def settings(triton: Triton, engine: str, **more: Any) -> dict[str, Any]:
    server = {
        "name": "main",
        "http_url": triton.url,
        "grpc_url": f"http://127.0.0.1:{triton.grpc_port}",
        "node": "local",
        "repository": str(triton.repository),
        "models": SIZES,
    }
    devices = [{"kind": "sim-24g", "memory_mb": 24 * GIB, "count": 1}]
    return {
        "engine": engine,
        "ray": {"node_name": "local"},
        "simulated_devices": devices,
        "triton": {"servers": [server], **more},
    }


@pytest.fixture(scope="module")
def call_port() -> int:
    """Where the service speaks gRPC."""
    [port] = free_ports(1)
    return port


@pytest.fixture(scope="module")
def shared(
    own_triton: Triton, call_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServiceProcess]:
    chosen = settings(own_triton, "simulated", grpc_port=call_port)
    with ForkedService(tmp_path_factory.mktemp("service") / "data", **chosen) as running:
        yield running


@pytest.fixture
def service(shared: ServiceProcess, own_triton: Triton) -> Iterator[ServiceProcess]:
    """With nothing in memory, before and after."""
    yield shared
    for model in shared.broker.models().items:
        if model.state != "cold":
            shared.broker.unload_model(model.name)
    until(lambda: ready(own_triton) == [], "nothing is left in the server")


def ready(triton: Triton) -> list[str]:
    with tritonclient.http.InferenceServerClient(triton.url.removeprefix("http://")) as client:
        index = client.get_model_repository_index()
    return sorted(model["name"] for model in index if model.get("state") == "READY")


def infer(
    service: ServiceProcess, model: str, version: str = "", sleep_ms: int | None = None, **headers: str
) -> Any:
    """Of an unmodified client, with 1, 2 and 3."""
    with tritonclient.http.InferenceServerClient(service.url.removeprefix("http://")) as client:
        given = {"Authorization": f"Bearer {service.token}", **headers}
        return asked(tritonclient.http, client, model, version, given, sleep_ms)


def call(service: ServiceProcess, port: int, model: str) -> Any:
    """The same over gRPC."""
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
        return asked(tritonclient.grpc, client, model, "", {"authorization": f"Bearer {service.token}"})


def asked(
    kit: Any, client: Any, model: str, version: str, headers: dict[str, str], sleep_ms: int | None = None
) -> Any:
    values = np.array([1, 2, 3], np.float32).reshape([1, 3] if model == "identity_fp32" else [3])
    tensor = kit.InferInput("INPUT0", list(values.shape), "FP32")
    tensor.set_data_from_numpy(values)
    inputs = [tensor]
    if sleep_ms is not None:
        inputs.append(kit.InferInput("SLEEP_MS", [1], "INT32"))
        inputs[-1].set_data_from_numpy(np.array([sleep_ms], np.int32))
    answer = client.infer(model, inputs, version, headers=headers)
    return answer.as_numpy("OUTPUT0").flatten().tolist()


def state_of(broker: Broker, model: str) -> str:
    return broker.model(model).state


def is_at(broker: Broker, task: str, state: TaskState) -> bool:
    return broker.get(task).state is state


def leased_mb(broker: Broker) -> list[int]:
    return [sum(holder.gpu_mb for holder in gpu.holders) for gpu in broker.gpus()]


def test_model_is_loaded_for_its_first_request_and_makes_room_for_the_next(
    service: ServiceProcess, own_triton: Triton
) -> None:
    assert infer(service, "identity_fp32") == [1, 2, 3]
    assert ready(own_triton) == ["identity_fp32"]
    assert leased_mb(service.broker) == [20 * GIB]
    urgent: dict[str, Any] = {"x-priority": "95"}
    assert infer(service, "line_fp32", **urgent) == [1, 2, 3]
    assert ready(own_triton) == ["line_fp32"]
    assert leased_mb(service.broker) == [20 * GIB]


def seconds_to_leave(triton: Triton, model: str) -> float:
    """What the server itself takes from an unload to the end of the model's process."""
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{triton.grpc_port}") as client:

        def is_gone() -> bool:
            stages = [
                found.state for found in client.get_model_repository_index().models if found.name == model
            ]
            return not {"READY", "UNLOADING"} & set(stages)

        client.load_model(model)
        began_at = time.monotonic()
        client.unload_model(model)
        until(is_gone, f"{model} has left")
        return time.monotonic() - began_at


@pytest.mark.parametrize(
    ("times", "most_seconds"), [(6, 10.0), pytest.param(200, 0.5, marks=pytest.mark.evidence)]
)
def test_two_models_that_do_not_fit_together_take_turns(
    own_triton: Triton, tmp_path: Path, times: int, most_seconds: float
) -> None:
    own = max(seconds_to_leave(own_triton, "identity_fp32") for _ in range(times // 5))
    chosen = settings(own_triton, "simulated", min_residency_seconds=0.0)
    with ForkedService(tmp_path / "data", **chosen) as service:
        took = []
        for number in range(times):
            model = ("identity_fp32", "line_fp32")[number % 2]
            began_at = time.monotonic()
            assert infer(service, model) == [1, 2, 3]
            loading = service.broker.model(model).load_seconds
            took.append(time.monotonic() - began_at - (loading or 0.0))
        took.sort()
        print(
            f"{times} turns, 0 refused; beside the load: longest {took[-1]:.2f} s, median "
            f"{took[len(took) // 2]:.2f} s, of which the server itself takes up to {own:.2f} s for the unload"
        )
        assert took[-1] - own <= most_seconds
        service.broker.unload_model(model)
        until(lambda: ready(own_triton) == [], "nothing is left in the server")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seconds", [6.0, pytest.param(600.0, marks=pytest.mark.evidence)])
def test_a_model_in_use_is_never_evicted_by_background_work(
    own_triton: Triton, tmp_path: Path, seconds: float
) -> None:
    chosen = settings(own_triton, "simulated", min_residency_seconds=0.0, wanted_seconds=60.0)
    with ForkedService(tmp_path / "data", **chosen) as service:
        assert infer(service, "identity_fp32") == [1, 2, 3]
        loaded_at = service.broker.model("identity_fp32").loaded_at
        task = service.broker.submit("tests.e2e.work:add", gpu_mb=20 * GIB, priority=30)
        asked, until_at = 0, time.monotonic() + seconds
        while time.monotonic() < until_at:
            assert infer(service, "identity_fp32") == [1, 2, 3]
            asked += 1
            time.sleep(0.5 * (asked % 4))  # a client's pace
        assert service.broker.model("identity_fp32").loaded_at == loaded_at
        assert is_at(service.broker, task.id, TaskState.PENDING)
        print(f"{asked} requests in {seconds:g} s beside background work that waits: evicted 0 times")
        service.broker.unload_model("identity_fp32")
        until(lambda: is_at(service.broker, task.id, TaskState.SUCCEEDED), "the task waited for that only")


def test_an_idle_model_makes_room_for_a_request_of_lower_priority(own_triton: Triton, tmp_path: Path) -> None:
    with ForkedService(tmp_path / "data", **settings(own_triton, "simulated")) as service:
        assert infer(service, "identity_fp32") == [1, 2, 3]
        low: dict[str, Any] = {"x-priority": "background"}
        assert infer(service, "line_fp32", **low) == [1, 2, 3], "its client waits 55 s at most"
        assert infer(service, "identity_fp32") == [1, 2, 3]
        given = {"INPUT0": np.array([1, 2, 3], np.float32)}
        later = service.broker.infer_later("line_fp32", given, priority="background")
        outputs = service.broker.outputs(later, timeout_seconds=PATIENCE_SECONDS)
        assert outputs["OUTPUT0"].tolist() == [1, 2, 3]
        service.broker.unload_model("line_fp32")
        until(lambda: ready(own_triton) == [], "nothing is left in the server")


def test_an_idle_model_makes_room_for_a_task_of_lower_priority(own_triton: Triton, tmp_path: Path) -> None:
    chosen = settings(own_triton, "simulated", yields_to_tasks_seconds=3.0)
    with ForkedService(tmp_path / "data", **chosen) as service:
        assert infer(service, "identity_fp32") == [1, 2, 3]
        asked_at = time.time()
        task = service.broker.submit("tests.e2e.work:add", gpu_mb=20 * GIB, priority=10)
        until(lambda: is_at(service.broker, task.id, TaskState.SUCCEEDED), "the task has run")
        assert time.time() - asked_at >= 3.0, "it was used so lately"
        assert ready(own_triton) == []


def test_an_unused_model_is_unloaded_so_that_a_task_can_run(own_triton: Triton, tmp_path: Path) -> None:
    with ForkedService(tmp_path / "data", **settings(own_triton, "simulated", wanted_seconds=5.0)) as service:
        assert infer(service, "identity_fp32") == [1, 2, 3]
        task = service.broker.submit("tests.e2e.work:add", gpu_mb=20 * GIB, priority=10)
        until(lambda: is_at(service.broker, task.id, TaskState.SUCCEEDED), "the task has run")
        assert ready(own_triton) == []


def test_a_request_for_a_model_without_room_says_when_to_retry(own_triton: Triton, tmp_path: Path) -> None:
    chosen = settings(own_triton, "simulated", cold_seconds=0.2)
    with ForkedService(tmp_path / "data", **chosen) as service:
        kwargs = {"seconds": 600}
        task = service.broker.submit("tests.e2e.work:add", kwargs=kwargs, gpu_mb=20 * GIB, priority=95)
        until(lambda: is_at(service.broker, task.id, TaskState.RUNNING), "the task runs")
        with pytest.raises(InferenceServerException, match="is not in memory"):
            infer(service, "identity_fp32")
        assert (
            service.broker.explain(service.broker.model("identity_fp32").task or "").raw["state"] == "pending"
        )
        service.broker.cancel(task)
        until(lambda: state_of(service.broker, "identity_fp32") == "resident", "it is there in the end")
        assert infer(service, "identity_fp32") == [1, 2, 3]
        service.broker.unload_model("identity_fp32")
        until(lambda: ready(own_triton) == [], "it has left")


def test_requests_that_a_model_has_are_answered_before_it_leaves(
    service: ServiceProcess, own_triton: Triton
) -> None:
    service.broker.load_model("slow", wait_seconds=60)
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(infer(service, "slow")))
    asking.start()
    service.broker.unload_model("slow")
    asking.join()
    assert answers == [[1, 2, 3]]


def test_models_stay_for_the_next_leader_and_a_killed_server_has_none(
    own_triton: Triton, service: ServiceProcess
) -> None:
    service.broker.pin_model("identity_fp32")
    until(lambda: state_of(service.broker, "identity_fp32") == "resident", "it is loaded")
    before = service.broker.model("identity_fp32").task
    service.kill_9()
    service.start()
    assert state_of(service.broker, "identity_fp32") == "resident"
    assert service.broker.model("identity_fp32").task == before
    own_triton.kill()
    own_triton.start()
    until(lambda: ready(own_triton) == ["identity_fp32"], "what is pinned is brought back")
    until(lambda: state_of(service.broker, "identity_fp32") == "resident", "and is known to be there")
    assert leased_mb(service.broker) == [20 * GIB]


@pytest.mark.evidence
def test_service_killed_while_a_model_waits_or_moves_finishes_the_move(
    service: ServiceProcess, own_triton: Triton
) -> None:
    """The model waits, comes or goes at that moment."""

    def killed_while(state: str) -> None:
        until(lambda: state_of(service.broker, "slow") == state, f"it is {state}")
        service.kill_9()
        service.start()

    task = service.broker.submit("tests.e2e.work:add", kwargs={"seconds": 600}, gpu_mb=20 * GIB, priority=99)
    until(lambda: is_at(service.broker, task.id, TaskState.RUNNING), "the task runs")
    with own_triton.slow_to_load(3.0):
        service.broker.load_model("slow")
        killed_while("waiting")
        service.broker.cancel(task)
        killed_while("loading")
        until(lambda: state_of(service.broker, "slow") == "resident", "it is there")
    assert (ready(own_triton), leased_mb(service.broker)) == (["slow"], [20 * GIB])
    with ThreadPoolExecutor() as asking:
        lost = asking.submit(infer, service, "slow", sleep_ms=3000)
        service.broker.unload_model("slow")
        killed_while("draining")
        assert lost.exception() is not None, "its connection went with the service"
    until(lambda: state_of(service.broker, "slow") == "cold", "it has left")
    assert (ready(own_triton), leased_mb(service.broker)) == ([], [0])


def test_a_model_that_was_unloaded_by_hand_causes_no_errors(
    own_triton: Triton, service: ServiceProcess, call_port: int
) -> None:
    assert infer(service, "identity_fp32") == [1, 2, 3]
    with tritonclient.http.InferenceServerClient(own_triton.url.removeprefix("http://")) as by_hand:
        by_hand.unload_model("identity_fp32")
    asks = (
        lambda: infer(service, "identity_fp32"),
        lambda: infer(service, "identity_fp32", version="1"),
        lambda: call(service, call_port, "identity_fp32"),
    )
    with ThreadPoolExecutor() as asking:
        answers = [asking.submit(ask) for ask in asks]
    assert [answer.result() for answer in answers] == [[1, 2, 3]] * 3


def test_a_model_with_a_killed_process_is_loaded_again(own_triton: Triton, service: ServiceProcess) -> None:
    assert infer(service, "identity_fp32") == [1, 2, 3]
    before = service.broker.model("identity_fp32").task
    [stub] = psutil.Process(own_triton.pid).children()
    stub.kill()
    until(lambda: stub.status() == psutil.STATUS_ZOMBIE, "it has ended; its server does not look")
    until(lambda: answers(service, "identity_fp32"), "somebody has missed it")
    assert service.broker.model("identity_fp32").task == before, "it has the room that it had"
    assert leased_mb(service.broker) == [20 * GIB]


def answers(service: ServiceProcess, model: str) -> bool:
    try:
        return bool(infer(service, model) == [1, 2, 3])
    except InferenceServerException:
        return False


def test_a_renamed_server_keeps_its_models_and_nothing_is_quarantined(
    own_triton: Triton, service: ServiceProcess, tmp_path: Path
) -> None:
    assert ready(own_triton) == []
    chosen = settings(own_triton, "simulated")
    with ForkedService(tmp_path / "data", **chosen) as before:
        assert infer(before, "identity_fp32") == [1, 2, 3]
        holder = before.broker.model("identity_fp32").task
    chosen["triton"]["servers"][0] |= {
        "name": "renamed",
        "grpc_url": f"http://localhost:{own_triton.grpc_port}",
    }
    with ForkedService(tmp_path / "data", **chosen) as after:
        until(lambda: state_of(after.broker, "identity_fp32") == "resident", "its index was read")
        model = after.broker.model("identity_fp32")
        assert (model.server, model.task) == ("renamed", holder)
        assert infer(after, "identity_fp32") == [1, 2, 3]
        assert after.broker.quarantine().items == ()
        assert leased_mb(after.broker) == [20 * GIB]
        after.broker.unload_model("identity_fp32")
        until(lambda: ready(own_triton) == [], "orders reach it under its new name")


def test_what_a_removed_server_held_is_free_when_its_process_is_gone(tmp_path: Path) -> None:
    with Triton(tmp_path / "removed") as triton:
        chosen = settings(triton, "simulated")
        with ForkedService(tmp_path / "data", **chosen) as before:
            assert infer(before, "identity_fp32") == [1, 2, 3]
        chosen["triton"]["servers"] = []
        with ForkedService(tmp_path / "data", **chosen) as after:
            until(lambda: len(after.broker.quarantine().items) == 1, "its server is not in the settings")
            [held] = after.broker.quarantine().items
            assert "the process of its server is gone" in held.message
            assert leased_mb(after.broker) == [20 * GIB]
            triton.kill()
            until(lambda: after.broker.quarantine().items == (), "its process is gone")
            until(lambda: leased_mb(after.broker) == [0], "its memory is free")


def test_an_ensemble_counts_its_steps_which_nobody_unloads_under_it(
    service: ServiceProcess, own_triton: Triton
) -> None:
    loaded = through(service).ask("POST", "/models/chain/load", b'{"wait_seconds": 30}')
    assert loaded.status == 200
    assert ready(own_triton) == ["chain", "identity_fp32"]
    assert leased_mb(service.broker) == [20 * GIB], "the size that the operator gives its step"
    assert state_of(service.broker, "identity_fp32") == "resident"
    token = {"Authorization": f"Bearer {service.token}"}
    with tritonclient.http.InferenceServerClient(service.url.removeprefix("http://")) as client:
        with pytest.raises(InferenceServerException, match='the ensemble "chain"'):
            client.unload_model("identity_fp32", headers=token)
        client.unload_model("chain", headers=token)
    until(lambda: ready(own_triton) == [], "the step leaves with it")
    assert state_of(service.broker, "identity_fp32") == "cold"
