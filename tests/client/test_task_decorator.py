"""Functions that say how they are submitted, and stay functions."""

import base64
import subprocess
import sys
from typing import Any

import cloudpickle
import pytest
from gpubroker import Broker, Submission, WrongArgument, task

from tests.client.conftest import Do
from tests.client.recorded_service import FULL_ID, Asked, RecordedService, Reply, a_task


@task(gpu_mb=2048, priority="critical", labels={"team": "vision"}, max_retries=2)
def power(base: int, exponent: int = 2) -> int:
    """Of two numbers."""
    return int(base**exponent)


def called(asked: Asked) -> tuple[Any, ...]:
    """What would be called, with what."""
    body: dict[str, Any] = asked.body
    return tuple(cloudpickle.loads(base64.b64decode(body["run"]["function"])))


def test_it_is_the_function_that_it_was() -> None:
    assert power(3) == 9
    assert (power.__name__, power.__doc__) == ("power", "Of two numbers.")


def test_it_is_queued_as_it_says(service: RecordedService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpubroker.decorators._default_broker", lambda: Broker(service.url, "t"))
    service.told(Reply(202, a_task(FULL_ID)))
    queued = power.submit(3, exponent=4)
    assert queued.id == FULL_ID
    [asked] = service.asked
    function, args, kwargs = called(asked)
    assert (function(*args, **kwargs), args, kwargs) == (81, (3,), {"exponent": 4})
    assert (asked.body["priority"], asked.body["max_retries"]) == ("critical", 2)
    assert asked.body["labels"] == {"team": "vision"}
    assert asked.body["resources"] == {"gpu_mb": 2048}


def test_who_runs_it_pays_for_no_http_client() -> None:
    """As it travels from a script, where it has no module to be found in."""
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


def test_a_submit_says_besides_and_instead(service: RecordedService, do: Do) -> None:
    service.told(Reply(202, a_task(FULL_ID)))
    do("submit", power, 3, priority=10, stream="three")
    [asked] = service.asked
    assert (asked.body["priority"], asked.body["stream"]) == (10, "three")
    assert asked.body["resources"] == {"gpu_mb": 2048}


def test_many_and_what_if_know_it_too(service: RecordedService, do: Do) -> None:
    service.told(
        Reply(207, {"items": [{"status": 202, "id": FULL_ID}]}),
        Reply(200, {"verdict": "starts", "would_start": True}),
    )
    assert do("submit_many", [Submission(power, 3)]) == [FULL_ID]
    do("simulate", power, 3)
    many, what_if = (asked.body for asked in service.asked)
    assert many["tasks"][0]["resources"] == what_if["resources"] == {"gpu_mb": 2048}


def test_what_no_function_can_say_is_told_at_once() -> None:
    with pytest.raises(WrongArgument, match="has no option gpu; did you mean"):
        task(gpu=1)  # type: ignore[call-arg]  # the mistake is the test
    with pytest.raises(WrongArgument, match="kwargs belongs to one submit"):
        task(kwargs={"a": 1})
