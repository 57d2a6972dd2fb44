"""Due times of tasks. The due tasks are found at little cost, however many tasks wait."""

from heapq import heapify, heappop, heappush

from gpubroker_server.core.domain.units import Instant, TaskId

_STALE_ENTRIES = 64
"""The number by which stale entries must outnumber the live ones before the heap is rebuilt. It keeps a small
heap from being rebuilt at each change."""


class DueTimes(dict[TaskId, Instant]):
    """A mapping of tasks to instants. Entries are set one by one, and removed with `pop` or `del`."""

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[Instant, TaskId]] = []
        """A heap of every entry, and of stale ones, which are skipped."""

    def __setitem__(self, task: TaskId, due_at: Instant) -> None:
        super().__setitem__(task, due_at)
        if len(self._heap) > 2 * len(self) + _STALE_ENTRIES:
            self._heap = [(time, name) for name, time in self.items()]
            heapify(self._heap)
        else:
            heappush(self._heap, (due_at, task))

    def copy(self) -> "DueTimes":
        twin = DueTimes()
        twin.update(self)
        twin._heap = list(self._heap)
        return twin

    def due(self, now: Instant) -> list[TaskId]:
        """Return the due tasks, by time and id. They stay in the mapping until they are removed."""
        come: list[tuple[Instant, TaskId]] = []
        while self._heap and self._heap[0][0] <= now:
            due_at, task = heappop(self._heap)
            # A task that was set twice to one instant has two equal entries, which come one after the other.
            if self.get(task) == due_at and (not come or come[-1] != (due_at, task)):
                come.append((due_at, task))
        for entry in come:
            heappush(self._heap, entry)
        return [task for _, task in come]
