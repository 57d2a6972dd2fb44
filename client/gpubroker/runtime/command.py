"""Run a command as the child of a run process: no shell, its output where this process prints."""

import contextlib
import os
import signal
import subprocess

from gpubroker.runtime.messages import Outcome, RunOrder, failed
from gpubroker.runtime.task import RunningTask


def run_command(order: RunOrder, task: RunningTask) -> Outcome:
    """Wait for the command's end. A stop notice reaches it as SIGTERM, with its whole process group."""
    try:
        # A group of its own, so that the notice reaches what the command itself started.
        child = subprocess.Popen(order.command, stdin=subprocess.DEVNULL, process_group=0)  # noqa: S603  # its purpose
    except (OSError, ValueError) as fault:
        return failed("exit_code", f"cannot start {order.command[0]!r}: {fault}")
    task.call_on_stop(lambda: _terminate(child))
    code = child.wait()
    if code == 0:
        return Outcome("succeeded", result=b'{"exit_code":0}')
    if task.should_stop:
        return Outcome("stopped")
    return failed("exit_code", _how_it_ended(order.command[0], code))


def _terminate(child: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGTERM)


def _how_it_ended(program: str, code: int) -> str:
    if code > 0:
        return f"{program!r} ended with exit code {code}; its last output is in the log"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    return f"{program!r} was ended by signal {name}; its last output is in the log"
