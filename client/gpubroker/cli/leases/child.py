"""A command that runs for as long as this process lets it, and never longer than this process lives."""

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
"""Added to the number of the signal that ended a command, as shells have it."""

_KEYS = (signal.SIGINT, signal.SIGQUIT)
"""Ctrl-C and Ctrl-\\: a terminal sends them to the command itself."""
_HEARD = (*_KEYS, signal.SIGTERM, signal.SIGHUP)

# In a process of its own, because threads of this one may hold locks while it is forked. Python ignores two
# signals that the command shall have as everybody has them.
_BIND_AND_BECOME = """
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


class Leash:
    """Signals that would end this process go to the command, and this process ends after it. One that comes
    before there is a command, or after it, ends this process as it always would; whoever waits for something
    gives it up.
    """

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._early: list[int] | None = None
        """Signals that came while the command was being started; None before."""

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """On the main thread; also around what must be put in order once the command has ended."""
        before = {number: signal.signal(number, self._pass_on) for number in _HEARD}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def start(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        """It is killed if this process is (on Linux)."""
        python = [sys.executable, "-I", "-S", "-c", _BIND_AND_BECOME, str(os.getpid())]
        self._early = []
        self._child = subprocess.Popen([*python, *words], env={**os.environ, **environment})  # noqa: S603  # its purpose
        for number in self._early:
            self._child.send_signal(number)

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        assert self._child is not None
        code = self._child.wait()
        self.is_over.set()
        return code if code >= 0 else EXIT_SIGNALLED - code

    def end(self, patience_seconds: float) -> None:
        """From another thread: SIGTERM, and SIGKILL when its patience is over."""
        assert self._child is not None
        self._child.send_signal(signal.SIGTERM)
        if not self.is_over.wait(patience_seconds):
            self._child.kill()

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        if self._early is None or self.is_over.is_set():
            raise SystemExit(EXIT_SIGNALLED + number)
        if self._child is None:
            self._early.append(number)
        elif number not in _KEYS or not _is_in_foreground():
            self._child.send_signal(number)


def _is_in_foreground() -> bool:
    """Whether the keys of a terminal reach this process, and so the command as well."""
    try:
        with Path("/dev/tty").open("rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:  # there is no terminal
        return False
