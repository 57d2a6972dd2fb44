"""Silent nodes that the leader does not give up, as the API tells it."""

from service.core.silence import Paused
from service.gateway.body import Body
from service.gateway.detection_views import DetectionView
from service.gateway.quarantine import Reason
from service.gateway.translate import rfc3339


class Resume(Body):
    """Let the leader give up the silent nodes that it holds back for."""

    reason: Reason


def detection_view(paused: Paused | None) -> DetectionView:
    if paused is None:
        return {"state": "watching", "since": None, "message": "", "nodes": [], "runs": 0, "of_runs": 0}
    return {
        "state": "paused",
        "since": rfc3339(paused.since),
        "message": paused.message,
        "nodes": list(paused.nodes),
        "runs": paused.runs,
        "of_runs": paused.of_runs,
    }
