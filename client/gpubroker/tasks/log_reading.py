"""Reads the output of a task line by line, through lost connections and from one attempt to the next."""

import re
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self, TypedDict

from gpubroker.errors import Unreachable
from gpubroker.runtime.output import LogStream
from gpubroker.tasks.task import Task
from gpubroker.transport.breaks import Breaks
from gpubroker.transport.exchange import Call, Pause, Steps
from gpubroker.transport.operations import Reading, without_none

_LINE = re.compile(rb"[^\r\n]*(?:\r?\n|\r(?!$))")
"""Matches one line. A progress bar ends its lines with a carriage return; one at the end of the data may be
the first half of `\\r\\n`, so it does not end a line yet."""
_CUT = re.compile(rb"(\[\.\.\. bytes \d+ to (\d+) were not kept \.\.\.\])([0-9a-f]+)\n")
"""Matches the line that the service writes in place of output it did not keep; the text goes on at the byte
named there. The line ends with the reader's mark, which distinguishes it from what the run printed."""


_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 0.5
"""The longest pause between two requests for streams that have nothing new."""


class LogLine(str):
    """A line that a task printed, including its line end."""

    __slots__ = ("stream",)

    stream: LogStream
    """The stream on which the line was printed: stdout, stderr or setup."""

    def __new__(cls, text: str, stream: LogStream) -> Self:
        line = super().__new__(cls, text)
        line.stream = stream
        return line


class LogOptions(TypedDict, total=False):
    """Selects the output of a task."""

    attempt: int
    """The number of the attempt. Default: the newest attempt; with `follow`, the newest and all later
    ones."""
    stream: LogStream
    """stdout or stderr, by default both; or setup, what the preparation of the environment printed.
    `line.stream` names the stream of each line."""
    rank: int
    """The rank of a gang."""
    worker: str
    """The id of one worker of an array or a worker set that has several."""
    offset: int
    """The byte of the attempt's stream at which to begin. It needs `stream`."""
    follow: bool
    """True to read until the task has ended. A task that has not started is waited for."""


class LogReading(Reading[LogLine]):
    """Reads one stream. Raises Unreachable if for `retry_seconds` each answer breaks off at once without a
    line."""

    def __init__(
        self,
        find: Callable[[], Steps[str]],
        get: Callable[[], Steps[Task]],
        wanted: LogOptions,
        retry_seconds: float,
        *,
        polls: bool = False,
    ) -> None:
        """If `polls` is True, the log is followed with short requests, each of which ends with the lines that
        exist by then, so that other readers get a turn in between."""
        self._polls = polls
        self._stream: LogStream = wanted.get("stream", "stdout")
        self._find = find
        self._path = ""
        self._get = get
        self._follows = wanted.get("follow", False)
        self._only = wanted.get("attempt")
        self._params = {name: wanted[name] for name in ("stream", "rank", "worker") if name in wanted}
        self._mark = secrets.token_hex(16)
        self._attempt = 0
        self._offset = wanted.get("offset", 0)
        self._begun = b""
        """The start of a line that has not ended."""
        self._called = self._was_over = self._ended_well = False
        """`_was_over` is True if the attempt had ended before the last call; `_ended_well`, if the answer to
        that call was read to its end."""
        self._called_for = 0
        self._has_news = False
        self._breaks = Breaks(retry_seconds)

    def next_call(self) -> Steps[Call | None]:
        self._path = self._path or (yield from self._find())
        if not self._follows and not self._called:
            self._called = True
            return self._call(self._only)
        if not self._follows and self._ended_well:
            return None
        yield from self._breaks.pause(f"the log cannot be read on from byte {self._offset}")
        task = yield from self._get()
        if not self._attempt:
            self._attempt = self._only or max(1, task.attempt)
        self._has_news = False
        if self._ended_well and self._was_over:
            if self._only is not None or (task.is_finished and task.attempt <= self._attempt):
                return None
            self._attempt, self._offset = self._attempt + 1, 0
        while self._polls and not task.is_finished and self._attempt > max(1, task.attempt, self._only or 0):
            yield Pause(_LONGEST_PAUSE_SECONDS)  # an attempt that has yet to come can only be followed
            task = yield from self._get()
        waits_again = task.state == "pending" and task.attempt == self._attempt
        self._was_over = task.is_finished or task.attempt > self._attempt or waits_again
        return self._call(self._attempt)

    @property
    def has_news(self) -> bool:
        """True if the answer to the last call contained a line."""
        return self._has_news

    def _call(self, attempt: int | None) -> Call:
        self._called_for = self._offset
        self._breaks.note_call()
        params: dict[str, Any] = {"attempt": attempt, "offset": self._offset or None}
        params |= {"follow": (self._follows and not self._polls) or None, "mark": self._mark}
        present_params = without_none(params)
        return Call("GET", f"{self._path}/logs", self._params | present_params)

    def take(self, data: bytes) -> Iterator[LogLine]:
        text, end = self._begun + data, 0
        for match in _LINE.finditer(text):
            end = match.end()
            yield self._counted(match[0])
        self._begun = text[end:]

    def end(self, fault: Unreachable | None) -> Iterable[LogLine]:
        """Return the last line if it has no line end and no more of it can follow. A line that was broken
        off, or whose end is still to be printed, is dropped: the next call reads it again."""
        broken = fault is not None
        self._ended_well = not broken
        self._breaks.note_end(is_broken=broken, has_news=self._offset != self._called_for)
        line, self._begun = self._begun, b""
        if broken or not line or (self._polls and not self._was_over):
            return ()
        return (self._counted(line),)

    def _counted(self, line: bytes) -> LogLine:
        self._has_news = True
        cut = _CUT.fullmatch(line)
        if cut is not None and cut[3].decode() == self._mark:
            self._offset, line = int(cut[2]), cut[1] + b"\n"
        else:
            self._offset += len(line)
        return LogLine(line.decode(errors="replace"), self._stream)


class BothStreams(Reading[LogLine]):
    """Reads standard output and standard error: one after the other if the log is complete, in turns, a few
    times a second, if it is followed."""

    def __init__(self, streams: Iterable[LogReading], *, follows: bool) -> None:
        self._streams = deque(streams)
        self._follows = follows
        self._quiet = 0
        """The number of consecutive answers that had nothing new."""

    def next_call(self) -> Steps[Call | None]:
        if self._streams and self._quiet >= len(self._streams):
            pause = _FIRST_PAUSE_SECONDS * 2.0 ** (self._quiet // len(self._streams) - 1)
            yield Pause(min(pause, _LONGEST_PAUSE_SECONDS))
        while self._streams:
            call = yield from self._streams[0].next_call()
            if call is not None:
                return call
            self._streams.popleft()
        return None

    def take(self, data: bytes) -> Iterable[LogLine]:
        return self._streams[0].take(data)

    def end(self, fault: Unreachable | None) -> Iterable[LogLine]:
        yield from self._streams[0].end(fault)
        if self._follows:
            self._quiet = 0 if self._streams[0].has_news else min(self._quiet + 1, 16)
            self._streams.rotate(-1)
