"""A command of a run: what its end means after a stop notice, and what it reports from inside."""

import contextlib
import json
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpubroker.run_reports import REPORTS_VARIABLE
from gpubroker.runtime.command import Command
from gpubroker.runtime.host import RunHost
from gpubroker.runtime.items import ARRAY_VARIABLE
from gpubroker.runtime.journal import START_OVER, Journal
from gpubroker.runtime.messages import Report, RunKey, RunOrder, is_report
from gpubroker.runtime.task import RunningTask
from gpubroker_server.gateway.arrays.submit import joined

from tests.patience import PATIENCE_SECONDS

KEY = RunKey("t", 1, 0)
AT_WORK = 'echo "progress 0.5 at work" > "$GPUBROKER_REPORTS"; while :; do sleep 0.02; done'
"""The test waits for the report before it gives the notice."""


class Hosted:
    """A run of a command whose reports can be waited for."""

    key = KEY

    def __init__(self, script: str, *words: str, **order: Any) -> None:
        self._wake = threading.Event()
        self._journal = Journal(lambda _delay: self._wake.set())
        self.host = RunHost(self._journal)
        command = ("/bin/sh", "-c", script, "sh", *words)
        self.host.start_shared(RunOrder("t", 1, "command", command=command, **order))
        self._seen = 0

    def next(self, kind: str) -> Report:
        while True:
            for number, report in self._journal.take(START_OVER, 10**9):
                if number > self._seen and report[0] == kind:
                    self._seen = number
                    assert is_report(report)
                    return report
            assert self._wake.wait(PATIENCE_SECONDS), f"no report of {kind}"
            self._wake.clear()

    def stop_at_work(self) -> Report:
        """Its end after a notice that came when it was at work."""
        self.next("progressed")
        self.host.stop(KEY)
        return self.next("ended")


def test_command_that_exits_0_after_the_notice_is_stopped_and_logged_so(
    capfd: pytest.CaptureFixture[str],
) -> None:
    ended = Hosted(f"trap 'exit 0' TERM; {AT_WORK}").stop_at_work()
    assert ended[5:9] == ("stopped", None, "json", None)
    assert "counts as stopped, not as done" in capfd.readouterr().err


@pytest.mark.parametrize("ends_by", ["exit 7", "trap - TERM; kill -TERM $$"])
def test_a_command_that_ends_otherwise_after_the_notice_is_stopped(ends_by: str) -> None:
    ended = Hosted(f"trap '{ends_by}' TERM; {AT_WORK}").stop_at_work()
    assert ended[5:9] == ("stopped", None, "json", None)


@pytest.mark.parametrize(
    ("ends_by", "code"), [("exit 0", 0), ("exit 7", 7), ("trap - TERM; kill -TERM $$", -signal.SIGTERM)]
)
def test_command_that_reported_completion_succeeds_however_it_ends(ends_by: str, code: int) -> None:
    """It ends after the notice."""
    script = f"""trap 'echo complete > "$GPUBROKER_REPORTS"; {ends_by}' TERM; {AT_WORK}"""
    ended = Hosted(script).stop_at_work()
    assert ended[5] == "succeeded"
    assert json.loads(ended[6]) == {"exit_code": code, "completed": True}


@pytest.mark.parametrize("code", [0, 4])
def test_without_a_notice_the_exit_code_decides_whatever_was_reported(code: int) -> None:
    ended = Hosted(f'echo complete > "$GPUBROKER_REPORTS"; exit {code}').next("ended")
    if code == 0:
        assert ended[5:7] == ("succeeded", b'{"exit_code":0}')
    else:
        assert (ended[5], ended[8][0]) == ("failed", "exit_code")


def test_a_notice_before_the_start_leaves_the_command_unstarted(tmp_path: Path) -> None:
    task = a_task()
    task.give_notice()
    trace = tmp_path / "ran"
    assert Command(("touch", str(trace)), KEY, task).run().ending == "stopped"
    assert not trace.exists()


def test_a_command_that_had_ended_before_the_notice_has_succeeded() -> None:
    """The notice comes after the end, and before the process of the run has noticed the end."""

    class Late(Command):
        def _reap(self) -> int:
            self.stop()
            return super()._reap()

    outcome = Late(("/bin/sh", "-c", "exit 0"), KEY, a_task()).run()
    assert (outcome.ending, outcome.result) == ("succeeded", b'{"exit_code":0}')


def a_task(**order: Any) -> RunningTask:
    return RunningTask(RunOrder("t", 1, "command", **order), Journal(lambda _delay: None))


def test_a_command_reports_progress_and_checkpoints_line_by_line() -> None:
    run = Hosted(
        'exec > "$GPUBROKER_REPORTS"; echo progress 0.25 epoch 1 of 4; echo checkpoint s3://bucket/step 3;'
        "printf 'progress '; echo 'almost there'"
    )
    run.next("ended")
    told = {report[0]: report for _, report in run._journal.take(START_OVER, 10**9)}
    assert told["progressed"][5:] == (None, "almost there")
    assert told["checkpointed"][7:] == (None, "s3://bucket/step 3")


def test_checkpoint_without_a_place_only_says_that_the_work_is_safe() -> None:
    run = Hosted('echo checkpoint > "$GPUBROKER_REPORTS"')
    [data, uri] = run.next("checkpointed")[7:]
    assert (data, uri) == (b"\x00", None)


def test_unknown_report_line_is_told_in_the_log_and_harms_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    lines = "echo hello; echo progress 3 of 6; echo 'complete now'; printf '\\377\\n'; head -c 9000 /dev/zero"
    run = Hosted(f'{{ {lines}; }} > "$GPUBROKER_REPORTS"; exit 0')
    assert run.next("ended")[5] == "succeeded"
    said = capfd.readouterr().err
    assert "'hello'" in said
    assert "a fraction from 0 to 1; found 3.0" in said
    assert "complete now" in said


def test_the_file_for_reports_is_gone_with_the_command(tmp_path: Path) -> None:
    named = tmp_path / "named"
    run = Hosted(f'echo "$GPUBROKER_REPORTS" > {named}')
    run.next("ended")
    path = Path(named.read_text().strip())
    assert path.is_absolute()
    assert not path.parent.exists()


def test_a_command_runs_where_no_file_for_reports_can_be_made(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as machine:
        machine.setattr(tempfile, "tempdir", "/no/such/directory")
        machine.setenv(REPORTS_VARIABLE, "of another run")
        ended = Hosted('test -z "$GPUBROKER_REPORTS"').next("ended")
    assert ended[5:7] == ("succeeded", b'{"exit_code":0}')
    assert "no file for its reports" in capfd.readouterr().err


def test_a_notice_reaches_what_the_command_has_started() -> None:
    child = f"""trap 'echo complete > "$GPUBROKER_REPORTS"; exit' TERM; {AT_WORK}"""
    ended = Hosted('trap : TERM; sh -c "$1" & wait; wait', child).stop_at_work()
    assert json.loads(ended[6])["completed"] is True


def a_worker(script: str, items: list[Any]) -> Hosted:
    limits = {"id": "t", "item_retries": 0, "item_timeout_seconds": None, "pickled": False}
    packed = joined(b"", json.dumps(items).encode())
    return Hosted(script, arguments=packed, env={ARRAY_VARIABLE: json.dumps(limits)})


@contextlib.contextmanager
def holding(worker: Hosted, count: int) -> Iterator[None]:
    worker.host.answer_items(KEY, worker.next("items")[5], ((0, count),), is_over=False)
    worker.next("progressed")
    yield
    worker.host.stop(KEY)


def test_an_item_whose_command_exits_0_after_the_notice_is_given_back() -> None:
    worker = a_worker(f"trap 'exit 0' TERM; {AT_WORK}", [1, 2])
    with holding(worker, 2):
        pass
    last = worker.next("items")
    assert (last[6], last[7], last[8]) == ((), (), 0)
    assert worker.next("ended")[5] == "stopped"


def test_item_that_reported_completion_before_the_notice_is_done() -> None:
    worker = a_worker(f"""trap 'echo complete > "$GPUBROKER_REPORTS"; exit 0' TERM; {AT_WORK}""", [1, 2])
    with holding(worker, 2):
        pass
    last = worker.next("items")
    assert [(it[0], json.loads(it[3])["completed"]) for it in last[6]] == [(0, True)]
    assert worker.next("ended")[5] == "stopped"
