import json
from typing import Any

import pytest
from gpubroker import BrokerError, Refused, Unreachable
from gpubroker.transport.exchange import Answer, Call, Pause, error_of, exchange

GET = Call("GET", "/stats")
ONCE = Call("POST", "/tokens", repeatable=False)


def answer(status: int, body: Any = None, **headers: str) -> Answer:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(status, names, b"" if body is None else json.dumps(body).encode())


def test_temporary_refusal_is_retried_after_the_time_the_service_named() -> None:
    steps = exchange(GET, retry_seconds=60)
    assert next(steps) is GET
    pause = steps.send(answer(503, retry_after="2"))
    assert isinstance(pause, Pause)
    assert 2 <= pause.seconds < 3
    assert steps.send(None) is GET
    with pytest.raises(StopIteration) as done:
        steps.send(answer(200, {"ok": True}))
    assert done.value.value.json() == {"ok": True}


def test_retry_pauses_grow_until_the_time_is_over_and_the_error_is_raised() -> None:
    steps = exchange(GET, retry_seconds=3600)
    pauses = []
    next(steps)
    for _ in range(6):
        pause = steps.throw(Unreachable("no answer"))
        assert isinstance(pause, Pause)
        pauses.append(pause.seconds)
        assert next(steps) is GET
    assert all(0.5 * 0.1 * 2**n <= pause <= 0.1 * 2**n for n, pause in enumerate(pauses))

    steps = exchange(GET, retry_seconds=0)
    next(steps)
    with pytest.raises(Unreachable, match="no answer"):
        steps.throw(Unreachable("no answer"))


def test_a_request_that_timed_out_is_retried_however_long_it_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A dead connection uses up the timeout of one request; a new connection may work."""
    now = 0.0
    monkeypatch.setattr("gpubroker.transport.exchange.time.monotonic", lambda: now)
    steps = exchange(GET, retry_seconds=30)
    next(steps)
    now = 45.0
    assert isinstance(steps.throw(Unreachable("timed out")), Pause)
    assert next(steps) is GET
    now = 80.0
    with pytest.raises(Unreachable):
        steps.throw(Unreachable("timed out"))


def test_an_unrepeatable_call_is_not_retried_when_its_answer_is_lost() -> None:
    steps = exchange(ONCE, retry_seconds=3600)
    next(steps)
    with pytest.raises(Unreachable):
        steps.throw(Unreachable("reset"))


def test_an_unrepeatable_call_is_retried_when_nothing_was_done() -> None:
    steps = exchange(ONCE, retry_seconds=3600)
    next(steps)
    assert isinstance(steps.send(answer(503)), Pause)


@pytest.mark.parametrize("status", [502, 504])
def test_a_proxys_error_does_not_promise_that_nothing_was_done(status: int) -> None:
    steps = exchange(ONCE, retry_seconds=3600)
    next(steps)
    with pytest.raises(Unreachable):
        steps.send(answer(status))
    steps = exchange(GET, retry_seconds=3600)
    next(steps)
    assert isinstance(steps.send(answer(status)), Pause)


def test_a_refusal_is_not_retried() -> None:
    steps = exchange(GET, retry_seconds=3600)
    next(steps)
    problem = {
        "code": "exceeds-capacity",
        "detail": "90 GiB exceed the largest device",
        "request_id": "req_1",
        "errors": [
            {"pointer": "/resources/gpu_mb", "detail": "90 GiB exceed the largest device", "code": "x"},
            {"pointer": "/priority", "detail": "at most 60", "code": "above-cap"},
        ],
    }
    with pytest.raises(Refused) as refused:
        steps.send(answer(422, problem))
    error = refused.value
    assert (error.code, error.status, error.request_id) == ("exceeds-capacity", 422, "req_1")
    assert str(error) == "90 GiB exceed the largest device\n  /priority: at most 60"


def test_a_server_error_names_the_request_id() -> None:
    error = error_of(answer(500, {"detail": "the service made a mistake", "request_id": "req_1"}))
    assert "req_1" in str(error)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, Refused), (409, Refused), (500, BrokerError), (502, Unreachable), (503, Unreachable)],
)
def test_the_status_decides_the_exception(status: int, kind: type[BrokerError]) -> None:
    assert type(error_of(answer(status, {"detail": "so"}))) is kind


@pytest.mark.parametrize("content", [b"<html>", b"[1]", b""])
def test_an_error_without_a_problem_document_names_its_status(content: bytes) -> None:
    assert "418" in str(error_of(Answer(418, {}, content)))


def test_an_answer_that_is_not_json_suggests_that_the_address_is_wrong() -> None:
    with pytest.raises(BrokerError, match="is this address a gpubroker service"):
        Answer(200, {}, b"<html>welcome").json()
