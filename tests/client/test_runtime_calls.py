"""The process of a worker of a set, without a service: the test calls it, and reads its reports."""

import asyncio
import hashlib
import json
import sys
import threading
import time
from typing import Any

import cloudpickle
import numpy
import pytest
from gpubroker import current_task
from gpubroker.runtime import calls
from gpubroker.runtime.calls import IS_LATE, WORKER_SET_VARIABLE, Answer, SetWorker
from gpubroker.runtime.host import RunHost
from gpubroker.runtime.journal import START_OVER, Journal
from gpubroker.runtime.messages import Report, RunKey, RunOrder, is_report
from gpubroker.runtime.objects import JSON_MARK

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
KEY = RunKey("t", 1, 0)
PATIENCE_SECONDS = 20.0


@pytest.fixture(autouse=True)
def _ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly every test ends its worker."""
    monkeypatch.setattr(calls, "SENT_SECONDS", 0.01)


class Counter:
    """What a worker is made of."""

    def __init__(self, start: int = 0) -> None:
        self.value = start
        self.is_healthy = True
        self.goes_on = threading.Event()
        self.has_begun = threading.Semaphore(0)

    def add(self, number: int = 1) -> int:
        self.value += number
        return self.value

    async def add_later(self, number: int) -> int:
        return self.add(number)

    def wait(self) -> str:
        self.has_begun.release()
        assert self.goes_on.wait(PATIENCE_SECONDS)
        return current_task().id

    def fail(self) -> None:
        raise ValueError("no")

    def check(self) -> bool:
        return self.is_healthy

    async def check_later(self) -> bool:
        return self.is_healthy

    def failed_by_numpy(self) -> Any:
        return numpy.bool_(False)

    def give(self, fault: str) -> "Cursed":
        return Cursed(fault)

    def fail_silently(self) -> None:
        raise Silent

    @property
    def broken(self) -> Any:
        raise Silent

    def _hidden(self) -> None: ...


class Silent(Exception):
    """Nobody can say what it is."""

    def __str__(self) -> str:
        raise type(self)


class Cursed:
    """Raises when it is written, and ends the process that opens it."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __reduce__(self) -> Any:
        if self.fault == "opened":
            return sys.exit, (1,)
        raise Silent if self.fault == "silent" else SystemExit


class Worker:
    def __init__(self, make: Any = Counter, *args: Any, most_bytes: int = 2**26, **terms: Any) -> None:
        self._wake = threading.Event()
        self._journal = Journal(lambda _delay: self._wake.set())
        self.made: list[Any] = []

        def making() -> Any:
            self.made.append(make(*args))
            return self.made[0]

        self.host = RunHost(self._journal)
        order = RunOrder(
            task="t",
            fence=1,
            kind="function",
            python=PYTHON,
            arguments=b"",
            result_limit_bytes=most_bytes,
            env={WORKER_SET_VARIABLE: json.dumps({"id": "t", "max_concurrency": 2, **terms})},
        )
        CALLED[KEY.task] = making
        self.host.start_shared(
            RunOrder(**{**order.to_wire(), "arguments": cloudpickle.dumps((made_here, ("t",), {}))})
        )
        self.worker: SetWorker = self.host.set_workers[KEY]

    def ask(self, method: str, *args: Any, role: str = "", seconds: float = PATIENCE_SECONDS) -> Any:
        """The future answer."""
        return self.worker.submit(role, method, "json", json.dumps({"args": args}).encode(), seconds)

    def call(self, method: str, *args: Any, **options: Any) -> Answer:
        found: Answer = self.ask(method, *args, **options).result(PATIENCE_SECONDS)
        return found

    def counter(self) -> Counter:
        self.call("")
        found: Counter = self.made[0]
        return found

    def next(self, kind: str) -> Report:
        while True:
            for _, report in self._journal.take(START_OVER, 10**9):
                if report[0] == kind:
                    assert is_report(report)
                    return report
            assert self.wakes(), f"no report of {kind}"

    def answered(self) -> int:
        """How many calls, as it has told last."""
        told = [report for _, report in self._journal.take(START_OVER, 10**9) if report[0] == "loaded"]
        return int(told[-1][8])

    def wakes(self) -> bool:
        """It has something to tell."""
        woken = self._wake.wait(PATIENCE_SECONDS)
        self._wake.clear()
        return woken

    def stop(self) -> Report:
        self.host.stop(KEY)
        return self.next("ended")


CALLED: dict[str, Any] = {}


def made_here(name: str) -> Any:
    """By name, so that the test has the very object."""
    return CALLED[name]()


def test_an_object_is_made_once_and_keeps_its_state_between_calls() -> None:
    worker = Worker(Counter, 10)
    assert worker.call("")[:2] == ("done", b"null")
    assert [worker.call("add", 5)[1], worker.call("add")[1], worker.call("add_later", 4)[1]] == [
        b"15", b"16", b"20",
    ]  # fmt: skip
    assert len(worker.made) == 1
    assert worker.stop()[5] == "stopped"


def test_pickled_arguments_get_a_pickled_result() -> None:
    worker = Worker()
    packed = cloudpickle.dumps(((2,), {}))
    answer = worker.worker.submit("", "add", "cloudpickle", packed, 9.0).result(PATIENCE_SECONDS)
    assert (answer[0], cloudpickle.loads(answer[1])) == ("done", 2)
    worker.stop()


@pytest.mark.parametrize(
    ("method", "args", "kind", "said"),
    [
        ("fail", (), "exception", "ValueError: no"),
        ("_hidden", (), "no_such_method", "Counter has no public method '_hidden'"),
        ("value", (), "no_such_method", "Counter has no public method 'value'"),
        ("add", ("a",), "exception", "TypeError: "),
        ("__class__", (), "no_such_method", "Counter has no public method '__class__'"),
    ],
)
def test_a_failed_call_says_why_and_the_worker_goes_on(method: str, args: Any, kind: str, said: str) -> None:
    worker = Worker()
    how, found, message, _ = worker.call(method, *args)
    assert (how, found) == ("failed", kind)
    assert message.startswith(said)
    assert worker.call("add")[0] == "done"
    worker.stop()


def test_arguments_that_cannot_be_opened_fail_the_call() -> None:
    worker = Worker()
    answer = worker.worker.submit("", "add", "cloudpickle", b"x", 9.0).result(PATIENCE_SECONDS)
    assert answer[:2] == ("failed", "corrupt_arguments")
    worker.stop()


@pytest.mark.parametrize(
    ("method", "argument", "kind"),
    [
        ("give", "leaving", "exception"),
        ("give", "silent", "exception"),
        ("fail_silently", None, "exception"),
        ("broken", None, "exception"),
        ("add", Cursed("opened"), "corrupt_arguments"),
    ],
)
def test_whatever_user_code_raises_fails_its_call_and_the_worker_goes_on(
    method: str, argument: Any, kind: str
) -> None:
    worker = Worker()
    packed = cloudpickle.dumps((() if argument is None else (argument,), {}))
    answer = worker.worker.submit("", method, "cloudpickle", packed, 9.0).result(PATIENCE_SECONDS)
    assert answer[:2] == ("failed", kind)
    assert worker.call("add")[0] == "done"
    worker.stop()


def test_roles_share_the_process_and_each_has_its_object() -> None:
    here = "tests.client.test_runtime_calls:Counter"
    worker = Worker(Counter, 1, roles={"other": {"entrypoint": here, "args": [100], "kwargs": {}}})
    assert (worker.call("add")[1], worker.call("add", role="other")[1]) == (b"2", b"101")
    assert worker.call("add", role="third")[1] == "no_such_role"
    worker.stop()


def test_calls_beyond_its_concurrency_wait_and_their_number_is_told() -> None:
    worker = Worker()
    counter = worker.counter()
    calls = [worker.ask("wait") for _ in range(3)]
    for _ in range(2):
        assert counter.has_begun.acquire(timeout=PATIENCE_SECONDS)
    while worker.next("loaded")[5:7] != (2, 1):
        pass
    counter.goes_on.set()
    assert [call.result(PATIENCE_SECONDS)[:2] for call in calls] == [("done", b'"t"')] * 3
    while worker.answered() != 3:
        assert worker.wakes()
    worker.stop()


def test_call_whose_time_is_over_before_its_turn_never_begins() -> None:
    worker = Worker(max_concurrency=1)
    counter = worker.counter()
    begun = worker.ask("wait")
    assert counter.has_begun.acquire(timeout=PATIENCE_SECONDS)
    arguments = json.dumps({"args": [1]}).encode()
    known = sys.getrefcount(arguments)
    for _ in range(3):
        call = worker.worker.call("", "add", "json", arguments, 0.01)
        assert asyncio.run(call) == IS_LATE
    del call
    assert sys.getrefcount(arguments) == known
    too_late = worker.ask("add", seconds=-1.0)
    counter.goes_on.set()
    assert too_late.result(PATIENCE_SECONDS) == IS_LATE
    assert (begun.result(PATIENCE_SECONDS)[0], counter.value) == ("done", 0)
    worker.stop()


def test_a_call_whose_time_is_over_before_the_object_is_made_never_begins() -> None:
    goes_on = threading.Event()

    def slow() -> Counter:
        assert goes_on.wait(PATIENCE_SECONDS)
        return Counter()

    worker = Worker(slow)
    for method in ("add", ""):
        assert asyncio.run(worker.worker.call("", method, "json", b"", 0.01)) == IS_LATE
    goes_on.set()
    assert worker.counter().value == 0
    worker.stop()


def test_a_worker_that_leaves_finishes_what_has_begun_and_refuses_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls, "SENT_SECONDS", 0.3)
    worker = Worker(max_concurrency=1)
    counter = worker.counter()
    begun, waits = worker.ask("wait"), worker.ask("add")
    assert counter.has_begun.acquire(timeout=PATIENCE_SECONDS)
    worker.host.stop(KEY)
    assert waits.result(PATIENCE_SECONDS) == worker.call("add") == ("refused", "the worker is leaving")
    went_on_at = time.monotonic()
    counter.goes_on.set()
    assert begun.result(PATIENCE_SECONDS)[0] == "done"
    assert (worker.next("ended")[5], counter.value) == ("stopped", 0)
    assert time.monotonic() - went_on_at >= 0.3, "the answer is on its way before the process is killed"


def test_an_object_that_cannot_be_made_ends_the_run_and_refuses_what_waits() -> None:
    goes_on = threading.Event()

    def broken() -> None:
        goes_on.wait(PATIENCE_SECONDS)
        raise RuntimeError("no model here")

    worker = Worker(broken)
    waiting = [worker.ask(""), worker.ask("add")]
    goes_on.set()
    assert {one.result(PATIENCE_SECONDS)[0] for one in waiting} == {"refused"}
    ended = worker.next("ended")
    assert (ended[5], ended[8][0], ended[8][1]) == ("failed", "exception", "RuntimeError: no model here")


def health(method: str, **terms: float) -> dict[str, Any]:
    usual = {"period_seconds": 0.0, "timeout_seconds": PATIENCE_SECONDS, "failures": 2}
    return {"method": method, **usual, **terms}


def test_a_worker_that_fails_several_checks_in_a_row_ends_as_unhealthy() -> None:
    worker = Worker(health=health("check"))
    worker.counter().is_healthy = False
    ended = worker.next("ended")
    said = "check failed 2 times in a row; the last time: it returned False"
    assert (ended[5], ended[8][:2]) == ("failed", ("unhealthy", said))


@pytest.mark.parametrize(
    ("method", "timeout", "said"),
    [
        ("fail", PATIENCE_SECONDS, "ValueError: no"),
        ("nothing", PATIENCE_SECONDS, "AttributeError: 'Counter' object has no attribute 'nothing'"),
        ("failed_by_numpy", PATIENCE_SECONDS, "it returned False"),
        ("wait", 0.0, "it did not answer within 0 s"),
    ],
)
def test_a_check_that_raises_or_hangs_is_a_failed_one(method: str, timeout: float, said: str) -> None:
    worker = Worker(health=health(method, timeout_seconds=timeout, failures=1))
    assert worker.next("ended")[8][1].endswith(said)
    worker.made[0].goes_on.set()


def test_a_check_that_is_a_coroutine_is_awaited() -> None:
    worker = Worker(health=health("check_later", failures=2))
    assert worker.next("loaded")[5:7] == (0, 0)
    worker.counter().is_healthy = False
    assert worker.next("ended")[8][1].endswith("in a row; the last time: it returned False")


class Unchecked:
    """A role's class without the method."""


class Judge:
    """One whose check never passes."""

    async def check(self) -> bool:
        return False


def test_the_objects_of_roles_that_have_the_method_are_checked_too() -> None:
    here = "tests.client.test_runtime_calls"
    roles = {
        name: {"entrypoint": f"{here}:{name}", "args": [], "kwargs": {}} for name in ("Unchecked", "Judge")
    }
    worker = Worker(health=health("check"), roles=roles)
    assert worker.next("ended")[8][1].endswith("the last time: role Judge: it returned False")


def test_objects_not_made_in_time_end_the_run_and_refuse_waiting_calls() -> None:
    goes_on = threading.Event()
    worker = Worker(goes_on.wait, PATIENCE_SECONDS, start_seconds=0.05)
    waiting = worker.ask("add")
    ended = worker.next("ended")
    assert (ended[5], ended[8][0]) == ("failed", "start_timeout")
    assert "not made within 0.05 s" in ended[8][1]
    assert "self.made.append(make(*args))" in ended[8][2], "where it was"
    assert waiting.result(PATIENCE_SECONDS)[0] == "refused"
    goes_on.set()


def test_a_worker_that_is_healthy_again_goes_on() -> None:
    worker = Worker(health=health("check", failures=1000))
    worker.counter().is_healthy = False
    assert worker.next("loaded")[5:7] == (0, 0)
    worker.counter().is_healthy = True
    assert worker.stop()[5] == "stopped"


def test_an_object_among_the_arguments_of_calls_at_once_is_fetched_once() -> None:
    worker = Worker(max_concurrency=2)
    worker.counter()
    data = JSON_MARK + b"7"
    id = hashlib.sha256(data).hexdigest()
    asked = [worker.ask("add", {"object": id}) for _ in range(2)]
    assert worker.next("wanted")[5] == id
    worker.host.take_object(KEY, id, data, None)
    assert sorted(answer.result(PATIENCE_SECONDS)[1] for answer in asked) == [b"14", b"7"]


def test_a_call_whose_object_is_missing_says_so() -> None:
    worker = Worker()
    worker.counter()
    asked = worker.ask("add", {"object": "a" * 64})
    worker.next("wanted")
    worker.host.take_object(KEY, "a" * 64, None, ("object_missing", "it was deleted"))
    failed, kind, message, _ = asked.result(PATIENCE_SECONDS)
    assert (failed, kind, message) == ("failed", "object_missing", "it was deleted")


def test_call_waiting_for_an_object_goes_elsewhere_if_the_worker_leaves() -> None:
    worker = Worker()
    worker.counter()
    asked = worker.ask("add", {"object": "a" * 64})
    worker.next("wanted")
    worker.host.stop(KEY)
    assert asked.result(PATIENCE_SECONDS) == calls.IS_LEAVING


def test_a_result_that_is_too_large_becomes_an_object() -> None:
    worker = Worker(most_bytes=0)
    worker.counter()
    asked = worker.ask("add", 12)
    part = worker.next("part")
    digest = hashlib.sha256(b"12").hexdigest()
    assert (part[5], part[6], part[8]) == (digest, 2, b"12")
    worker.host.answer_part(KEY, digest, 2, "")
    assert json.loads(asked.result(PATIENCE_SECONDS)[1]) == {"object": digest}
