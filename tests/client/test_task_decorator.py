"""The decorator `task`."""

import base64
import subprocess
import sys
from typing import Any

import cloudpickle
import pytest
from gpubroker import AsyncBroker, Broker, Submission, WrongArgument, inference, task

from tests.client.conftest import Do
from tests.client.recorded_service import FULL_ID, RecordedService, Reply, Request, a_task, outcome


@task(gpu_mb=2048, priority="critical", labels={"team": "vision"}, max_retries=2)
def power(base: int, exponent: int = 2) -> int:
    """Of two numbers."""
    return int(base**exponent)


def called(request: Request) -> tuple[Any, ...]:
    """The function and its arguments."""
    body: dict[str, Any] = request.body
    return tuple(cloudpickle.loads(base64.b64decode(body["run"]["function"])))


def test_a_task_function_can_still_be_called() -> None:
    assert power(3) == 9
    assert (getattr(power, "__name__", ""), power.__doc__) == ("power", "Of two numbers.")


def test_a_task_function_is_submitted_with_its_options(
    service: RecordedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpubroker.decorators._default_broker", lambda: Broker(service.url, "t"))
    service.reply_with(Reply(202, a_task(FULL_ID)))
    queued = power.submit(3, exponent=4)
    assert queued.id == FULL_ID
    [request] = service.requests
    function, args, kwargs = called(request)
    assert (function(*args, **kwargs), args, kwargs) == (81, (3,), {"exponent": 4})
    assert (request.body["priority"], request.body["max_retries"]) == ("critical", 2)
    assert request.body["labels"] == {"team": "vision"}
    assert request.body["resources"] == {"gpu_mb": 2048}


def test_running_a_task_function_imports_no_http_client() -> None:
    """Pickled by value, as a function of a script is."""
    script = """
import cloudpickle, sys
from gpubroker import task

@task(gpus=1)
def fit(): return 7

sys.stdout.buffer.write(cloudpickle.dumps(fit))
"""
    travels = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True).stdout
    runs = "import pickle, sys; print(pickle.load(sys.stdin.buffer)(), 'httpx' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", runs], input=travels, check=True, capture_output=True)
    assert ran.stdout.split() == [b"7", b"False"]


def test_options_of_a_submit_go_before_those_of_the_function(service: RecordedService, do: Do) -> None:
    service.reply_with(Reply(202, a_task(FULL_ID)))
    do("submit", power, 3, priority=10, stream="three")
    [request] = service.requests
    assert (request.body["priority"], request.body["stream"]) == (10, "three")
    assert request.body["resources"] == {"gpu_mb": 2048}


def test_submit_many_and_simulate_take_a_task_function(service: RecordedService, do: Do) -> None:
    service.reply_with(
        Reply(207, {"items": [{"status": 202, "id": FULL_ID}]}),
        Reply(200, {"verdict": "starts", "would_start": True}),
    )
    assert do("submit_many", [Submission(power, 3)]) == [FULL_ID]
    do("simulate", power, 3)
    many, what_if = (request.body for request in service.requests)
    assert many["tasks"][0]["resources"] == what_if["resources"] == {"gpu_mb": 2048}


def test_invalid_options_of_the_decorator_are_refused() -> None:
    with pytest.raises(WrongArgument, match="has no option gpu; did you mean"):
        task(gpu=1)  # type: ignore[call-overload]  # the mistake is the test
    with pytest.raises(WrongArgument, match="kwargs belongs to one submit"):
        task(kwargs={"a": 1})


def test_task_without_parentheses_declares_no_options(service: RecordedService, do: Do) -> None:
    @task
    def double(number: int) -> int:
        return 2 * number

    service.reply_with(Reply(202, a_task(FULL_ID)))
    do("submit", double, 3)
    function, args, _ = called(service.requests[0])
    assert (double(4), function(*args), callable(double.submit)) == (8, 6, True)


def test_a_decorator_that_gets_no_function_says_what_it_takes() -> None:
    with pytest.raises(WrongArgument, match="takes its options by name"):
        task("gpus")  # type: ignore[call-overload]  # the mistake is the test
    with pytest.raises(WrongArgument, match="needs the name of the model"):

        @inference  # type: ignore[arg-type]  # the same
        def classify() -> None: ...


def test_a_task_waits_and_ends_itself_through_its_broker(service: RecordedService) -> None:
    ended = Reply(200, a_task(FULL_ID, "succeeded"))
    service.reply_with(
        *(Reply(202, a_task(FULL_ID)), ended, ended, outcome("succeeded", result=7)),
        *(outcome("succeeded", result=7), Reply(200, a_task(FULL_ID, "stopping"))),
    )
    with Broker(service.url, "t") as broker:
        submitted = broker.submit("team.work:fit")
        assert submitted.wait(5).is_finished
        assert submitted.result(timeout_seconds=5) == 7
        assert submitted.outcome().value == 7
        assert submitted.cancel(reason="wrong data").state == "stopping"
    assert service.requests[-1].body == {"reason": "wrong data"}


async def test_a_task_of_an_async_broker_is_awaited(service: RecordedService) -> None:
    ended = Reply(200, a_task(FULL_ID, "succeeded"))
    service.reply_with(Reply(202, a_task(FULL_ID)), ended, outcome("succeeded", result=7))
    async with AsyncBroker(service.url, "t") as broker:
        assert await (await broker.submit("team.work:fit")).result() == 7


def test_the_texts_of_tasks_and_brokers_are_short(service: RecordedService) -> None:
    service.reply_with(Reply(202, a_task(FULL_ID, name="fit", node="n1", state="running")))
    with Broker(service.url.replace("//", "//me:secret@"), "t") as broker:
        assert repr(broker) == f"<Broker {service.url}>"
        assert repr(broker.submit("team.work:fit")) == f"<Task {FULL_ID} 'fit', running on n1>"
