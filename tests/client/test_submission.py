import base64
import functools
import hashlib
import json
import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from gpubroker import Broker, Submission, WrongArgument, task
from gpubroker.runtime.objects import opened_object
from gpubroker.tasks.submission import MAX_BODY_BYTES, SubmitOptions, submission_body

from tests.client.conftest import Do
from tests.client.recorded_service import RecordedService, Reply, Request, a_task


def body(target: Any, *args: Any, **options: Any) -> dict[str, Any]:
    sent: dict[str, Any] = json.loads(submission_body(target, args, options))  # type: ignore[arg-type]  # on purpose
    return sent


def test_an_entrypoint_is_sent_with_only_the_given_options() -> None:
    assert body("team.work:fit", 1, kwargs={"epochs": 3}) == {
        "run": {"entrypoint": "team.work:fit", "args": [1], "kwargs": {"epochs": 3}}
    }


def test_options_are_sent_where_the_service_expects_them() -> None:
    sent = body(
        "a:b", gpu_mb=1024, gpus=2, cpu=0, priority="critical", max_retries=0, name="n", exclusive=True
    )
    assert sent["resources"] == {"gpu_mb": 1024, "gpus": 2, "cpu": 0, "exclusive": True}
    assert {name: sent[name] for name in ("priority", "max_retries", "name")} == {
        "priority": "critical",
        "max_retries": 0,
        "name": "n",
    }


def test_a_list_of_words_is_sent_as_a_command() -> None:
    sent = body(["python", "train.py"], working_directory="/srv")
    assert sent == {"run": {"command": ["python", "train.py"], "working_directory": "/srv"}}


def test_a_function_is_sent_with_its_arguments_and_python_version() -> None:
    sent = body(lambda a, b: a - b, 5, kwargs={"b": 3})
    function, args, kwargs = cloudpickle.loads(base64.b64decode(sent["run"]["function"]))
    assert function(*args, **kwargs) == 2
    assert sent["run"]["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert cloudpickle.__version__.startswith(sent["run"]["cloudpickle"])
    assert sent["result_format"] == "cloudpickle"
    assert body(len, [1], result_format="json")["result_format"] == "json"


def test_a_function_that_cannot_be_pickled_is_named() -> None:
    lock = threading.Lock()

    def guarded() -> None:
        with lock:
            pass

    with pytest.raises(WrongArgument, match=r"cannot pickle variable lock of .*guarded \(TypeError: .*lock'"):
        body(guarded)


class Model:
    def __init__(self) -> None:
        self.parts = {"left": [1, threading.Lock()]}

    def fit(self) -> None: ...


def uses(model: Any) -> Any:
    def closure() -> None:
        [model for _ in range(1)]

    return closure


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "part"),
    [
        (len, (1, threading.Lock()), {}, "argument 2 of len"),
        (len, (), {"model": Model()}, r"argument model\.parts\['left'\]\[1\] of len"),
        (uses(Model()), (), {}, r"variable model\.parts\['left'\]\[1\] of uses"),
        (Model().fit, (), {}, r"self\.parts\['left'\]\[1\] of Model.fit"),
        (functools.partial(print, threading.Lock()), (), {}, "argument 1 of functools.partial"),
        (len, (uses(threading.Lock()),), {}, "variable model of argument 1 of len"),
        ("a:b", (1, {"x": [object()]}), {}, r"argument 2\['x'\]\[0\] of 'a:b' cannot be written as JSON"),
        ("a:b", (), {"rate": float("nan")}, "argument rate of 'a:b' cannot be written as JSON"),
    ],
)
def test_what_cannot_travel_is_named(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], part: str
) -> None:
    with pytest.raises(WrongArgument, match=part):
        body(target, *args, kwargs=kwargs)


def test_what_cannot_travel_to_workers_and_objects_is_named(service: RecordedService, do: Do) -> None:
    with pytest.raises(WrongArgument, match=r"item 1\['a'\] cannot be pickled"):
        do("submit_array", len, [1, {"a": threading.Lock()}])
    with pytest.raises(WrongArgument, match=r"item 0 cannot be written as JSON"):
        do("submit_array", "a:b", [object()])
    with pytest.raises(WrongArgument, match="argument lock of solve cannot be pickled"):
        do("call_worker", "task_1", "solve", kwargs={"lock": threading.Lock()})
    with pytest.raises(WrongArgument, match=r"cannot pickle the value\[1\]"):
        do("put", [1, threading.Lock()])
    assert service.requests == []


@pytest.mark.parametrize(
    ("target", "args", "options", "expected"),
    [
        ("team.work.fit", (), {}, "write module:function"),
        ("a:b", (), {"epochs": 3}, r"has no option epochs\. Pass keyword .* kwargs=\{'epochs'"),
        (len, ([],), {"gpu_memory": 5}, "did you mean gpu_mb"),
        (len, ([],), {"time_out_seconds": 5}, "did you mean timeout_seconds"),
        (len, ([],), {"inputs": {}}, "did you mean kwargs"),
        (None, (), {}, "cannot run None: pass module:function"),
        ([], (), {}, r"cannot run \[\]"),
        ("a:b", (float("nan"),), {}, "cannot be written as JSON"),
        ("a:b", (object(),), {}, "submit the function itself"),
        (["ls"], ("-l",), {}, "takes no separate arguments"),
        ("a:b", (), {"working_directory": "/srv"}, "is only for commands"),
        ("a:b", (), {"retry_on": "timeout"}, r"write retry_on=\['timeout'\]"),
    ],
)
def test_invalid_arguments_are_refused_with_advice(
    target: Any, args: tuple[Any, ...], options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(WrongArgument, match=expected):
        body(target, *args, **options)


def test_every_option_is_documented() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "sdk.md"
    for text in (Broker.submit.__doc__ or "", page.read_text(encoding="utf-8")):
        assert [name for name in SubmitOptions.__annotations__ if name not in text] == []


def stores(service: RecordedService, reply: Reply) -> list[bytes]:
    """Have the service take objects; returns what it has taken, once there are requests."""
    taken: list[bytes] = []

    def store(request: Request) -> Any:
        taken.append(request.body)
        return {"id": hashlib.sha256(request.body).hexdigest(), "size_bytes": len(request.body)}

    service.always_at = {"/objects": Reply(201, store)}
    service.always = reply
    return taken


@pytest.mark.parametrize(
    ("target", "value"),
    [("a:b", "x" * MAX_BODY_BYTES), (len, b"x" * MAX_BODY_BYTES), (len, {"w": bytearray(MAX_BODY_BYTES)})],
)
def test_arguments_too_large_for_a_request_travel_as_objects(
    service: RecordedService, do: Do, target: Any, value: Any
) -> None:
    taken = stores(service, Reply(202, a_task("task_1")))
    do("submit", target, 7, value, kwargs={"again": value, "small": [1]})
    run = service.requests[-1].body["run"]
    if isinstance(target, str):
        [_, named], named_too = run["args"], run["kwargs"]["again"]
        assert (run["args"][0], run["kwargs"]["small"]) == (7, [1])
    else:
        _, (_, named), kwargs = cloudpickle.loads(base64.b64decode(run["function"]))
        named_too = kwargs["again"]
        assert run["objects"] == [named.id]
    assert named == named_too
    opened = opened_object(memoryview(taken[0]), unpickles=callable(target))
    assert (opened, type(opened)) == (value, type(value))


def test_the_other_ways_to_submit_store_large_arguments_too(service: RecordedService, do: Do) -> None:
    large = "x" * MAX_BODY_BYTES
    batch = Reply(207, {"items": [{"status": 202, "id": "task_1"}]})
    for reply, name, given in (
        (batch, "submit_many", [[Submission("a:b", large)]]),
        (Reply(202, {"id": "task_1", "state": "running"}), "submit_array", ["a:b", [1], large]),
        (Reply(202, {"id": "task_1", "state": "active"}), "create_worker_set", ["a:B", large]),
    ):
        stores(service, reply)
        do(name, *given)
        sent = service.requests[-1].body
        run = (sent.get("tasks") or [sent])[0]["run"]
        assert run["args"][0].keys() == {"object"}, name


def test_items_too_large_to_be_copied_are_objects_each(service: RecordedService, do: Do) -> None:
    taken = stores(service, Reply(202, {"id": "task_1", "state": "running"}))
    do("submit_array", "a:b", ["x" * 9_000_000, 1, "y" * 9_000_000])
    assert [opened_object(memoryview(data), unpickles=False)[0] for data in taken] == ["x", "y"]
    first, one, second = service.requests[-1].body["items"]
    assert (one, len({first["object"], second["object"]})) == (1, 2)


def a_function_with_large_data() -> Any:
    table = bytearray(MAX_BODY_BYTES)
    return lambda *args, **kwargs: (len(table), args, kwargs)


def test_function_that_refers_to_large_data_travels_as_an_object(service: RecordedService, do: Do) -> None:
    batch = Reply(207, {"items": [{"status": 202, "id": "task_1"}]})
    large = a_function_with_large_data()
    for reply, name, given in (
        (Reply(202, a_task("task_1")), "submit", [large, 7]),
        (batch, "submit_many", [[Submission(large, 7, kwargs={"a": 1})]]),
        (Reply(202, {"id": "task_1", "state": "running"}), "submit_array", [large, [1], 7]),
        (Reply(202, {"id": "task_1", "state": "active"}), "create_worker_set", [large, 7]),
    ):
        taken = stores(service, reply)
        do(name, *given, **({"kwargs": {"a": 1}} if name != "submit_many" else {}))
        sent = service.requests[-1].body
        run = (sent.get("tasks") or [sent])[0]["run"]
        function, args, kwargs = cloudpickle.loads(base64.b64decode(run["function"]))
        assert (args, kwargs["a"], run["objects"]) == ((7,), 1, [kwargs["gpubroker_function"].id]), name
        opened = opened_object(memoryview(taken[0]), unpickles=True)
        # The run replaces the reference by the function.
        assert function(*args, **kwargs | {"gpubroker_function": opened}) == (
            MAX_BODY_BYTES,
            (7,),
            {"a": 1},
        ), name


def test_defaults_of_a_large_task_function_are_kept(service: RecordedService, do: Do) -> None:
    stores(service, Reply(202, a_task("task_1")))
    do("submit", task(gpu_mb=2048, name="fit")(a_function_with_large_data()), modules=[])
    sent = service.requests[-1].body
    assert (sent["resources"]["gpu_mb"], sent["name"], sent["result_format"]) == (2048, "fit", "cloudpickle")


def test_a_simulation_leaves_out_a_function_that_refers_to_large_data(
    service: RecordedService, do: Do
) -> None:
    service.reply_with(Reply(200, {"verdict": "starts"}))
    do("simulate", a_function_with_large_data(), gpus=1)
    assert len(service.requests[0].body["run"]["function"]) < 10_000


def test_a_simulation_leaves_large_arguments_out(service: RecordedService, do: Do) -> None:
    service.reply_with(Reply(200, {"verdict": "starts"}))
    do("simulate", "a:b", "x" * MAX_BODY_BYTES, gpus=1)
    assert service.requests[0].body["run"]["args"] == []
