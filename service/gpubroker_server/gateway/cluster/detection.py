"""Detection of lost nodes: whether the leader has paused it, and resuming it."""

from typing import Annotated

from fastapi import Response
from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.core.lifecycle.silent_nodes import PausedDetection
from gpubroker_server.gateway.cluster.parts import Parts
from gpubroker_server.gateway.cluster.quarantine import Reason
from gpubroker_server.gateway.http.bodies import Body
from gpubroker_server.gateway.http.call import Call, answer
from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.problems import Problem
from gpubroker_server.gateway.http.routing import STORED, Resource
from gpubroker_server.gateway.http.times import Time, rfc3339

resource = Resource("cluster")

SUBJECT = "detection"


class DetectionView(TypedDict):
    """Whether the leader gives up silent nodes."""

    state: Annotated[str, Field(description="watching, or paused.")]
    since: Annotated[Time | None, Field(description="While paused.")]
    message: Annotated[str, Field(description="Why it is paused; otherwise empty.")]
    nodes: Annotated[list[str], Field(description="Silent, and not given up.")]
    runs: Annotated[int, Field(description="On these nodes, and on those that were given up just before.")]
    of_runs: int


class Resume(Body):
    """Let the leader give up the silent nodes that it holds back."""

    reason: Reason


@resource.route(
    "POST /detection/resume",
    "detection_resume",
    Scope.CLUSTER_WRITE,
    DetectionView,
    "malformed-json nothing-paused validation-failed",
    accepted=STORED,
    response_description="What was paused. The leader gives these nodes up, unless it hears from them first.",
)
async def resume_detection(call: Call, parts: Parts, body: Resume) -> Response:
    """State that the silent nodes are lost, so that their runs start elsewhere.

    The leader pauses when too many nodes fall silent at once. Memory on lost nodes is quarantined until it is
    proven free. The name of your token and your reason are recorded.
    """
    paused = parts.leadership.paused()
    if paused is None:
        raise Problem("nothing-paused")
    fields = {"nodes": list(paused.nodes), "by": call.identity.name, "reason": body.reason}
    settled = await parts.requests.ask(SUBJECT, call.identity.tenant, "resume", fields)
    return answer(detection_view(paused), 200 if settled else 202)


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
