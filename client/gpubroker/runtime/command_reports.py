"""The file into which a command writes its reports, as the process of its run reads it."""

import os
import shutil
import sys
import tempfile
from pathlib import Path
from urllib.parse import quote

from gpubroker.run_reports import Checkpoint, Complete, Progress, read_line
from gpubroker.runtime.messages import RunKey
from gpubroker.runtime.task import RunningTask

_READ_BYTES = 64 * 1024
"""The bytes that Linux keeps of a pipe that nobody reads (pipe(7), default capacity)."""
_LINE_BYTES = 8192
_MAX_COMPLAINTS = 10
"""The most unreadable lines that are logged for one command, which may use the file for something else."""


class CommandReports:
    """A named pipe: a writer needs no library, two writers do not mix their lines, and nothing grows."""

    def __init__(self, run: RunKey, task: RunningTask, instance: str) -> None:
        """Make the pipe in a directory of its own. Raises OSError if the disk is full or read-only.

        `instance` is the id of the broker that started the run.
        """
        self._task = task
        directory = tempfile.mkdtemp(prefix=_beginning(instance, run))
        try:
            self.path = os.path.join(directory, "reports")
            os.mkfifo(self.path, 0o600)
            # Also open for writing, so that no writer waits for a reader and its end is not the end of all.
            self.descriptor = os.open(self.path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self.completed = False
        """True once the command has reported completion."""
        self._begun = b""
        """The beginning of a line whose end has not been read yet."""
        self._complaints = 0

    def read(self) -> None:
        """Pass on the reports that have been written so far, without waiting."""
        try:
            data = os.read(self.descriptor, _READ_BYTES)
        except BlockingIOError:
            return
        *lines, self._begun = (self._begun + data).split(b"\n")
        for line in lines:
            self._take(line.decode(errors="replace"))
        if len(self._begun) > _LINE_BYTES:
            self._complain(f"a line has at most {_LINE_BYTES} bytes")
            self._begun = b""

    def close(self) -> None:
        os.close(self.descriptor)
        shutil.rmtree(os.path.dirname(self.path), ignore_errors=True)

    def _take(self, line: str) -> None:
        if not line.strip():
            return
        try:
            match read_line(line):
                case Progress(fraction, message):
                    self._task.progress(fraction, message)
                case Checkpoint(None):
                    self._task.checkpoint(b"")
                case Checkpoint(uri):
                    self._task.checkpoint(uri=uri)
                case Complete():
                    self.completed = True
        except ValueError as fault:
            self._complain(str(fault))

    def _complain(self, problem: str) -> None:
        """Write one line to the log of the run."""
        self._complaints += 1
        if self._complaints <= _MAX_COMPLAINTS:
            print(f"gpubroker: a report of this command cannot be read: {problem}", file=sys.stderr)


def remove_reports_of(instance: str, key: RunKey) -> None:
    """Remove the files for reports of a run whose process was killed."""
    # A run that became another user may have found no other place than /tmp.
    for place in {tempfile.gettempdir(), "/tmp"}:  # noqa: S108  # nothing is made there
        for left in Path(place).glob(f"{_beginning(instance, key)}*"):
            # A link is another user's: `rmtree` follows none.
            shutil.rmtree(left, ignore_errors=True)


def _beginning(instance: str, key: RunKey) -> str:
    return f"gpubroker-{instance}-{quote(f'{key.task}-{key.fence}-{key.rank}', safe='')}-"
