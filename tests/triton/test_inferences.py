"""Queued inferences answered by a real Triton: joined, cut, and none lost when a process is killed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from gpubroker import Broker, Refused, Task, TaskFailed, TaskState, WaitTimeout

from tests.chaos.forked import ForkedBroker, ForkedGateway, ForkedService
from tests.e2e.service_process import ServiceProcess, until
from tests.patience import PATIENCE_SECONDS
from tests.triton.server import Triton
from tests.triton.test_residency import settings


def column(*values: float) -> dict[str, Any]:
    return {"INPUT0": np.array(values, np.float32).reshape(-1, 1)}


def answered(broker: Broker, task: Task | str) -> dict[str, list[Any]]:
    """By output."""
    result = broker.result(task, timeout_seconds=PATIENCE_SECONDS)
    return {output["name"]: output["data"] for output in result["outputs"]}


def counts(triton: Triton, model: str) -> tuple[int, int]:
    """(requests that it worked on, their rows); a model's own errors count as well."""
    [stats] = httpx.get(f"{triton.url}/v2/models/{model}/stats").json()["model_stats"]
    return stats["inference_stats"]["success"]["count"], stats["inference_count"]


def test_alike_ones_are_one_request_and_one_that_fails_harms_no_other(
    service: ServiceProcess, triton: Triton
) -> None:
    broker = service.broker
    before = counts(triton, "doubles")
    first = broker.infer_later("doubles", column(1500))
    good = [broker.infer_later("doubles", column(at, at), after=[first]) for at in range(4)]
    mixed = [broker.infer_later("doubles", column(value), after=[first]) for value in (-1, 5, 6)]
    assert answered(broker, first) == {"OUTPUT0": [3000], "ROWS": [1]}
    for at, task in enumerate(good):
        assert answered(broker, task) == {"OUTPUT0": [2 * at] * 2, "ROWS": [8, 8]}
    with pytest.raises(TaskFailed, match="takes no negative numbers"):
        broker.result(mixed[0])
    assert answered(broker, mixed[1]) == {"OUTPUT0": [10], "ROWS": [1]}
    assert answered(broker, mixed[2]) == {"OUTPUT0": [12], "ROWS": [1]}
    now = counts(triton, "doubles")
    requests, rows = now[0] - before[0], now[1] - before[1]
    assert (requests, rows) == (1 + 1 + 1 + 3, 1 + 8 + 3 + 3), (
        "three of which one fails are asked together first"
    )


def test_every_datatype_of_triton_goes_there_and_back_half_precision_too(service: ServiceProcess) -> None:
    values: dict[str, list[Any]] = {
        "BOOL": [True, False], "UINT8": [0, 255], "INT64": [-(2**63), 2**63 - 1], "FP16": [0.5, -2.0],
        "FP32": [0.25, 3.0], "FP64": [0.1, -1e300], "BYTES": ["ü", ""],
    }  # fmt: skip
    inputs = {
        f"IN_{'STRING' if name == 'BYTES' else name}": {"datatype": name, "shape": [2], "data": some}
        for name, some in values.items()
    }
    outputs = [name.replace("IN_", "OUT_") for name in inputs]
    told = answered(service.broker, service.broker.infer_later("any_type", inputs, outputs=outputs))
    assert told == {f"OUT_{'STRING' if name == 'BYTES' else name}": some for name, some in values.items()}


def test_answers_come_back_as_the_arrays_that_the_model_gave(service: ServiceProcess) -> None:
    large = np.arange(2**20, dtype=np.float32).reshape(1, -1)  # more than a row may hold
    for given in (np.array([[0.1, -2.5, np.nan]], dtype=np.float32), large):
        task = service.broker.infer_later("identity_fp32", {"INPUT0": given})
        outputs = service.broker.outputs(task, timeout_seconds=PATIENCE_SECONDS)
        assert list(outputs) == ["OUTPUT0"]
        assert outputs["OUTPUT0"].dtype == np.float32
        assert np.array_equal(outputs["OUTPUT0"], given, equal_nan=True)
    failed = service.broker.infer_later("doubles", column(-1))
    with pytest.raises(TaskFailed, match="takes no negative numbers"):
        service.broker.outputs(failed, timeout_seconds=PATIENCE_SECONDS)
    later = service.broker.infer_later("slow", column(1), deadline_seconds=60)  # it is not loaded
    with pytest.raises(WaitTimeout, match=r"is still (pending|running)"):
        service.broker.outputs(later, timeout_seconds=0.0)


def test_an_array_is_uploaded_once_and_asked_about_as_often_as_one_likes(service: ServiceProcess) -> None:
    broker = service.broker
    stored = broker.upload(column(1, 2)["INPUT0"])
    halves = broker.upload(np.array([0.5, 4], np.float32).tobytes())
    named = {"datatype": "FP32", "shape": [2, 1], "object": halves.id}
    tasks = [broker.infer_later("doubles", {"INPUT0": given}) for given in (stored, named, stored)]
    assert [answered(broker, task)["OUTPUT0"] for task in tasks] == [[2, 4], [1, 8], [2, 4]]


def test_large_arrays_are_passed_as_objects_and_not_copied(service: ServiceProcess) -> None:
    broker = service.broker
    given = np.arange(6 * 2**20, dtype=np.float32).reshape(1, -1)  # 24 MiB: more than a request may copy
    task = broker.infer_later("identity_fp32", {"INPUT0": given})
    outputs = broker.outputs(task, timeout_seconds=PATIENCE_SECONDS)
    assert np.array_equal(outputs["OUTPUT0"], given)
    assert given.nbytes in [one.size_bytes for one in broker.objects()]


def test_input_that_the_model_refuses_is_its_error_in_tritons_words(service: ServiceProcess) -> None:
    tasks = [
        service.broker.infer_later("doubles", {"OTHER": np.zeros((1, 1), np.float32)}, max_retries=3),
        service.broker.infer_later(
            "stream_n", {"text_input": {"datatype": "BYTES", "shape": [1], "data": ["a"]}}
        ),
    ]
    for task, says in zip(tasks, ("OTHER", "decoupled"), strict=True):
        with pytest.raises(TaskFailed, match=says) as failed:
            service.broker.result(task)
        assert failed.value.kind == "inference_refused"


def test_the_model_type_of_an_inference_fills_what_it_leaves_out(service: ServiceProcess) -> None:
    """Priority, retries and the time limit, which the server's answer of 1.5 seconds is too late for."""
    broker, slow = service.broker, column(1500)
    late, told, stated = (
        broker.infer_later("doubles", slow, model_type="nightly"),
        broker.infer_later("doubles", column(2), model_type="nightly", timeout_seconds=60),
        broker.infer_later("doubles", slow, model_type="nightly", priority=35, timeout_seconds=60),
    )
    with pytest.raises(TaskFailed) as failed:
        broker.result(late, timeout_seconds=PATIENCE_SECONDS)
    assert failed.value.kind == "timeout"
    assert (answered(broker, told)["OUTPUT0"], answered(broker, stated)["OUTPUT0"]) == ([4], [3000])
    views = [broker.get(task) for task in (late, told, stated)]
    assert {(view.model_type, view.max_retries) for view in views} == {("nightly", 2)}
    assert [(view.priority, view.timeout_seconds) for view in views] == [(30, 0.5), (30, 60), (35, 60)]


def test_missing_version_of_a_model_is_no_reason_to_wait_for_the_model(
    service: ServiceProcess,
) -> None:
    task = service.broker.infer_later("doubles", column(1), version="9", deadline_seconds=PATIENCE_SECONDS)
    with pytest.raises(TaskFailed, match="version 9 is not found; it has version 1") as failed:
        service.broker.result(task, timeout_seconds=PATIENCE_SECONDS)
    assert failed.value.kind == "inference_failed"


def test_model_not_loaded_is_asked_again_until_the_inference_expires(
    service: ServiceProcess,
) -> None:
    task = service.broker.infer_later("slow", column(1), deadline_seconds=3)
    reasons = set()
    while not (now := service.broker.get(task)).is_finished:
        reasons.add(now.pending.reason if now.pending is not None else "")
    assert now.state is TaskState.EXPIRED
    assert "NotBefore" not in reasons
    assert "ModelLoading" in reasons


def test_a_model_that_no_server_has_is_refused_at_once(service: ServiceProcess) -> None:
    with pytest.raises(Refused, match='no model "not_there"'):
        service.broker.infer_later("not_there", column(1))


@pytest.fixture(scope="module")
def own_triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    with Triton(tmp_path_factory.mktemp("inferences")) as running:
        yield running


def test_cold_model_loads_for_inferences_and_a_killed_service_loses_none(
    own_triton: Triton, tmp_path: Path
) -> None:
    with ForkedService(tmp_path / "data", **settings(own_triton, "simulated")) as service:
        tasks = asked_to_nap(service.broker)
        service.kill_9()
        service.start()
        check_each_is_answered_once(service.broker, tasks)


@pytest.mark.evidence
def test_no_inference_is_lost_when_the_server_or_model_process_is_killed(
    own_triton: Triton, tmp_path: Path
) -> None:
    with ForkedService(tmp_path / "data", **settings(own_triton, "simulated")) as service:
        tasks = asked_to_nap(service.broker)
        own_triton.kill()
        own_triton.start()
        check_each_is_answered_once(service.broker, tasks)
        tasks = asked_to_nap(service.broker)
        [process] = psutil.Process(own_triton.pid).children()
        process.kill()
        check_each_is_answered_once(service.broker, tasks)


@pytest.mark.evidence
def test_standby_on_postgresql_resends_the_inferences_of_a_killed_leader(
    own_triton: Triton, postgres_url: str, tmp_path: Path
) -> None:
    shared = {"database_url": postgres_url, "blob_dir": str(tmp_path / "blobs"), "drain_seconds": 2.0}
    chosen = {**settings(own_triton, "simulated"), **shared}
    gateway = ForkedGateway(tmp_path / "gateway", **chosen)
    leader, standby = (ForkedBroker(tmp_path / name, **chosen) for name in ("leader", "standby"))
    with leader, gateway, standby:
        tasks = asked_to_nap(gateway.broker)
        leader.kill_9()
        check_each_is_answered_once(gateway.broker, tasks)


def asked_to_nap(broker: Broker) -> list[str]:
    """Two, of which at least one is being answered."""
    tasks = [broker.infer_later("slow", a_nap(value)).id for value in range(2)]
    until(lambda: is_any_answered(broker), "they are being answered")
    return tasks


def check_each_is_answered_once(broker: Broker, tasks: list[str]) -> None:
    for value, task in enumerate(tasks):
        assert answered(broker, task) == {"OUTPUT0": [value]}
        assert [event.kind for event in broker.events(task)].count("task.succeeded") == 1


def is_any_answered(broker: Broker) -> bool:
    """At this moment."""
    return any(True for _ in broker.list(state="running", kind="inference"))


def a_nap(value: int) -> dict[str, Any]:
    """Of 0.2 seconds."""
    return {
        "INPUT0": np.array([value], np.float32),
        "SLEEP_MS": {"datatype": "INT32", "shape": [1], "data": [200]},
    }
