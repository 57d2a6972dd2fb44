"""The output of runs: the newest bytes of each are kept, so that a failure can be read without a shell."""

import contextlib
import contextvars
import io
import os
import sys
import threading
from pathlib import Path
from typing import IO, Protocol

TAIL_BYTES = 16 * 1024


class Output(Protocol):
    def tail(self) -> bytes:
        """The newest bytes printed, at most TAIL_BYTES."""
        ...


class FileOutput:
    """Everything this process and its children print, in one file of mode 0600."""

    def __init__(self, path: Path) -> None:
        # Kept open: the run may become a user that may not open it.
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)

    def take_over(self) -> None:
        """Send standard output and error here, raw writes and future children included."""
        os.dup2(self._descriptor, 1)
        os.dup2(self._descriptor, 2)
        sys.stdout, sys.stderr = _stream(1), _stream(2)

    def tail(self) -> bytes:
        # User code may have closed every descriptor.
        with contextlib.suppress(OSError):
            return _tail(self._descriptor)
        return b""


def tail_of_file(path: Path) -> bytes:
    """The newest bytes of a log; empty if there is none."""
    try:
        with path.open("rb") as file:
            return _tail(file.fileno())
    except OSError:
        return b""


def _tail(descriptor: int) -> bytes:
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, TAIL_BYTES, max(0, size - TAIL_BYTES))


def _stream(descriptor: int) -> io.TextIOWrapper:
    raw = os.fdopen(descriptor, "wb", 0, closefd=False)
    return io.TextIOWrapper(raw, "utf-8", "replace", write_through=True)


class MemoryOutput:
    """What one of several runs in this process prints through `sys.stdout` and `sys.stderr`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept = bytearray()

    def write(self, data: bytes) -> None:
        with self._lock:
            self._kept += data
            if len(self._kept) > 2 * TAIL_BYTES:
                del self._kept[:-TAIL_BYTES]

    def tail(self) -> bytes:
        with self._lock:
            return bytes(self._kept[-TAIL_BYTES:])


_SINK: contextvars.ContextVar[MemoryOutput | None] = contextvars.ContextVar("gpubroker_output", default=None)


def enter_output(output: MemoryOutput) -> contextvars.Token[MemoryOutput | None]:
    return _SINK.set(output)


def leave_output(token: contextvars.Token[MemoryOutput | None]) -> None:
    _SINK.reset(token)


class SortedStream(io.TextIOBase):
    """Replaces `sys.stdout`: the output of a run goes to that run, all other output where it went before."""

    def __init__(self, otherwise: IO[str]) -> None:
        self._otherwise = otherwise

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._otherwise.fileno()

    def write(self, text: str) -> int:
        sink = _SINK.get()
        if sink is None:
            return self._otherwise.write(text)
        sink.write(text.encode(errors="replace"))
        return len(text)

    def flush(self) -> None:
        if _SINK.get() is None:
            self._otherwise.flush()


def sort_output_by_run() -> None:
    """Separate the output of each run from now on. For a process that many runs share."""
    sys.stdout = SortedStream(sys.stdout)
    sys.stderr = SortedStream(sys.stderr)
