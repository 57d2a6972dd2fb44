"""Worker sets through SDK and command line."""

import base64
from typing import Any

import cloudpickle
import httpx
import pytest
from gpubroker import AsyncBroker, Broker, CallFailed, ObjectRef, Refused, ResultUnreadable, WrongArgument
from gpubroker.tasks.submission import MAX_BODY_BYTES

from tests.client.command_line import Run
from tests.client.recorded_service import RecordedService, Reply
from tests.gateway.harness import Gateway

SET: dict[str, Any] = {
    "id": "task_1", "name": "solvers", "tenant": "default", "state": "active", "count": 2, "min_count": 1,
    "max_count": 4, "places": 4, "max_concurrency": 8, "scale": {"by": "calls", "target": 8.0},
    "signal": None, "states": {"running": 1, "pending": 1}, "created_at": "2026-11-21T10:00:00Z",
    "workers": [
        {"id": "task_1", "state": "running", "node": "n1", "attempt": 2, "failures": 1},
        {"id": "task_2", "state": "pending", "node": None, "attempt": 0, "failures": 0},
    ],
}  # fmt: skip


async def test_the_sdk_forms_reads_scales_and_ends_a_set() -> None:
    async with Gateway() as gateway:
        token = (await gateway.client("sdk")).headers["authorization"].removeprefix("Bearer ")
        transport = httpx.ASGITransport(gateway.app)
        async with AsyncBroker("http://127.0.0.1:8470", token, transport=transport) as broker:
            made = await broker.create_worker_set(
                "myteam.solvers:Solver", 3, kwargs={"deep": True}, count=1, max_count=2, cpu=0.1
            )
            assert (made.state, made.count, made.places, made.states) == ("active", 1, 2, {"held": 2})
            assert [one.id async for one in broker.worker_sets()] == [made.id]
            assert (await broker.scale_worker_set(made, 2)).count == 2
            with pytest.raises(Refused, match="does not scale by a signal"):
                await broker.signal_worker_set(made, 1.0)
            with pytest.raises(Refused, match="no Ray driver"):
                await broker.workers(made).solve(1)
            assert (await broker.worker_set(made.id)).workers[0].state == "pending"
            assert (await broker.end_worker_set(made)).state == "over"


def test_a_call_sends_pickles_once_and_opens_the_result(service: RecordedService) -> None:
    packed = base64.b64encode(cloudpickle.dumps({1, 2})).decode()
    service.reply_with(Reply(200, {"worker": "t", "attempt": 1, "result": None, "data_base64": packed}))
    with Broker(service.url, "gpb_secret", retry_seconds=5) as broker:
        assert broker.workers("task_1", role="judge").score(5, deep=True) == {1, 2}
    [asked] = service.requests
    assert (asked.path, asked.body["method"], asked.body["role"]) == (
        "/worker-sets/task_1/call", "score", "judge",
    )  # fmt: skip
    assert cloudpickle.loads(base64.b64decode(asked.body["pickled"])) == ((5,), {"deep": True})


def test_a_failed_call_is_not_repeated_and_has_the_methods_traceback(service: RecordedService) -> None:
    fault = {"pointer": "", "detail": "Traceback ...", "code": "exception"}
    problem = {"code": "call-failed", "detail": "solve failed", "errors": [fault]}
    service.reply_with(Reply(502, problem))
    with (
        Broker(service.url, "gpb_secret", retry_seconds=5) as broker,
        pytest.raises(CallFailed, match="solve failed") as failed,
    ):
        broker.call_worker("task_1", "solve", pickled=False)
    assert (failed.value.kind, failed.value.traceback) == ("exception", "Traceback ...")
    assert str(failed.value) == "solve failed\n\nTraceback ..."
    assert len(service.requests) == 1


@pytest.mark.parametrize("pickled", [True, False])
def test_arguments_of_a_call_too_large_for_a_request_travel_as_objects(
    service: RecordedService, pickled: bool
) -> None:
    large = "x" * MAX_BODY_BYTES
    service.always_at = {"/objects": Reply(201, {"id": "a" * 64, "size_bytes": 9})}
    service.always = Reply(200, {"worker": "t", "attempt": 1, "result": 7, "data_base64": None})
    with Broker(service.url, "gpb_secret") as broker:
        assert broker.call_worker("task_1", "solve", 5, kwargs={"at": large}, pickled=pickled) == 7
    sent = service.requests[-1].body
    if pickled:
        assert cloudpickle.loads(base64.b64decode(sent["pickled"])) == ((5,), {"at": ObjectRef("a" * 64)})
    else:
        assert (sent["args"], sent["kwargs"]) == ([5], {"at": {"object": "a" * 64}})


def test_a_result_of_a_call_that_cannot_be_opened_names_the_worker(service: RecordedService) -> None:
    packed = base64.b64encode(b"cno_such_module\nThing\n.").decode()
    service.reply_with(Reply(200, {"worker": "task_2", "attempt": 1, "result": None, "data_base64": packed}))
    with (
        Broker(service.url, "gpb_secret") as broker,
        pytest.raises(ResultUnreadable, match="result of solve in worker task_2 cannot be opened"),
    ):
        broker.call_worker("task_1", "solve")


def test_arguments_that_cannot_travel_are_refused_before_the_call(service: RecordedService) -> None:
    with (
        Broker(service.url, "gpb_secret", retry_seconds=5) as broker,
        pytest.raises(WrongArgument, match="written as JSON"),
    ):
        broker.call_worker("task_1", "solve", {1}, pickled=False)
    assert service.requests == []


@pytest.mark.parametrize(
    ("line", "method", "path", "body"),
    [
        ("workers list", "GET", "/worker-sets", None),
        ("workers show task_1", "GET", "/worker-sets/task_1", None),
        ("workers scale task_1 3 --max 4", "PATCH", "/worker-sets/task_1", {"count": 3, "max_count": 4}),
        ("workers signal task_1 12", "POST", "/worker-sets/task_1/signal", {"value": 12.0}),
        ("workers end task_1", "DELETE", "/worker-sets/task_1", None),
        (
            "workers create team.a:B --arg 7 -j 2 --max 4 --scale calls=8 --health ping --start-timeout 5m",
            "POST",
            "/worker-sets",
            {
                "run": {"entrypoint": "team.a:B", "args": [7], "kwargs": {}},
                "count": 2,
                "max_count": 4,
                "scale": {"by": "calls", "target": 8.0},
                "health": {"method": "ping"},
                "start_timeout_seconds": 300.0,
            },
        ),
    ],
)
def test_the_commands_send_what_was_said(
    service: RecordedService, run: Run, line: str, method: str, path: str, body: Any
) -> None:
    service.reply_with(Reply(200, {"items": [SET], "next_cursor": None} if line.endswith("list") else SET))
    ended = run(line)
    assert ended.code == 0, ended.err
    [asked] = service.requests
    assert (asked.method, asked.path, asked.body) == (method, path, body)


def test_a_set_is_drawn_with_its_workers(service: RecordedService, run: Run) -> None:
    service.reply_with(Reply(200, SET))
    assert run("workers show task_1").out.splitlines() == [
        "task_1 active: 2 of 1–4 wanted, follows calls (8 each)",
        "  task_1 running on n1, attempt 2, failed 1 times",
        "  task_2 pending",
    ]


def test_an_empty_list_says_how_to_make_one(service: RecordedService, run: Run) -> None:
    service.reply_with(Reply(200, {"items": [], "next_cursor": None}))
    assert run("workers list").out == "no worker sets; see: gpubroker workers create --help\n"


def test_a_call_prints_json(service: RecordedService, run: Run) -> None:
    service.reply_with(Reply(200, {"worker": "t", "attempt": 1, "result": {"a": 1}, "data_base64": None}))
    assert run("workers call task_1 solve 5 --timeout 5s").out == '{"a": 1}\n'
    [asked] = service.requests
    assert (asked.body["args"], asked.body["timeout_seconds"]) == ([5], 5.0)


def test_a_scale_that_cannot_be_read_is_refused(run: Run) -> None:
    ended = run("workers create team.a:B --scale calls")
    assert ended.code == 2
    assert "BY=TARGET" in ended.err
