"""The process of a worker of an array, without a service: the test is its leader."""

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from gpubroker import Stopped
from gpubroker.runtime.host import RunHost
from gpubroker.runtime.items import ARRAY_VARIABLE
from gpubroker.runtime.journal import START_OVER, Journal
from gpubroker.runtime.messages import Report, RunKey, RunOrder, is_report, items
from gpubroker.runtime.objects import ObjectRef
from gpubroker_server.core.domain.submission import ARRAY_IMPORT_FAILED
from gpubroker_server.gateway.arrays.submit import joined

from tests.client import runtime_jobs as jobs

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
KEY = RunKey("t", 1, 0)
PATIENCE_SECONDS = 20.0


class Worker:
    """A worker whose reports are answered by hand."""

    def __init__(
        self,
        function: Any,
        items: Any,
        *,
        common: tuple[Any, ...] = (),
        timeout: float | None = None,
        retries: int = 0,
        retry_on: list[str] | None = None,
        **order: Any,
    ) -> None:
        self._wake = threading.Event()
        self._journal = Journal(lambda _delay: self._wake.set())
        self.host = RunHost(self._journal)
        command = tuple(function) if isinstance(function, list) else ()
        arguments = b"" if command else cloudpickle.dumps((function, common, {}))
        pickled = isinstance(items, bytes) and not items.lstrip().startswith(b"[")
        limits = {"id": "t", "item_retries": retries, "item_timeout_seconds": timeout, "pickled": pickled}
        if retry_on is not None:  # an earlier service leaves it out
            limits["retry_on"] = retry_on
        packed = json.dumps(items).encode() if isinstance(items, list) else items
        self.host.start_shared(
            RunOrder(
                task="t",
                fence=1,
                kind="command" if command else "function",
                command=command,
                python=PYTHON,
                arguments=joined(arguments, packed),
                env={ARRAY_VARIABLE: json.dumps(limits)},
                **order,
            )
        )
        self._seen = 0

    def next(self, kind: str = "items") -> Report:
        """The next report of this kind that is newer than the one before."""
        while True:
            for number, report in self._journal.take(START_OVER, 10**9):
                if number > self._seen and report[0] == kind:
                    self._seen = number
                    assert is_report(report)
                    return report
            assert self._wake.wait(PATIENCE_SECONDS), f"no report of {kind}"
            self._wake.clear()

    def hold(self, report: Report, *ranges: tuple[int, int], is_over: bool = False) -> None:
        self.host.answer_items(KEY, report[5], ranges, is_over=is_over)

    def results(self, count: int) -> list[Any]:
        """Of a worker that has got its items."""
        while len((report := self.next())[6]) < count:
            pass
        self.hold(report, is_over=True)
        return list(report[6])

    def until_done(self, *ranges: tuple[int, int]) -> list[Any]:
        """Give these items, and return their results."""
        self.hold(self.next(), *ranges)
        wanted = sum(behind - first for first, behind in ranges)
        results = self.results(wanted)
        assert self.next("ended")[5:7] == ("succeeded", b"null")
        return results


def double(item: int) -> int:
    return item * 2


def test_worker_does_its_items_and_reports_those_not_answered() -> None:
    worker = Worker(double, [5, 6, 7, 8])
    first = worker.next()
    assert (first[6], first[7], first[8]) == ((), (), 1), "it has nothing, and knows no time of an item"
    worker.hold(first, (1, 3))
    second = worker.next()
    assert [(it[0], it[3]) for it in second[6]] == [(1, b"12"), (2, b"14")]
    assert second[8] > 1
    worker.hold(second, (3, 4))
    third = worker.next()
    assert [it[0] for it in third[6]] == [3], "what was answered is not repeated"
    worker.hold(second, (0, 1))
    worker.hold(third, is_over=True)
    assert worker.next("ended")[5] == "succeeded"


def takes_a_moment(item: int) -> int:
    time.sleep(0.03)
    return item


def test_more_is_asked_for_before_the_last_item_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpubroker.runtime.items.REPORT_SECONDS", 1000.0)
    worker = Worker(takes_a_moment, list(range(20)))
    worker.hold(worker.next(), (0, 20))
    report = worker.next()
    assert 0 < len(report[6]) < 20
    assert report[7], "there is work for the time until the answer"
    assert 1 <= report[8] <= 33, "about a second of work is wanted"
    worker.results(20)


@pytest.mark.parametrize("kind", ["function", "command"])
def test_what_is_done_is_reported_while_the_next_item_runs(kind: str, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    script = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)"
    what: Any = jobs.waits_for_file if kind == "function" else [sys.executable, "-c", script]
    worker = Worker(what, ["/", str(gate)])
    worker.hold(worker.next(), (0, 2))
    report = worker.next()
    assert ([it[0] for it in report[6]], report[7]) == ([0], ((1, 2),))
    gate.touch()
    assert [it[0] for it in worker.results(2)] == [0, 1]


def test_an_answer_that_was_lost_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpubroker.runtime.items.AGAIN_SECONDS", 0.05)
    worker = Worker(double, [1])
    assert worker.next()[5] < worker.next()[5]
    worker.until_done((0, 1))


def test_items_fail_one_by_one_and_are_tried_again() -> None:
    jobs.ONCE.clear()
    one, two, three = Worker(jobs.fails_odd_and_once, [1, 2, 4], retries=1).until_done((0, 3))
    assert (one[2], one[3], one[4][:2]) == (2, None, ("exception", "ValueError: odd"))
    assert "fails_odd_and_once" in one[4][2]
    assert (two[2], two[3], two[4]) == (2, b"2", None)
    assert (three[2], three[3]) == (1, b"4")


def spins_once(item: str) -> str:
    """Too long at the first try."""
    if not Path(item).exists():
        Path(item).touch()
        while True:
            pass
    return item


@pytest.mark.parametrize(
    ("retry_on", "late", "odd"),
    [(["failure"], (1, "timeout"), (2, "exception")), (["timeout"], (2, None), (1, "exception"))],
)
def test_a_retry_of_an_item_is_for_what_its_array_names(
    retry_on: list[str], late: tuple[int, str | None], odd: tuple[int, str | None], tmp_path: Path
) -> None:
    def kind_of(result: Any) -> tuple[int, str | None]:
        return result[2], None if result[4] is None else result[4][0]

    slow = Worker(spins_once, [str(tmp_path / "trace")], timeout=0.2, retries=1, retry_on=retry_on)
    failing = Worker(jobs.fails_odd_and_once, [1], retries=1, retry_on=retry_on)
    [one], [other] = slow.until_done((0, 1)), failing.until_done((0, 1))
    assert (kind_of(one), kind_of(other)) == (late, odd)


def test_pickled_items_and_an_item_that_is_not_there() -> None:
    results = Worker(len, cloudpickle.dumps([{1, 2}, ()])).until_done((0, 3))
    assert [it[3] for it in results] == [b"2", b"0", None]
    assert "there is no item 2" in results[2][4][1]


def test_json_items_of_a_function_may_begin_with_white_space() -> None:
    assert [it[3] for it in Worker(double, b"\n [1, 2]").until_done((0, 2))] == [b"2", b"4"]


def test_items_that_cannot_be_opened_end_the_run() -> None:
    worker = Worker(double, b"\x80nonsense")
    failure = worker.next("ended")[8]
    assert failure[0] == ARRAY_IMPORT_FAILED
    assert "the items cannot be opened" in failure[1]


def test_a_command_opens_no_pickled_items() -> None:
    failure = Worker(["true", "{}"], cloudpickle.dumps([1])).next("ended")[8]
    assert failure[0] == ARRAY_IMPORT_FAILED


def test_a_notice_ends_it_after_its_item_and_it_gives_the_others_back() -> None:
    began = threading.Event()

    jobs.BEGAN = began
    worker = Worker(jobs.waits_for_notice, [0, 1, 2])
    worker.hold(worker.next(), (0, 3))
    assert began.wait(PATIENCE_SECONDS)
    worker.host.stop(KEY)
    last = worker.next()
    assert (last[6], last[7], last[8]) == ((), (), 0)
    assert worker.next("ended")[5] == "stopped"


def test_a_function_that_raises_stopped_without_a_notice_has_failed() -> None:
    def gives_up(_item: int) -> None:
        raise Stopped

    [only] = Worker(gives_up, [0]).until_done((0, 1))
    assert only[4][0] == "stopped_unasked"


def test_an_item_in_python_code_is_interrupted_at_its_time_limit() -> None:
    def spins(item: int) -> int:
        while item == 0:
            pass
        return item

    first, second = Worker(spins, [0, 1], timeout=0.2).until_done((0, 2))
    assert first[4][:2] == ("timeout", "the item took longer than 0.2 s")
    assert (second[3], second[4]) == (b"1", None)


def test_an_item_that_cannot_be_interrupted_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpubroker.runtime.items.STUCK_SECONDS", 0.1)
    release = threading.Event()
    jobs.BEGAN = release
    worker = Worker(jobs.is_stuck, [0, 1], timeout=0.1)
    worker.hold(worker.next(), (0, 2))
    last = worker.next()
    assert [(it[0], it[4][0]) for it in last[6]] == [(0, "timeout")]
    assert last[8] == 0
    ended = worker.next("ended")
    assert (ended[5], ended[8][0]) == ("failed", "item_timeout")
    release.set()


def test_an_item_that_is_stuck_on_its_second_try_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpubroker.runtime.items.STUCK_SECONDS", 0.1)
    jobs.ONCE.clear()
    jobs.BEGAN = release = threading.Event()
    worker = Worker(jobs.fails_and_is_stuck, [0], timeout=0.1, retries=2)
    worker.hold(worker.next(), (0, 1))
    [only] = worker.next()[6]
    assert (only[2], only[4][0]) == (2, "timeout")
    assert worker.next("ended")[5] == "failed"
    release.set()


def test_results_count_towards_what_is_taken_at_once() -> None:
    journal = Journal(lambda _delay: None)
    for number in range(4):
        journal.note(number, items(KEY, 1, [(0, 0.1, 1, b"x" * 60, None)], [], 1))
    assert [len(journal.take(0, 100)) for _ in range(3)] == [2, 2, 0]


def test_a_command_gets_the_item_as_a_word(tmp_path: Path) -> None:
    script = "import sys; open(sys.argv[1], 'w').write(sys.argv[2]); sys.exit(int(sys.argv[2] == 'bad'))"
    path = str(tmp_path / "out")
    good, bad, missing = Worker([sys.executable, "-c", script, path], ["good", "bad", {"a": 1}]).until_done(
        (0, 3)
    )
    assert (good[3], bad[4][0], missing[3]) == (b'{"exit_code":0}', "exit_code", b'{"exit_code":0}')
    assert Path(path).read_text() == '{"a": 1}'
    [placed] = Worker([sys.executable, "-c", script, "{}", "x"], [path]).until_done((0, 1))
    assert placed[4] is None
    assert Path(path).read_text() == "x"
    [inside] = Worker([sys.executable, "-c", script, "{}.txt", "{}"], [path]).until_done((0, 1))
    assert inside[4] is None
    assert Path(f"{path}.txt").read_text() == path
    [absent] = Worker(["/no/such/program"], [1]).until_done((0, 1))
    assert "cannot start" in absent[4][1]


def test_a_command_is_killed_at_its_time_limit_and_by_a_notice() -> None:
    [slow] = Worker(["sleep"], ["600"], timeout=0.1).until_done((0, 1))
    assert slow[4][0] == "timeout"
    worker = Worker(["sleep"], ["600"])
    worker.hold(worker.next(), (0, 1))
    while worker.host._workers[KEY]._command is None:
        assert not threading.Event().wait(0.01)
    worker.host.stop(KEY)
    assert worker.next("ended")[5] == "stopped"


def test_results_that_nobody_takes_hold_the_next_item_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpubroker.runtime.items.MAX_UNANSWERED_BYTES", 10)
    worker = Worker(str, [10**20, 2, 3])
    worker.hold(worker.next(), (0, 3))
    report = worker.next()
    assert [it[0] for it in report[6]] == [0]
    assert report[7] == ((1, 3),)
    worker.hold(report, (1, 3))
    report = worker.next()
    assert [it[0] for it in report[6]] == [1, 2]
    worker.hold(report, is_over=True)
    assert worker.next("ended")[5] == "succeeded"


def test_items_are_unpickled_for_functions_only(tmp_path: Path) -> None:
    """Whoever may submit a command or an entrypoint may not therefore run code of its own."""
    trace = tmp_path / "ran"

    class Item:
        def __reduce__(self) -> Any:
            return trace.touch, ()

    worker = Worker(["true"], cloudpickle.dumps([Item()]))
    failure = worker.next("ended")[8]
    assert failure[0] == ARRAY_IMPORT_FAILED
    assert not trace.exists()


def test_item_naming_an_object_gets_it_and_a_missing_one_fails_alone() -> None:
    worker = Worker(len, [{"object": "ab" * 32}, {"object": "cd" * 32}, "three"])
    worker.hold(worker.next(), (0, 3))
    for kept in (memoryview(b"1234"), None):
        id = worker.next("wanted")[5]
        failure = None if kept is not None else ("object_missing", "deleted")
        worker.host.take_object(KEY, id, kept, failure)
    found = {result[0]: result[3:] for result in worker.results(3)}
    assert found[0] == (b"4", None)
    assert found[1][1][:2] == ("object_missing", "deleted")
    assert found[2] == (b"5", None)


@pytest.mark.parametrize("kind", ["object_missing", "object_unreadable"])
def test_worker_that_cannot_open_a_common_argument_fails_like_an_import(kind: str) -> None:
    """It is not tried again as often as a worker whose items crash."""
    worker = Worker(len, [1], common=(ObjectRef("ab" * 32),))
    worker.host.take_object(KEY, worker.next("wanted")[5], None, (kind, "this is why"))
    assert worker.next("ended")[8][:2] == (ARRAY_IMPORT_FAILED, "this is why")


def test_large_item_result_becomes_an_object_named_in_the_arrays_format() -> None:
    worker = Worker(
        lambda number: "x" * number, [10, 100], result_limit_bytes=64, result_format="cloudpickle"
    )
    worker.hold(worker.next(), (0, 2))
    digest = worker.next("part")[5]
    worker.host.answer_part(KEY, digest, 10**6, "")
    assert [cloudpickle.loads(result[3]) for result in worker.results(2)] == ["x" * 10, ObjectRef(digest)]
