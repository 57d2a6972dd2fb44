"""Reports that wait for their reader, in order and numbered, kept until acknowledged."""

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator

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
        self._news: dict[Hashable, dict[str, Report]] = {}
        """What was noted and not yet taken: key -> kind -> the newest."""
        self._last = 0
        self._taken = 0
        self._due: float | None = None

    def add(self, report: Report, delay_seconds: float = AT_ONCE, *, after_news_of: Hashable = None) -> None:
        """Enter a report that must not be lost, after all news noted under the given key."""
        with self._lock:
            for news in self._news.pop(after_news_of, {}).values():
                self._enter(news)
            self._enter(report)
            wanted = self._wants_wake(delay_seconds)
        if wanted:
            self._wake(delay_seconds)

    def note(self, key: Hashable, report: Report, delay_seconds: float = LAZILY) -> None:
        """Enter news of which only the newest matters: it replaces what was noted of the same kind and key
        and not yet taken, so that a reader who stays away costs no memory."""
        with self._lock:
            kinds = self._news.setdefault(key, {})
            kinds.pop(report[0], None)
            kinds[report[0]] = report
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
            self._due = None
            taken = []
            for number, report in self._untaken():
                taken.append((number, report))
                self._taken = number
                limit_bytes -= sum(len(part) for part in report if isinstance(part, bytes))
                if limit_bytes < 0:
                    break
            return taken

    def has_more(self) -> bool:
        with self._lock:
            return self._taken < self._last or bool(self._news)

    def _enter(self, report: Report) -> None:
        self._last += 1
        self._entries.append((self._last, report))

    def _untaken(self) -> Iterator[tuple[int, Report]]:
        """News get their numbers only when somebody comes so far: until then a newer one replaces them."""
        yield from [entry for entry in self._entries if entry[0] > self._taken]
        while self._news:
            key = next(iter(self._news))
            kinds = self._news[key]
            self._enter(kinds.pop(next(iter(kinds))))
            if not kinds:
                del self._news[key]
            yield self._entries[-1]

    def _wants_wake(self, delay_seconds: float) -> bool:
        if self._due is not None and self._due <= delay_seconds:
            return False
        self._due = delay_seconds
        return True
