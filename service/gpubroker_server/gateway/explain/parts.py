"""What the routes that explain and plan need."""

from dataclasses import dataclass, field
from typing import Annotated

from gpubroker_server.core.domain.device import GpuKind
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.explain.survey import Asking
from gpubroker_server.core.explain.verdicts import Look, look
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.http.concurrency import OneAtATime
from gpubroker_server.gateway.http.identity import Tokens
from gpubroker_server.gateway.http.routing import PARTS
from gpubroker_server.gateway.http.times import Freshness
from gpubroker_server.gateway.http.waiters import Leadership
from gpubroker_server.gateway.status.records import TaskRecords
from gpubroker_server.gateway.submission.submissions import Submissions
from gpubroker_server.ports.store import Clock


@dataclass(frozen=True, slots=True)
class ExplainParts:
    world: World
    clock: Clock
    policy: Policy
    freshness: Freshness
    leadership: Leadership
    records: TaskRecords
    submissions: Submissions
    tokens: Tokens
    kinds: tuple[GpuKind, ...]
    """The kinds of GPU that the operator has ranked, strongest first."""
    asking: Asking = field(default_factory=Asking)
    """What one answer keeps of the World for the next."""
    plans: OneAtATime = field(default_factory=lambda: OneAtATime("plans", max_waiting=0))
    answers: OneAtATime = field(
        default_factory=lambda: OneAtATime("explanations and simulations", max_waiting=16, on_the_loop=True)
    )
    """The leader may share the event loop; between two answers it gets the loop for as long as one took."""

    def look(self, task: Task) -> Look:
        """All nodes and devices, judged for this task."""
        forecasts = self.leadership.forecasts()
        return look(self.asking.survey(self.world, task, self.policy, self.clock.now(), forecasts))


Parts = Annotated[ExplainParts, PARTS]
