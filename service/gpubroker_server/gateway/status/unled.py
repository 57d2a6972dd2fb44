"""What a task that waits is told while nobody leads: what is known of room moves nothing then."""

from gpubroker_server.core.domain.reasons import Reason
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.explain.blockers import Blocker
from gpubroker_server.gateway.parts import GatewayParts
from gpubroker_server.gateway.status.views import PendingView

_NOBODY_LEADS = (
    "nobody leads: no broker is running, or none reaches the database, and nothing starts or stops until one "
    "does (gpubroker broker, or gpubroker serve on a machine of its own)"
)
_CANCEL_IS_KEPT = "; it was asked to be cancelled, which is kept: whoever leads next does it first"


def unled(parts: GatewayParts, task: Task) -> Blocker | None:
    """None while somebody leads."""
    if parts.leader() is not None:
        return None
    asked = (request for request in parts.world.requests.values() if request.task == task.id)
    kept = _CANCEL_IS_KEPT if any(request.what == "cancel" for request in asked) else ""
    return Blocker(Reason.BACKEND_UNAVAILABLE, _NOBODY_LEADS + kept)


def told_unled(view: PendingView, blocker: Blocker) -> PendingView:
    """What is more structural still counts first. Nobody can tell a start."""
    reason = min(Reason(view["reason"]), blocker.reason, key=lambda each: each.tier)
    told = reason is not blocker.reason
    message = f"{view['message']}; {blocker.message}" if told else blocker.message
    return {**view, "reason": reason.value, "message": message, "start": None}
