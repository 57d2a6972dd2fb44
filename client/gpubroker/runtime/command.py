"""A command of a run, or of one item: started, given the stop notice, listened to, and waited for."""

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from gpubroker.run_reports import REPORTS_VARIABLE
from gpubroker.runtime.command_reports import CommandReports
from gpubroker.runtime.messages import ENDED_WELL, RunKey, RunOrder, RunOutcome, failed
from gpubroker.runtime.process import INSTANCE_MARK
from gpubroker.runtime.task import RunningTask

_NOT_COMPLETE = (
    "gpubroker: this command ended with exit code 0 after the stop notice, so it counts as stopped, not as "
    "done; a command whose work is done says so: gpubroker complete, or the line complete in "
    f"{REPORTS_VARIABLE}"
)


class CommandTimeout(Exception):
    """The command did not end in time, and was killed."""


class Command:
    """Runs one command in a process group of its own, so that the notice reaches all processes that the
    command has started."""

    def __init__(
        self,
        words: Sequence[str],
        run: RunKey,
        task: RunningTask,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._words = words
        self._environment = environment
        self._run = run
        self._task = task
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._end = -1
        """A pidfd, readable once the command has ended. The command is reaped later, so its pid is not
        reused."""
        self._had_notice = False

    def run(self, timeout_seconds: float | None = None) -> RunOutcome:
        """Run the command to its end. Raises CommandTimeout if it takes longer than `timeout_seconds`.

        Exit code 0 is success, unless the stop notice came first: a command may save its work and exit with 0
        because it was asked to stop. After a notice, only a command that has reported completion has
        succeeded, whatever its exit code, since the notice may have ended it.
        """
        with _reports_of(self._run, self._task) as reports:
            try:
                if not self._start(reports):
                    return RunOutcome("stopped")
            except (OSError, ValueError) as fault:
                return failed("exit_code", f"cannot start {self._words[0]!r}: {fault}")
            try:
                if not self._wait_for_end(reports, timeout_seconds):
                    self._kill()
                    raise CommandTimeout
            finally:
                code = self._reap()
            return self._outcome(code, completed=reports is not None and reports.completed)

    def end(self, grace_seconds: float) -> None:
        """Give the notice, and kill the command if it has not ended after the grace period."""
        self.stop()
        ready = select.poll()
        with self._lock:
            if self._child is None:
                return
            descriptor = os.dup(self._end)
        with os.fdopen(descriptor):
            ready.register(descriptor, select.POLLIN)
            if not ready.poll(grace_seconds * 1000):
                self._kill()

    def stop(self) -> None:
        """Give the notice as SIGTERM. Nothing happens if the command has ended."""
        with self._lock:
            if self._child is not None and not self._has_ended():
                self._had_notice = True
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._child.pid, signal.SIGTERM)

    def _start(self, reports: CommandReports | None) -> bool:
        """Start the command and return True; return False if the run has to stop. Raises OSError and
        ValueError."""
        env = {name: text for name, text in self._environment.items() if name != REPORTS_VARIABLE}
        if reports is not None:
            env[REPORTS_VARIABLE] = reports.path
        with self._lock:
            # Under the lock: a notice that is given now finds the child.
            if self._task.should_stop:
                return False
            child = subprocess.Popen(self._words, stdin=subprocess.DEVNULL, process_group=0, env=env)  # noqa: S603  # its purpose
            self._end = os.pidfd_open(child.pid)
            self._child = child
        return True

    def _wait_for_end(self, reports: CommandReports | None, timeout_seconds: float | None) -> bool:
        """Wait until the command has ended; return False if the time is over first."""
        until = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        ready = select.poll()
        ready.register(self._end, select.POLLIN)
        if reports is not None:
            ready.register(reports.descriptor, select.POLLIN)
        while not self._has_ended():
            remaining_seconds = None if until is None else until - time.monotonic()
            if remaining_seconds is not None and remaining_seconds <= 0:
                return False
            ready.poll(None if remaining_seconds is None else math.ceil(remaining_seconds * 1000))
            if reports is not None:
                reports.read()
        if reports is not None:
            reports.read()  # reports that were written just before the end
        return True

    def _has_ended(self) -> bool:
        ready = select.poll()
        ready.register(self._end, select.POLLIN)
        return bool(ready.poll(0))

    def _kill(self) -> None:
        assert self._child is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)

    def _reap(self) -> int:
        assert self._child is not None
        code = self._child.wait()
        with self._lock:
            self._child = None
            os.close(self._end)
        return code

    def _outcome(self, code: int, *, completed: bool) -> RunOutcome:
        if self._had_notice and completed:
            return RunOutcome("succeeded", result=json.dumps({"exit_code": code, "completed": True}).encode())
        if self._had_notice and code == 0:
            print(_NOT_COMPLETE, file=sys.stderr)
        if self._had_notice:
            return RunOutcome("stopped")
        if code == 0:
            return RunOutcome("succeeded", result=ENDED_WELL)
        return failed("exit_code", how_it_ended(self._words[0], code))


def run_command(order: RunOrder, task: RunningTask) -> RunOutcome:
    """Run the command of a run. A stop notice reaches it as SIGTERM, with its whole process group."""
    command = Command((*order.container, *order.command), order.key, task)
    task.call_on_stop(command.stop)
    return command.run()


def how_it_ended(program: str, code: int) -> str:
    if code > 0:
        return f"{program!r} ended with exit code {code}; its last output is in the log"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    return f"{program!r} was ended by signal {name}; its last output is in the log"


@contextlib.contextmanager
def _reports_of(run: RunKey, task: RunningTask) -> Iterator[CommandReports | None]:
    """Yield the file of reports, or None if none can be made: then the command runs without it."""
    try:
        reports = CommandReports(run, task, os.environ.get(INSTANCE_MARK, ""))
    except OSError as fault:
        print(f"gpubroker: this command has no file for its reports: {fault}", file=sys.stderr)
        yield None
        return
    try:
        yield reports
    finally:
        reports.close()
