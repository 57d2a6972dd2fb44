"""Silent nodes that the leader does not give up, as the API tells it."""

from gpubroker_server.core.lifecycle.silent_nodes import PausedDetection
from gpubroker_server.gateway.cluster.detection_views import DetectionView
from gpubroker_server.gateway.http.bodies import Body
from gpubroker_server.gateway.status.quarantine import Reason
from gpubroker_server.gateway.status.task_view import rfc3339


class Resume(Body):
    """Let the leader give up the silent nodes that it holds back for."""

    reason: Reason


def detection_view(paused: PausedDetection | None) -> DetectionView:
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
