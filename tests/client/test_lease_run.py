"""`gpubroker lease run`: a command that runs while its lease is held, with its signals and its exit code."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.client.command_line import Run
from tests.client.recorded_service import FULL_ID, RecordedService, Reply, a_problem
from tests.client.test_leases import AT, a_lease, wait_until
from tests.gateway.harness import PATIENCE_SECONDS


def test_lease_run_exits_with_the_exit_code_of_its_command(service: RecordedService, run: Run) -> None:
    service.always = Reply(202, a_lease())
    script = "import os, sys; print('on', os.environ['CUDA_VISIBLE_DEVICES'], flush=True); sys.exit(3)"
    ended = run("lease run --gpu-memory 1GiB --here --", sys.executable, "-c", script)
    assert ended.code == 3
    assert service.requests[0].body["pid"]
    assert service.requests[0].body["holder"].startswith(sys.executable)
    assert any(request.method == "DELETE" for request in service.requests)


@pytest.mark.parametrize("pid", [None, 7])
def test_the_exit_code_is_kept_if_the_lease_cannot_be_released(
    service: RecordedService, run: Run, monkeypatch: pytest.MonkeyPatch, pid: int | None
) -> None:
    monkeypatch.setattr("gpubroker.cli.lookup._RETRY_SECONDS", 0.0)
    service.reply_with(Reply(202, a_lease(pid=pid)))
    service.always = a_problem(503, "store-unavailable")
    ended = run("lease run --gpu-memory 1GiB --", sys.executable, "-c", "raise SystemExit(3)")
    assert ended.code == 3
    assert "was not released" in ended.err
    assert (f"gpubroker lease release {FULL_ID}" in ended.err) == (pid is None)


@contextlib.contextmanager
def a_wrapped_command(
    service: RecordedService, script: str, terminal: str = ""
) -> Iterator["subprocess.Popen[str]"]:
    """`gpubroker lease run` of a program that has printed its first line. Both print into one pipe.

    It has no terminal, unless it is given one.
    """
    opened = f"import os; os.open({terminal!r}, os.O_RDWR); " if terminal else ""
    wrapper = [sys.executable, "-c", f"{opened}from gpubroker.cli import main; main()", "lease", "run"]
    where = {"GPUBROKER_URL": service.url, "GPUBROKER_TOKEN": "gpb_secret"}
    with subprocess.Popen(
        [*wrapper, "--gpus", "1", "--", sys.executable, "-c", script],
        env=os.environ | where,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


# These wait for signals as values: a handler would not run if one came just before the script began to wait.
EXITS_WITH_ITS_SIGNAL = """
import signal, sys
heard = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
signal.pthread_sigmask(signal.SIG_BLOCK, heard)
print("ready", flush=True)
sys.exit(40 + signal.sigwait(heard))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT])
def test_a_signal_is_passed_to_the_command_and_then_the_lease_is_released(
    service: RecordedService, number: signal.Signals
) -> None:
    service.always = Reply(202, a_lease())
    with a_wrapped_command(service, EXITS_WITH_ITS_SIGNAL) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(PATIENCE_SECONDS) == 40 + number
    assert "DELETE" in [request.method for request in service.requests]


COUNTS_KEYS = """
import signal, sys
keys = (signal.SIGINT, signal.SIGQUIT)
heard = (*keys, signal.SIGTERM)
signal.pthread_sigmask(signal.SIG_BLOCK, heard)
print("ready", flush=True)
count = 0
while signal.sigwait(heard) in keys:
    count += 1
    print("key", flush=True)
sys.exit(count)
"""


@pytest.mark.parametrize("key", [b"\x03", b"\x1c"])
def test_a_key_signal_of_the_terminal_reaches_the_command_once(service: RecordedService, key: bytes) -> None:
    service.always = Reply(202, a_lease())
    keyboard, screen = os.openpty()
    with a_wrapped_command(service, COUNTS_KEYS, os.ttyname(screen)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.write(keyboard, key)
        assert process.stdout.readline() == "key\n"
        process.terminate()
        assert process.wait(PATIENCE_SECONDS) == 1
    os.close(keyboard)
    os.close(screen)


def test_the_command_does_not_outlive_the_process_that_holds_its_lease(service: RecordedService) -> None:
    service.always = Reply(202, a_lease())
    script = "import signal; print('ready', flush=True); signal.pause()"
    with a_wrapped_command(service, script) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.kill()
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)  # until no process holds the pipe
        assert output == ""


def test_a_signal_before_the_memory_is_given_releases_the_lease(service: RecordedService) -> None:
    service.always = Reply(202, a_lease("pending"))
    with a_wrapped_command(service, "print('started')") as process:
        wait_until(lambda: any(request.path.endswith("/wait") for request in service.requests))
        process.terminate()
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, output) == (128 + signal.SIGTERM, "")
    assert service.requests[-1].method == "DELETE"


def test_a_missing_program_is_reported_before_anything_is_sent(service: RecordedService, run: Run) -> None:
    ended = run("lease run --gpus 1 -- no-such-program")
    assert ended.code == 2
    assert "no program 'no-such-program'" in ended.err
    assert not service.requests


def test_a_notice_to_the_lease_ends_the_command(service: RecordedService, run: Run) -> None:
    stopping = a_lease("stopping", notice={"reason": "preempt", "deadline_at": AT})
    service.reply_with(Reply(202, a_lease()), Reply(200, stopping), Reply(200, a_lease("ended")))
    ended = run("lease run --gpu-memory 1GiB --", sys.executable, "-c", "import time; time.sleep(60)")
    assert ended.code == 128 + 15
    assert "must be released (preempt)" in ended.err


def test_a_refused_renewal_ends_the_command_and_is_printed_once(service: RecordedService, run: Run) -> None:
    service.reply_with(Reply(202, a_lease()), a_problem(403, "forbidden"), Reply(200, a_lease("ended")))
    ended = run("lease run --gpu-memory 1GiB --", sys.executable, "-c", "import time; time.sleep(60)")
    assert ended.code == 128 + 15
    assert ended.err.count("(refused: ") == 1
    assert "Traceback" not in ended.err


def test_a_lease_without_a_command_is_a_usage_error(service: RecordedService, run: Run) -> None:
    assert run("lease run --gpus 1").code == 2
    assert not service.requests
