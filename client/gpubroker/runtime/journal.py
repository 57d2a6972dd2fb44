"""Reports that wait for their reader: in order, numbered, and kept until they are acknowledged."""

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence

from gpubroker.runtime.messages import Report

AT_ONCE = 0.0
SOON = 0.004
"""The seconds that the report of a start may wait for that of the end, so that a short run costs one
message."""
LAZILY = 0.1
"""The seconds between two reports of a run's progress. Only the newest progress is kept."""

START_OVER = -1
"""The number that a reader acknowledges if it does not know which reports the reader before it received."""


class Journal:
    """The reports that wait for their reader. Any thread may write; one reader at a time takes.

    `wake(delay_seconds)` is called from the writing thread when reports should be taken within that delay and
    no earlier wake-up is due.
    """

    def __init__(self, wake: Callable[[float], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._entries: deque[tuple[int, Report]] = deque()
        self._news: dict[Hashable, dict[str, Report | Callable[[], Report]]] = {}
        """News that are noted and not taken yet: key -> kind -> the newest report, or a function that makes
        it."""
        self._last = 0
        self._taken = 0
        self._due: float | None = None

    def add(self, report: Report, delay_seconds: float = AT_ONCE, *, after_news_of: Hashable = None) -> None:
        """Enter a report that must not be lost, behind all news noted under the given key."""
        with self._lock:
            for news in self._news.pop(after_news_of, {}).values():
                self._enter(news)
            self._enter(report)
            wanted = self._wants_wake(delay_seconds)
        if wanted:
            self._wake(delay_seconds)

    def note(self, key: Hashable, report: Report, delay_seconds: float = LAZILY) -> None:
        """Enter news of which only the newest matters. It replaces news of the same kind and key that was not
        taken yet, so that memory stays bounded without a reader."""
        self.note_to_make(key, report[0], report, delay_seconds)

    def note_to_make(
        self, key: Hashable, kind: str, report: Report | Callable[[], Report], delay_seconds: float = LAZILY
    ) -> None:
        """Enter news like `note`; `report` may be a function that makes the report when the news are
        taken."""
        with self._lock:
            kinds = self._news.setdefault(key, {})
            kinds.pop(kind, None)
            kinds[kind] = report
            wanted = self._wants_wake(delay_seconds)
        if wanted:
            self._wake(delay_seconds)

    def take(self, acknowledged: int, limit_bytes: int) -> list[tuple[int, Report]]:
        """Return the reports that were not taken before, with their numbers; stop after the report that
        exceeds the limit.

        Reports up to the number `acknowledged` are dropped. START_OVER acknowledges none and returns all
        reports that are kept.
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
                limit_bytes -= _size_bytes(report)
                if limit_bytes < 0:
                    break
            return taken

    def has_more(self) -> bool:
        with self._lock:
            return self._taken < self._last or bool(self._news)

    def is_received(self, acknowledged: int) -> bool:
        """True if the reader that has acknowledged this number has received everything."""
        with self._lock:
            return not self._news and self._last <= acknowledged

    def _enter(self, report: Report | Callable[[], Report]) -> None:
        self._last += 1
        self._entries.append((self._last, report() if callable(report) else report))

    def _untaken(self) -> Iterator[tuple[int, Report]]:
        """Yield the news that are not taken yet. They get their numbers only when they are taken, since newer
        ones replace them until then."""
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


def _size_bytes(report: Sequence[object]) -> int:
    """Return the size of the results, checkpoints and logs in a report, including those of items in a
    list."""
    size = 0
    for part in report:
        kind = type(part)
        if kind is bytes:
            size += len(part)  # type: ignore[arg-type]  # bytes
        elif kind is tuple or kind is list:
            size += _size_bytes(part)  # type: ignore[arg-type]  # a sequence
    return size
