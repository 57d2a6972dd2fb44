"""Many runs in one process, independent of one another."""

import asyncio
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from gpubroker import current_task
from gpubroker.runtime.host import RunHost
from gpubroker.runtime.journal import START_OVER, Journal
from gpubroker.runtime.messages import Report, RunKey, RunOrder
from gpubroker.runtime.output import FileOutput, sort_output_by_run, tail_of_files

from tests.client.runtime_jobs import COMPANY

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


class Hosted:
    """A host whose reports can be waited for."""

    def __init__(self) -> None:
        self._wake = threading.Event()
        self._journal = Journal(lambda _delay: self._wake.set())
        self.host = RunHost(self._journal)
        self._numbers = iter(range(10**6))

    def call(self, function: Any, *args: Any, **order: Any) -> RunKey:
        given = RunOrder(
            task=f"t{next(self._numbers)}",
            fence=1,
            kind="function",
            python=PYTHON,
            arguments=cloudpickle.dumps((function, args, {})),
            **order,
        )
        self.host.start_shared(given)
        return given.key

    def call_by_name(self, name: str, *args: Any) -> RunKey:
        given = RunOrder(
            task=f"t{next(self._numbers)}",
            fence=1,
            kind="entrypoint",
            entrypoint=f"tests.client.runtime_jobs:{name}",
            arguments=json.dumps({"args": args}).encode(),
        )
        self.host.start_shared(given)
        return given.key

    def end_of(self, key: RunKey) -> Report:
        while True:
            for _, report in self._journal.take(START_OVER, 10**9):
                if report[0] == "ended" and report[1:4] == key:
                    return report
            assert self._wake.wait(10), f"{key} did not end"
            self._wake.clear()

    def result_of(self, key: RunKey) -> Any:
        _, _, _, _, _, ending, result, _, failure, _ = self.end_of(key)
        assert ending == "succeeded", failure
        return json.loads(result)


@pytest.fixture
def hosted() -> Hosted:
    return Hosted()


def test_simultaneous_runs_each_know_their_own_task(hosted: Hosted) -> None:
    keys = [hosted.call_by_name("meet") for _ in range(COMPANY)]
    assert [hosted.result_of(key) for key in keys] == [key.task for key in keys]


def test_coroutines_and_their_threads_know_their_task(hosted: Hosted) -> None:
    async def work() -> list[str]:
        here, there = current_task().id, await asyncio.to_thread(lambda: current_task().id)
        return [here, there]

    key = hosted.call(work)
    assert hosted.result_of(key) == [key.task, key.task]


def test_thread_of_a_small_run_is_told_how_to_know_its_task(hosted: Hosted) -> None:
    def work() -> str:
        said: list[str] = []

        def ask() -> None:
            try:
                current_task()
            except Exception as fault:
                said.append(str(fault))

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        return said[0]

    assert "copy_context" in hosted.result_of(hosted.call(work))


def test_each_run_keeps_what_it_printed_and_logged(hosted: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as streams:
        sort_output(streams)
        keys = [hosted.call_by_name("print_in_company", name) for name in "abcd"]
        tails = [hosted.end_of(key)[9].decode() for key in keys]
    assert tails == [f"I am {name}\nlogged by {name}\nbye\n" for name in "abcd"]


def test_the_newest_output_is_kept(hosted: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as streams:
        sort_output(streams)
        tail = hosted.end_of(hosted.call(lambda: print("\n".join(map(str, range(100_000))))))[9]
    assert len(tail) == 16 * 1024
    assert tail.endswith(b"99998\n99999\n")


def test_a_stop_notice_reaches_its_run_and_no_other(hosted: Hosted) -> None:
    def work(patience_seconds: float) -> bool:
        return current_task().wait_for_stop(patience_seconds)

    asked = hosted.call(work, 10.0)
    other = hosted.call(work, 0.2)
    hosted.host.stop(asked)
    assert hosted.result_of(asked) is True
    assert hosted.result_of(other) is False


@pytest.mark.parametrize("code", [None, 0])
def test_exit_code_0_is_success_without_a_notice_and_obedience_after_one(
    hosted: Hosted, code: int | None
) -> None:
    def work(patience_seconds: float) -> None:
        current_task().wait_for_stop(patience_seconds)
        raise SystemExit(code)

    asked = hosted.call(work, 10.0)
    hosted.host.stop(asked)
    assert hosted.end_of(asked)[5:7] == ("stopped", None)
    assert hosted.result_of(hosted.call(work, 0.0)) is None


def test_a_stop_notice_for_a_run_that_has_ended_is_ignored(hosted: Hosted) -> None:
    key = hosted.call(lambda: None)
    hosted.end_of(key)
    hosted.host.stop(key)


@pytest.mark.parametrize("fault", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), ValueError("no")])
def test_any_exception_ends_its_run_and_nothing_else(hosted: Hosted, fault: BaseException) -> None:
    def work() -> None:
        raise fault

    _, _, _, _, _, ending, _, _, failure, _ = hosted.end_of(hosted.call(work))
    assert ending == "failed"
    assert failure[1].startswith(type(fault).__name__)
    assert hosted.result_of(hosted.call(lambda: "still here")) == "still here"


def test_a_run_that_closes_standard_output_still_ends(
    hosted: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def flush(self) -> None:
            raise OSError("closed")

    monkeypatch.setattr(sys, "stdout", Broken())
    assert hosted.result_of(hosted.call(lambda: 1)) == 1


def test_a_run_that_closed_its_log_still_ends_without_a_log_tail(tmp_path: Path) -> None:
    output = FileOutput(tmp_path / "log")
    for descriptor in output._descriptors:
        os.close(descriptor)
    assert output.tail() == b""


def sort_output(streams: pytest.MonkeyPatch) -> None:
    """For as long as the test looks: pytest puts its own streams in place between its phases."""
    streams.setattr(sys, "stdout", sys.stdout)
    streams.setattr(sys, "stderr", sys.stderr)
    sort_output_by_run()


def test_the_tail_of_a_run_is_without_the_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.log").mkdir()
    (tmp_path / "a.err").write_text("why")
    assert tail_of_files(tmp_path / "a.log") == b"why"
    assert tail_of_files(tmp_path / "none.log") == b""
