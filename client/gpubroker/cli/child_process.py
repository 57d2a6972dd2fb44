"""A child process that gets the signals of this process, and does not outlive it."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

EXIT_SIGNALLED = 128
"""The number that shells add to that of the signal that ended a command, to form the exit code."""

_KEY_SIGNALS = (signal.SIGINT, signal.SIGQUIT)
"""The signals of Ctrl-C and Ctrl-\\, which a terminal also sends to the command."""
_WAKE_SECONDS = 0.5
_SIGNALS = (*_KEY_SIGNALS, signal.SIGTERM, signal.SIGHUP)

# Runs in the child before the command: a preexec_fn could deadlock on locks that other threads hold. Python
# ignores two signals; the command gets their default.
_BIND_AND_EXEC = """
import ctypes, os, signal, sys
for number in (signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(number, signal.SIG_DFL)
if sys.platform == "linux":
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit()
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as fault:
    sys.exit(f"gpubroker: cannot start {sys.argv[2]!r}: {fault}")
"""


class ChildProcess:
    """Runs a child process. Signals that would end this process are passed on to the child, and this process
    ends after it. Before the child starts, and after it ends, they end this process."""

    def __init__(self) -> None:
        self.has_ended = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._early: list[int] | None = None
        """The signals received while the child is being started; None before."""

    @contextlib.contextmanager
    def signals_passed_on(self) -> Iterator[None]:
        """Pass signals on to the child. Works only on the main thread. The block also covers the cleanup
        after the child."""
        before = {number: signal.signal(number, self._pass_on) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def start(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the child. On Linux, the child is killed if this process is killed."""
        python = [sys.executable, "-I", "-S", "-c", _BIND_AND_EXEC, str(os.getpid())]
        self._early = []
        self._child = subprocess.Popen([*python, *words], env={**os.environ, **environment})  # noqa: S603
        for number in self._early:
            self._child.send_signal(number)

    def wait(self) -> int:
        """Wait for the end of the child and return its exit code."""
        assert self._child is not None
        threading.Thread(target=self._await_end, daemon=True).start()
        # The kernel may give a signal to another thread, which does not wake this one; but this one passes it
        # on.
        while not self.has_ended.wait(_WAKE_SECONDS):
            pass
        code: int = self._child.returncode
        return code if code >= 0 else EXIT_SIGNALLED - code

    def _await_end(self) -> None:
        assert self._child is not None
        self._child.wait()
        self.has_ended.set()

    def end(self, grace_seconds: float) -> None:
        """Send SIGTERM to the child, and SIGKILL after `grace_seconds`. May be called from another thread."""
        assert self._child is not None
        self._child.send_signal(signal.SIGTERM)
        if not self.has_ended.wait(grace_seconds):
            self._child.kill()

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        if self._early is None or self.has_ended.is_set():
            raise SystemExit(EXIT_SIGNALLED + number)
        if self._child is None:
            self._early.append(number)
        elif number not in _KEY_SIGNALS or not _is_in_foreground():
            self._child.send_signal(number)


def _is_in_foreground() -> bool:
    """True if a terminal sends key signals to this process, and so to the child as well."""
    try:
        with Path("/dev/tty").open("rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:  # there is no terminal
        return False
