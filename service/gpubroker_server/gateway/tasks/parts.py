"""What the routes of tasks need."""

from dataclasses import dataclass, field
from typing import Annotated

from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.http.concurrency import OneAtATime
from gpubroker_server.gateway.http.routing import PARTS
from gpubroker_server.gateway.http.waiters import LeaderRequests
from gpubroker_server.gateway.status.records import TaskRecords
from gpubroker_server.gateway.submission.submissions import Submissions


@dataclass(frozen=True, slots=True)
class TaskParts:
    world: World
    records: TaskRecords
    submissions: Submissions
    requests: LeaderRequests
    wait_seconds: float
    batches: OneAtATime = field(default_factory=lambda: OneAtATime("batches", max_waiting=32))
    """One batch is made into tasks at a time, in small steps, while the one before it is being stored."""


Parts = Annotated[TaskParts, PARTS]
