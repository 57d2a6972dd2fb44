"""Why tasks wait, for answers that show it in passing: remembered per kind of demand for a moment."""

from collections.abc import Callable, Sequence

from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.reasons import Reason
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.core.explain.explain import explain, position_of
from gpubroker_server.core.planning.backfill import Forecast
from gpubroker_server.core.planning.fair_share import Shares
from gpubroker_server.core.world.dependencies import Inherited
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.status.views import InheritsView, PendingView

REMEMBERED_SECONDS = Seconds(1.0)
"""Surveying a thousand devices takes tens of milliseconds, and many tasks alike are polled."""

REMEMBERED = 4096

NOT_YET_SEEN: PendingView = {
    "reason": Reason.PENDING_EVALUATION.value,
    "message": "on disk; the next planning cycle looks at it",
    "position": None,
    "inherits": None,
    "start": None,
}
"""Of a task that the World has yet to hear of."""

_Alike = tuple[str, int, bool, Demand, str, Seconds | None, Seconds | None]
"""(tenant, priority, held, demand, and what tells how long it will run): tasks that wait for the same
reason."""


def inherits_view(inherited: Inherited | None) -> InheritsView | None:
    return None if inherited is None else {"priority": inherited.priority, "task": inherited.task}


class PendingReasons:
    def __init__(
        self, world: World, policy: Policy, forecasts: Callable[[], Sequence[Forecast]] = tuple
    ) -> None:
        self._world = world
        self._policy = policy
        self._forecasts = forecasts
        self._known: dict[_Alike, tuple[Instant, PendingView]] = {}
        self._shares: tuple[Instant, Shares] | None = None

    def of(self, task: Task, now: Instant) -> PendingView | None:
        """None if the World does not know the task yet, or no longer as one that waits."""
        row = self._world.tasks.get(task.id)
        if row is None or row.state is not TaskState.PENDING:
            return None
        length = (row.subject, row.expected_seconds, row.timeout_seconds)
        alike = (row.tenant, row.priority, row.held, row.demand, *length)
        seen_at, view = self._known.get(alike, (None, None))
        if seen_at is None or view is None or now - seen_at > REMEMBERED_SECONDS or self._is_special(row):
            return self._explained(row, alike, now)
        position = position_of(self._world, row, self._policy, now, self._shares_at(now))
        inherited = self._world.awaited.inheritance.of(row)
        return {**view, "position": position, "inherits": inherits_view(inherited)}

    def _shares_at(self, now: Instant) -> Shares:
        if self._shares is None or not 0.0 <= now - self._shares[0] <= REMEMBERED_SECONDS:
            self._shares = now, Shares(self._world, self._policy, now)
        return self._shares[1]

    def _explained(self, row: Task, alike: _Alike, now: Instant) -> PendingView | None:
        found = explain(self._world, row.id, self._policy, now, self._forecasts())
        if found.reason is None:
            return None
        view: PendingView = {
            "reason": found.reason.value,
            "message": found.message,
            "position": found.position,
            "inherits": inherits_view(found.inherits),
            "start": None,
        }
        if found.reason is not Reason.PENDING_EVALUATION and not self._is_special(row):
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            self._known[alike] = (now, view)
        return view

    def _is_special(self, row: Task) -> bool:
        """It waits for its own hour, for tasks of its own, or for room that is kept for it alone."""
        kept = row.id in self._world.pledges or any(row.id == one.task for one in self._forecasts())
        return row.awaits or row.not_before is not None or kept
