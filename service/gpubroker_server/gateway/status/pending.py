"""The reasons why tasks wait, for answers that show them beside other fields. Reasons are cached for a second
and shared by equal tasks."""

from gpubroker.wire.tasks import Pending
from msgspec.structs import replace

from gpubroker_server.core.domain.decisions import QueuePause
from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.holders import Inference
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.ranks import nodes_of
from gpubroker_server.core.domain.reasons import Reason
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.core.explain.blockers import Blocker, expected_send_at
from gpubroker_server.core.explain.explain import explain, position_of
from gpubroker_server.core.planning.forecasts.forecast_rounds import expected_start
from gpubroker_server.core.planning.tenants.fair_share import FairShares
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.status.task_view import expected_view
from gpubroker_server.http.waiters import Leadership

CACHED_SECONDS = Seconds(1.0)
"""How long a reason is cached. Explaining a task takes tens of milliseconds with a thousand devices, and
clients poll many equal tasks."""

MAX_CACHED = 4096

NOT_YET_SEEN = Pending(
    reason=Reason.PENDING_EVALUATION,
    message="on disk; the next planning cycle will look at it",
    position=None,
    inherits=None,
    start=None,
)
"""The reason of a waiting task that the World does not have yet."""

_NO_LEADER = (
    "there is no leader: no broker is running, or none reaches the database, and nothing starts or stops "
    "until one does (gpubroker broker, or gpubroker serve on a single machine)"
)
_CANCEL_IS_STORED = "; its cancel request is stored, and the next leader carries it out first"

_Equal = tuple[str, int, tuple[bool, QueuePause | None], Demand, str, Seconds | None, Seconds | None]
"""The properties on which the reason of a task depends: the tenant, the priority, whether the task is held
and the pause of its queue, the demand, and the subject, expected seconds and time limit that estimate its run
time."""


def no_leader(world: World, leadership: Leadership, task: Task) -> Blocker | None:
    """Return the blocker of every waiting task while there is no leader; None while there is one."""
    if leadership.leader() is not None:
        return None
    requests = (request for request in world.requests.values() if request.task == task.id)
    is_cancelled = any(request.what == "cancel" for request in requests)
    return Blocker(Reason.BACKEND_UNAVAILABLE, _NO_LEADER + (_CANCEL_IS_STORED if is_cancelled else ""))


class PendingReasons:
    """Explains why tasks wait, with a cache."""

    def __init__(self, world: World, policy: Policy, leadership: Leadership) -> None:
        self._world = world
        self.policy = policy
        self._leadership = leadership
        self._cache: dict[_Equal, tuple[Instant, Pending]] = {}
        self._shares: tuple[Instant, FairShares] | None = None

    def of(self, task: Task, now: Instant) -> Pending | None:
        """Return the reason why a task waits; None if the task is not waiting in the World."""
        row = self._world.tasks.get(task.id)
        view = None if row is None or row.state is not TaskState.PENDING else self._view(row, now)
        if view is None:
            return None
        if (blocker := no_leader(self._world, self._leadership, task)) is not None:
            return _without_leader(view, blocker)
        forecasts, start = self._leadership.forecasts(), None
        if not isinstance(task.holder, Inference):
            start = expected_start(self._world, task, forecasts, now)
        elif view.reason == Reason.MODEL_LOADING:
            start = expected_send_at(self._world, task, self.policy, forecasts, now)
        return view if start is None else replace(view, start=expected_view(start, now))

    def notice(self, task: Task) -> str:
        """Return a notice about silent nodes that the leader does not give up; empty if there are none, or if
        they do not concern the task. They concern it if it runs on one of them, or waits."""
        if task.is_terminal or (paused := self._leadership.paused()) is None:
            return ""
        concerns = task.state is TaskState.PENDING or bool(nodes_of(task) & set(paused.nodes))
        return paused.summary if concerns else ""

    def _view(self, row: Task, now: Instant) -> Pending | None:
        run_time = (row.subject, row.expected_seconds, row.timeout_seconds)
        is_apart = (row.held, self._world.queue.pause_of(row))
        equal = (row.tenant, row.priority, is_apart, row.demand, *run_time)
        seen_at, view = self._cache.get(equal, (None, None))
        if seen_at is None or view is None or now - seen_at > CACHED_SECONDS or self._is_special(row):
            return self._explained(row, equal, now)
        position = position_of(self._world, row, self.policy, now, self._shares_at(now))
        inherited = self._world.awaited.inheritance.of(row)
        return replace(view, position=position, inherits=inherited)

    def _shares_at(self, now: Instant) -> FairShares:
        if self._shares is None or not 0.0 <= now - self._shares[0] <= CACHED_SECONDS:
            self._shares = now, FairShares(self._world, self.policy, now)
        return self._shares[1]

    def _explained(self, row: Task, equal: _Equal, now: Instant) -> Pending | None:
        explanation = explain(self._world, row.id, self.policy, now, self._leadership.forecasts())
        if explanation.reason is None:
            return None
        view = Pending(
            explanation.reason, explanation.message, explanation.position, explanation.inherits, None
        )
        if explanation.reason is not Reason.PENDING_EVALUATION and not self._is_special(row):
            if len(self._cache) >= MAX_CACHED:
                self._cache.clear()
            self._cache[equal] = (now, view)
        return view

    def _is_special(self, row: Task) -> bool:
        """Return True if the reason of the task is not that of equal tasks: it waits for its start time, for
        dependencies, or for room that is reserved for it."""
        forecasts = self._leadership.forecasts()
        has_room = row.id in self._world.pledges or any(row.id == forecast.task for forecast in forecasts)
        return row.awaits or row.not_before is not None or has_room


def _without_leader(view: Pending, blocker: Blocker) -> Pending:
    """Return the view with the missing leader as its reason, or added to a reason of a higher tier. It has no
    expected start, because only a leader forecasts one."""
    reason = min(Reason(view.reason), blocker.reason, key=lambda reason: reason.tier)
    message = blocker.message
    if reason is not blocker.reason:
        message = f"{view.message}; {message}"
    return replace(view, reason=reason, message=message, start=None)
