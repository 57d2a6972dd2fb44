"""The output of runs, with standard output and standard error kept apart."""

import contextlib
import contextvars
import io
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Literal, Protocol

Stream = Literal["stdout", "stderr"]
LogStream = Literal["stdout", "stderr", "setup"]
"""A stream of a run's log: what it prints, or what the preparation of its environment printed."""
STREAMS: tuple[Stream, Stream] = ("stdout", "stderr")

TAIL_BYTES = 16 * 1024
UNSENT_BYTES = 2**20
"""The bytes of each stream, the newest, that are kept for a run in a shared process while its agent does not
listen."""


class Output(Protocol):
    def tail(self) -> bytes:
        """Return the newest bytes printed, at most TAIL_BYTES."""


class FileOutput:
    """Everything that this process and its children print, in two files of mode 0600."""

    def __init__(self, path: Path) -> None:
        # Kept open, because the run may become a user that may not open the files.
        self._descriptors = [_opened(file_of(path, stream)) for stream in STREAMS]

    def take_over(self) -> None:
        """Redirect standard output and error to the files, including raw writes and future children."""
        for number, descriptor in enumerate(self._descriptors, 1):
            os.dup2(descriptor, number)
        sys.stdout, sys.stderr = _stream(1), _stream(2)

    def tail(self) -> bytes:
        return _tail_of(*self._descriptors)


def file_of(path: Path, stream: Stream) -> Path:
    """Return the file of a stream. `path` is that of standard output; the other is beside it."""
    return path if stream == "stdout" else path.with_suffix(".err")


def tail_of_files(path: Path) -> bytes:
    """Return the newest bytes of a run's files. A file that cannot be read is left out."""
    with contextlib.ExitStack() as files:
        opened = []
        for stream in STREAMS:
            with contextlib.suppress(OSError):
                opened.append(files.enter_context(file_of(path, stream).open("rb")).fileno())
        return _tail_of(*opened)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)


def _tail_of(*descriptors: int) -> bytes:
    """Return the ends of these files. The last file gets at most half of the bytes, since it often says what
    went wrong; the other files get the rest. A file that cannot be read adds nothing: user code may have
    closed it, or the disk may be damaged."""
    tails: list[bytes] = []
    for descriptor in reversed(descriptors):
        room = TAIL_BYTES - sum(map(len, tails))
        limit = room // 2 if not tails and len(descriptors) > 1 else room
        with contextlib.suppress(OSError):
            size = os.fstat(descriptor).st_size
            tails.insert(0, os.pread(descriptor, limit, max(0, size - limit)))
    return b"".join(tails)


def _stream(descriptor: int) -> io.TextIOWrapper:
    raw = os.fdopen(descriptor, "wb", 0, closefd=False)
    return io.TextIOWrapper(raw, "utf-8", "replace", write_through=True)


class MemoryOutput:
    """The output that one of several runs in this process prints through `sys.stdout` and `sys.stderr`."""

    def __init__(self, on_print: Callable[[], None] | None = None) -> None:
        """`on_print` is called when there is output to take; None if no output will be taken."""
        self._on_print = on_print
        self._lock = threading.Lock()
        self._kept = bytearray()
        self._unsent: Mapping[Stream, bytearray] = {stream: bytearray() for stream in STREAMS}
        self._lost_bytes: Counter[Stream] = Counter()
        """The number of bytes that were printed while no output was taken, and were dropped."""

    def write(self, data: bytes, stream: Stream = "stdout") -> None:
        with self._lock:
            _append(self._kept, data, TAIL_BYTES)
            if self._on_print is None:
                return
            had_output = any(self._unsent.values())
            self._lost_bytes[stream] += _append(self._unsent[stream], data, UNSENT_BYTES)
        if not had_output:
            self._on_print()

    def take(self) -> tuple[bytes, bytes]:
        """Return the output since the last call: standard output, then standard error."""
        with self._lock:
            marks = (_mark(self._lost_bytes.pop(stream, 0)) for stream in STREAMS)
            output, errors = (
                mark + self._unsent[stream] for mark, stream in zip(marks, STREAMS, strict=True)
            )
            for unsent in self._unsent.values():
                unsent.clear()
        return output, errors

    def tail(self) -> bytes:
        with self._lock:
            return bytes(self._kept[-TAIL_BYTES:])


def _append(kept: bytearray, data: bytes, most_bytes: int) -> int:
    """Append the data, keep at least the newest `most_bytes`, and return how many bytes were dropped."""
    kept += data
    dropped = len(kept) - most_bytes if len(kept) > 2 * most_bytes else 0
    del kept[:dropped]
    return dropped


def _mark(lost_bytes: int) -> bytes:
    return b"\n[... %d bytes are lost: no agent took them ...]\n" % lost_bytes if lost_bytes else b""


_SINK: contextvars.ContextVar[MemoryOutput | None] = contextvars.ContextVar("gpubroker_output", default=None)


def enter_output(output: MemoryOutput) -> contextvars.Token[MemoryOutput | None]:
    return _SINK.set(output)


def leave_output(token: contextvars.Token[MemoryOutput | None]) -> None:
    _SINK.reset(token)


class SortedStream(io.TextIOBase):
    """Replaces `sys.stdout` or `sys.stderr`: output of a run goes to that run, other output to the previous
    stream."""

    def __init__(self, default: IO[str], stream: Stream = "stdout") -> None:
        self._otherwise = default
        self._stream = stream

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
        sink.write(text.encode(errors="replace"), self._stream)
        return len(text)

    def flush(self) -> None:
        if _SINK.get() is None:
            self._otherwise.flush()


def sort_output_by_run() -> None:
    """Separate the output of each run from now on, in a process that many runs share."""
    sys.stdout = SortedStream(sys.stdout, "stdout")
    sys.stderr = SortedStream(sys.stderr, "stderr")
