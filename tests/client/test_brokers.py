"""The SDK over a real socket; every test runs with `Broker` and with `AsyncBroker`."""

import base64
import inspect
import pickle
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from typing import Any

import cloudpickle
import pytest
from gpubroker import (
    AsyncBroker,
    Broker,
    Refused,
    Task,
    TaskCancelled,
    TaskFailed,
    TaskState,
    Unreachable,
    WaitTimeout,
    WrongArgument,
)

from tests.client.conftest import Do
from tests.client.recorded_service import HANG_UP, RecordedService, Reply, a_problem, a_task


def test_both_brokers_have_the_same_methods_with_the_same_parameters() -> None:
    def surface(broker: type) -> dict[str, list[str]]:
        methods = inspect.getmembers(broker, inspect.isfunction)
        return {n: list(inspect.signature(m).parameters) for n, m in methods if not n.startswith("_")}

    assert surface(Broker) == surface(AsyncBroker)


def test_every_method_is_documented_and_returns_what_its_operation_returns() -> None:
    for broker in (Broker, AsyncBroker):
        methods = inspect.getmembers(broker, inspect.isfunction)
        assert [name for name, method in methods if not name.startswith("_") and not method.__doc__] == [
            "close"
        ]
    for method in (Broker.get, AsyncBroker.get):
        assert inspect.signature(method).return_annotation is Task
    assert inspect.signature(Broker.list).return_annotation == Iterator[Task]
    assert inspect.signature(AsyncBroker.list).return_annotation == AsyncIterator[Task]
    assert not inspect.iscoroutinefunction(Broker.get)
    assert inspect.iscoroutinefunction(AsyncBroker.get)


def test_a_subclass_can_extend_a_method(service: RecordedService) -> None:
    class Logging(Broker):
        def get(self, task: Any, *, worker: str | None = None) -> Task:
            return super().get(f"{task}-b")

    service.reply_with(Reply(200, a_task("task_a-b")), Reply(200, a_task("task_a-b")))
    with Logging(service.url) as broker:
        assert [broker.get("task_a").id, broker.get("task_a").id] == ["task_a-b"] * 2
    assert {request.path for request in service.requests} == {"/tasks/task_a-b"}


def test_a_submit_sends_the_token_and_a_new_key(service: RecordedService, do: Do) -> None:
    service.reply_with(Reply(202, a_task("task_a")), Reply(202, a_task("task_b")))
    assert do("submit", "a:b", 1, gpu_mb=1024).id == "task_a"
    assert do("submit", "a:b", 1, gpu_mb=1024).id == "task_b"
    first, second = service.requests
    assert (first.method, first.path, first.headers["authorization"]) == (
        "POST",
        "/tasks",
        "Bearer gpb_secret",
    )
    assert first.headers["content-type"] == "application/json"
    assert first.body == second.body
    assert first.headers["idempotency-key"] != second.headers["idempotency-key"]


@pytest.mark.parametrize("trouble", [HANG_UP, a_problem(503, "store-unavailable")])
def test_a_submit_whose_answer_is_lost_is_retried_with_the_same_key(
    service: RecordedService, do: Do, trouble: Reply
) -> None:
    service.reply_with(trouble, trouble, Reply(202, a_task()))
    assert do("submit", "a:b").id == "task_1"
    assert len(service.requests) == 3
    assert len({request.headers["idempotency-key"] for request in service.requests}) == 1
    assert len({str(request.body) for request in service.requests}) == 1


def test_a_key_given_by_the_caller_is_sent_unchanged(service: RecordedService, do: Do) -> None:
    service.reply_with(Reply(202, a_task()))
    do("submit", "a:b", idempotency_key="nightly-7")
    assert service.requests[0].headers["idempotency-key"] == '"nightly-7"'


def test_a_refusal_is_raised_with_every_field_of_the_problem(service: RecordedService, do: Do) -> None:
    service.reply_with(a_problem(422, "entrypoint-not-allowed", "a:b is not allowed"))
    with pytest.raises(Refused) as refused:
        do("submit", "a:b")
    assert (refused.value.code, refused.value.detail) == ("entrypoint-not-allowed", "a:b is not allowed")
    assert len(service.requests) == 1


def test_unreachable_service_is_reported_with_its_address_and_a_remedy() -> None:
    """The error says how to start a service."""
    with Broker("http://127.0.0.1:1", retry_seconds=0) as broker, pytest.raises(Unreachable) as error:
        broker.stats()
    assert "http://127.0.0.1:1" in str(error.value)
    assert "gpubroker serve" in str(error.value)


def test_a_wait_asks_again_until_the_task_is_finished(service: RecordedService, do: Do) -> None:
    service.reply_with(Reply(202, a_task(state="running")), Reply(200, a_task(state="succeeded")))
    assert do("wait", "task_1").state is TaskState.SUCCEEDED
    assert [request.path for request in service.requests] == ["/tasks/task_1/wait"] * 2


def test_a_wait_timeout_says_that_the_task_continues(service: RecordedService, do: Do) -> None:
    service.reply_with(Reply(202, a_task(state="running")))
    with pytest.raises(WaitTimeout, match="task_1 is still running"):
        do("wait", "task_1", timeout_seconds=0)


def finished(state: str, **outcome: Any) -> list[Reply]:
    ended = {"id": "task_1", "state": state, "format": "json", "error": None, "log_tail": "", **outcome}
    return [Reply(200, a_task(state=state)), Reply(200, ended)]


@pytest.mark.parametrize("value", [{"accuracy": 0.9}, [1, [2, 3]], [], "text", 0, None])
def test_a_json_result_is_the_value(service: RecordedService, do: Do, value: Any) -> None:
    service.reply_with(*finished("succeeded", result=value))
    assert do("result", "task_1") == value


def test_only_result_unpickles_a_pickled_result(service: RecordedService, do: Do) -> None:
    packed = cloudpickle.dumps({1, 2})
    ended = finished("succeeded", format="cloudpickle", data_base64=base64.b64encode(packed).decode())
    service.reply_with(*ended, ended[1])
    assert do("result", "task_1") == {1, 2}
    outcome = do("outcome", "task_1")
    assert (outcome.data, outcome.value) == (packed, None)


@pytest.mark.parametrize("state", ["failed", "expired"])
def test_a_failure_comes_with_its_kind_traceback_and_log(
    service: RecordedService, do: Do, state: str
) -> None:
    error = {"kind": "exception", "message": "no luck", "traceback": "Traceback ...\nValueError: no luck"}
    service.reply_with(*finished(state, error=error, log_tail="epoch 3\n"))
    with pytest.raises(TaskFailed) as failed:
        do("result", "task_1")
    assert (failed.value.kind, failed.value.message, failed.value.log_tail) == (
        "exception",
        "no luck",
        "epoch 3\n",
    )
    assert "ValueError: no luck" in str(failed.value)


def test_a_cancelled_task_has_no_result(service: RecordedService, do: Do) -> None:
    service.reply_with(*finished("cancelled"))
    with pytest.raises(TaskCancelled):
        do("result", "task_1")


def test_a_list_follows_the_pages_to_the_end(service: RecordedService, do: Do) -> None:
    service.reply_with(
        Reply(200, {"items": [a_task("task_3"), a_task("task_2")], "next_cursor": "c1", "has_more": True}),
        Reply(200, {"items": [a_task("task_1")], "next_cursor": None, "has_more": False}),
    )
    found = do("list", state=["running", "pending"], labels={"run": "nightly"}, limit=2)
    assert [task.id for task in found] == ["task_3", "task_2", "task_1"]
    wanted = [("state", "running"), ("state", "pending"), ("limit", "2"), ("label.run", "nightly")]
    assert service.requests[0].params == wanted
    assert service.requests[1].params == [*wanted, ("cursor", "c1")]


def test_events_are_read_to_the_end_of_the_log(service: RecordedService, do: Do) -> None:
    line = {
        "position": 8,
        "at": "2026-11-21T10:02:11.412Z",
        "kind": "task.admitted",
        "key": "task_1",
        "version": 2,
    }
    service.reply_with(
        Reply(200, {"items": [{**line, "fields": {"fence": 1}}], "next_after": 8}),
        Reply(200, {"items": [], "next_after": 8}),
    )
    [event] = do("events", "task_1", after=7)
    assert (event.position, event.kind, event.fields) == (8, "task.admitted", {"fence": 1})
    assert event.at == datetime(2026, 11, 21, 10, 2, 11, 412000, tzinfo=UTC)
    assert [dict(request.params)["after"] for request in service.requests] == ["7", "8"]


def test_unknown_states_and_fields_of_a_newer_service_are_tolerated(service: RecordedService, do: Do) -> None:
    service.reply_with(Reply(200, a_task(state="hibernating", temperature=3)))
    task = do("get", "task_1")
    assert task.state is TaskState.UNKNOWN
    assert not task.is_finished
    assert (task.raw["state"], task.raw["temperature"]) == ("hibernating", 3)


def test_a_change_sends_only_what_was_given(service: RecordedService, do: Do) -> None:
    service.reply_with(Reply(200, a_task()), Reply(200, a_task()), Reply(202, a_task()))
    do("change", "task_1", held=False)
    do("change", "task_1", priority="batch")
    do("cancel", "task_1", reason="wrong data")
    assert [(request.method, request.path, request.body) for request in service.requests] == [
        ("PATCH", "/tasks/task_1", {"held": False}),
        ("PATCH", "/tasks/task_1", {"priority": "batch"}),
        ("POST", "/tasks/task_1/cancel", {"reason": "wrong data"}),
    ]


def test_creating_a_token_is_not_retried_when_its_answer_is_lost(service: RecordedService, do: Do) -> None:
    service.reply_with(HANG_UP)
    with pytest.raises(Unreachable):
        do("create_token", "ci", scopes=["tasks:write"])
    assert len(service.requests) == 1


def test_names_are_escaped_in_paths(service: RecordedService, do: Do) -> None:
    service.reply_with(Reply(204, b""))
    do("revoke_token", "a/b?c")
    assert service.requests[0].path == "/tokens/a%2Fb%3Fc"


def test_a_task_asks_the_broker_that_it_came_from(service: RecordedService) -> None:
    stack = {"id": "task_1", "stack": "Thread 1"}
    again = a_task("task_2") | {"retry_of": "task_1"}
    service.reply_with(Reply(202, a_task("task_1")), Reply(202, again), Reply(200, stack))
    service.reply_with(Reply(200, b"one\ntwo\n"))
    with Broker(service.url, "gpb_secret") as broker:
        task = broker.submit("a:b")
        assert task.retry().retry_of == "task_1"
        assert task.stack(rank=1).stack == "Thread 1"
        assert list(task.logs(stream="stderr")) == ["one\n", "two\n"]
        copy = pickle.loads(pickle.dumps(task))
        assert copy == task
        with pytest.raises(WrongArgument, match="came from is gone"):
            copy.retry()
    assert [request.path for request in service.requests] == [
        "/tasks",
        "/tasks/task_1/retry",
        "/tasks/task_1/stack",
        "/tasks/task_1/logs",
    ]
    asked, followed = (dict(request.params) for request in service.requests[-2:])
    assert (asked, followed["stream"]) == ({"rank": "1"}, "stderr")
