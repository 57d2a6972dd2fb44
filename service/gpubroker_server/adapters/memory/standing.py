"""Rows that stand until they are ended, in memory: pauses of queues and worker sets."""

from gpubroker_server.core.domain.decisions import Decision, QueuePause
from gpubroker_server.core.domain.submission import WorkerSet
from gpubroker_server.core.domain.units import TaskId


class StandingInMemory:
    def __init__(self) -> None:
        self.pauses: dict[str, QueuePause] = {}
        self.worker_sets: dict[TaskId, WorkerSet] = {}

    def keep_standing(self, decision: Decision) -> None:
        self.pauses |= {pause.queue: pause for pause in decision.paused}
        for pause in decision.resumed:
            self.pauses.pop(pause.queue, None)
        self.worker_sets |= {workers.id: workers for workers in decision.worker_sets}
        for workers in decision.sets_over:
            self.worker_sets.pop(workers.id, None)
