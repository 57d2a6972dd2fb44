"""Rows that stand until they are ended, in memory: pauses of queues, worker sets and work streams."""

from gpubroker_server.core.domain.decisions import Decision, QueuePause, StreamState
from gpubroker_server.core.domain.submission import WorkerSet
from gpubroker_server.core.domain.units import TaskId


class StandingInMemory:
    def __init__(self) -> None:
        self.pauses: dict[str, QueuePause] = {}
        self.worker_sets: dict[TaskId, WorkerSet] = {}
        self.streams: dict[str, StreamState] = {}

    def keep_standing(self, decision: Decision) -> None:
        self.pauses |= {pause.queue: pause for pause in decision.paused}
        for pause in decision.resumed:
            self.pauses.pop(pause.queue, None)
        for written in decision.worker_sets:
            self.worker_sets[written.workers.id] = written.workers
            if written.what == "over":
                del self.worker_sets[written.workers.id]
        self.streams |= {stream.name: stream for stream in decision.streams}
        self.streams = {name: stream for name, stream in self.streams.items() if not stream.is_untold}
