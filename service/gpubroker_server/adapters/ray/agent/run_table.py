"""What a node agent remembers of runs: those it has, those that have gone, and what it must not start."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from gpubroker.runtime.messages import Report, RunKey, RunOrder

from gpubroker_server.adapters.ray.agent.runner_process import Lane

REMEMBERED_FENCES = 100_000
REMEMBERED_DEPARTURES = 1024


@dataclass(slots=True, eq=False)
class Run:
    """One run from its order until it is gone and its outcome is forgotten."""

    order: RunOrder
    shared: bool
    lane: Lane | None = None
    """None while it waits for a process, and once that process is gone."""
    told: dict[str, Report] = field(default_factory=dict)
    """The newest started, ready, checkpointed, ended and gone report of it, by kind."""
    forgotten: bool = False
    go: str = ""
    """Rank 0's address, once all ranks are ready; a process that this one has yet to get is told then."""
    killed: str = ""
    """Why its process was killed; empty if it was not."""
    kill: asyncio.TimerHandle | None = None

    @property
    def key(self) -> RunKey:
        return self.order.key

    @property
    def has_ended(self) -> bool:
        return "ended" in self.told

    @property
    def is_gone(self) -> bool:
        return "gone" in self.told


class RunBook:
    def __init__(self) -> None:
        self.runs: dict[RunKey, Run] = {}
        self._fences: OrderedDict[tuple[str, int], int] = OrderedDict()
        """(task, rank) -> highest fence heard of, least recently used first."""
        self._departed: deque[Report] = deque(maxlen=REMEMBERED_DEPARTURES)
        self._suspects: OrderedDict[str, None] = OrderedDict()

    def is_new(self, key: RunKey) -> bool:
        return key.fence > self._fences.get((key.task, key.rank), 0)

    def note_fence(self, key: RunKey) -> None:
        """From now on neither this fence nor a lower one of the task is new."""
        name = (key.task, key.rank)
        self._fences[name] = max(key.fence, self._fences.get(name, 0))
        self._fences.move_to_end(name)
        if len(self._fences) > REMEMBERED_FENCES:
            self._fences.popitem(last=False)

    def suspect(self, task: str) -> None:
        """It may have brought down a process that it shared; it gets one of its own next time."""
        self._suspects[task] = None
        if len(self._suspects) > REMEMBERED_DEPARTURES:
            self._suspects.popitem(last=False)

    def is_suspect(self, task: str) -> bool:
        return task in self._suspects

    def drop_if_done(self, run: Run) -> None:
        """A run is kept until no process of it is left and its outcome is durable elsewhere."""
        if not (run.is_gone and run.forgotten):
            return
        self.runs.pop(run.key, None)
        if run.order.leases:
            self._departed.append(run.told["gone"])

    @property
    def keeps_outcomes(self) -> bool:
        """Nobody but this agent knows how some run has ended: its process is gone, or soon will be."""
        return any(run.has_ended and not run.forgotten for run in self.runs.values())

    def departure_of(self, key: RunKey) -> Report | None:
        return next((report for report in self._departed if report[1:4] == key), None)

    def everything_told(self) -> Iterator[Report]:
        """For a leader that may have heard none of it: per run in the order in which it happened."""
        yield from self._departed
        for run in self.runs.values():
            for kind in ("started", "ready", "checkpointed", "ended", "gone"):
                if kind in run.told:
                    yield run.told[kind]
