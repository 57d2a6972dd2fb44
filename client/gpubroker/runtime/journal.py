"""Reports that wait for their reader, in order and numbered, kept until acknowledged."""

import threading
from collections import deque
from collections.abc import Callable, Hashable

from gpubroker.runtime.messages import Report

AT_ONCE = 0.0
SOON = 0.004
"""A start may wait so long for its end, so that a short run costs one message."""
LAZILY = 0.1
"""Progress is told at most so often; only the newest of a run is kept."""

START_OVER = -1
"""What a reader acknowledges that does not know what the one before it read."""


class Journal:
    """Any thread may write; one reader at a time takes.

    `wake(delay_seconds)` is called from the writing thread when somebody should take within that delay and
    no earlier wake-up is due already.
    """

    def __init__(self, wake: Callable[[float], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._entries: deque[tuple[int, Report]] = deque()
        self._newest: dict[Hashable, Report] = {}
        self._last = 0
        self._taken = 0
        self._due: float | None = None

    def add(self, report: Report, delay_seconds: float = AT_ONCE, *, after_news_of: Hashable = None) -> None:
        """Enter a report that must not be lost, after the news noted under the given key."""
        with self._lock:
            self._enter_news(after_news_of)
            self._enter(report)
            wanted = self._wants_wake(delay_seconds)
        if wanted:
            self._wake(delay_seconds)

    def note(self, key: Hashable, report: Report, delay_seconds: float = LAZILY) -> None:
        """Enter news of which only the newest matters: it replaces what was noted and not yet taken."""
        with self._lock:
            self._newest[key] = report
            wanted = self._wants_wake(delay_seconds)
        if wanted:
            self._wake(delay_seconds)

    def take(self, acknowledged: int, limit_bytes: int) -> list[tuple[int, Report]]:
        """What was not taken before, with its numbers; stops after the report that exceeds the limit.

        Reports up to the number `acknowledged` are dropped. START_OVER acknowledges nothing and takes
        everything that is still kept.
        """
        with self._lock:
            while self._entries and self._entries[0][0] <= acknowledged:
                self._entries.popleft()
            if acknowledged == START_OVER:
                self._taken = 0
            for key in list(self._newest):
                self._enter_news(key)
            self._due = None
            taken = []
            for number, report in self._entries:
                if number <= self._taken:
                    continue
                taken.append((number, report))
                self._taken = number
                limit_bytes -= sum(len(part) for part in report if isinstance(part, bytes))
                if limit_bytes < 0:
                    break
            return taken

    def has_more(self) -> bool:
        with self._lock:
            return self._taken < self._last or bool(self._newest)

    def _enter(self, report: Report) -> None:
        self._last += 1
        self._entries.append((self._last, report))

    def _enter_news(self, key: Hashable) -> None:
        report = self._newest.pop(key, None)
        if report is not None:
            self._enter(report)

    def _wants_wake(self, delay_seconds: float) -> bool:
        if self._due is not None and self._due <= delay_seconds:
            return False
        self._due = delay_seconds
        return True
