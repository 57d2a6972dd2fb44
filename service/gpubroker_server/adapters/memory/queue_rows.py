"""Pauses of queues and what is told of work streams, in memory."""

from gpubroker_server.core.domain.decisions import Decision, QueuePause, StreamState


class QueuesInMemory:
    def __init__(self) -> None:
        self.pauses: dict[str, QueuePause] = {}
        self.streams: dict[str, StreamState] = {}

    def keep_queues(self, decision: Decision) -> None:
        self.pauses |= {pause.queue: pause for pause in decision.paused}
        for pause in decision.resumed:
            self.pauses.pop(pause.queue, None)
        self.streams |= {stream.name: stream for stream in decision.streams}
        self.streams = {name: stream for name, stream in self.streams.items() if not stream.is_untold}
