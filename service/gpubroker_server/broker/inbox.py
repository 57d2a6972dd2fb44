"""Reports that wait for the leader's next cycle."""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence

from gpubroker_server.core.domain.model_orders import ModelsInUse, ServerGone, ServerIndex
from gpubroker_server.core.domain.orders import Checkpointed, Ended, ItemsReported, Logged, NodeReport, Report

MAX_REPORTS = 10_000
MAX_REPORT_BYTES = 64 * 2**20
"""No reports are fetched while the inbox has more than MAX_REPORTS or MAX_REPORT_BYTES. That happens only
while nothing can be committed."""


def next_batch(heard: Iterable[Report]) -> list[Report]:
    """Return the reports before the first NodeReport, ServerIndex, ServerGone or ModelsInUse; if that report
    is the first one, return it alone. Each of these describes everything on a node or a server at one
    moment: earlier reports must be committed before it is applied, and later ones after it."""
    batch: list[Report] = []
    for report in heard:
        if isinstance(report, NodeReport | ServerIndex | ServerGone | ModelsInUse):
            return batch or [report]
        batch.append(report)
    return batch


class Inbox:
    """Reports that wait for the next cycle, in order."""

    def __init__(self) -> None:
        self._reports: deque[Report] = deque()
        self._size_bytes = 0
        self.has_room = asyncio.Event()
        """Set while reports may be fetched. Otherwise the executor keeps them, and stops asking agents for
        more."""
        self.has_room.set()

    def __len__(self) -> int:
        return len(self._reports)

    def put(self, reports: Sequence[Report]) -> None:
        self._reports.extend(reports)
        self._size_bytes += sum(map(_size_bytes, reports))
        self._set_room()

    def next_batch(self) -> list[Report]:
        return next_batch(self._reports)

    def replace(self, count: int, reports: Sequence[Report]) -> None:
        """Replace the first `count` reports."""
        for _ in range(count):
            self._reports.popleft()
        self._reports.extendleft(reversed(reports))

    def weigh(self) -> None:
        """Compute the size of the reports again. Call this after `replace`."""
        self._size_bytes = sum(map(_size_bytes, self._reports))
        self._set_room()

    def _set_room(self) -> None:
        if len(self._reports) <= MAX_REPORTS and self._size_bytes <= MAX_REPORT_BYTES:
            self.has_room.set()
        else:
            self.has_room.clear()


def _size_bytes(report: Report) -> int:
    """Return the bytes of the results, the checkpoint or the log in a report."""
    match report:
        case Checkpointed(data=bytes(data)) | Ended(result=bytes(data)) | Logged(data=bytes(data)):
            return len(data)
        case ItemsReported():
            return sum(len(result.result) for result in report.results if result.result is not None)
        case _:
            return 0
