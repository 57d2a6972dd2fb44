"""Letting the leader go on where it has paused."""

from fastapi import APIRouter, Response

from gpubroker_server.gateway.cluster.detection import Resume, detection_view
from gpubroker_server.gateway.cluster.detection_views import DetectionView
from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.problems import Problem
from gpubroker_server.gateway.http.routing import Call, DirectRoute, answer, needs, problems
from gpubroker_server.gateway.status.records import ask

router = APIRouter(route_class=DirectRoute, tags=["cluster"])

SUBJECT = "detection"


@router.post(
    "/detection/resume",
    operation_id="detection_resume",
    dependencies=[needs(Scope.CLUSTER_WRITE)],
    response_model=DetectionView,
    response_description="What was paused. The leader gives these nodes up, unless they are heard of first.",
    responses={
        202: {"model": DetectionView, "description": "Asked for; the leader has not carried it out yet."},
        **problems("malformed-json", "unauthenticated", "forbidden", "nothing-paused", "validation-failed"),
    },
)
async def resume_detection(call: Call, body: Resume) -> Response:
    """State that the silent nodes are lost, so that their runs start elsewhere.

    Too many fell silent at once for the leader to believe it. Memory there is quarantined until it is proven
    free. Your token's name and your reason are noted with it.
    """
    paused = call.parts.paused()
    if paused is None:
        raise Problem("nothing-paused", "no silent node is kept from being given up; GET /stats says so too")
    said = {"nodes": list(paused.nodes), "by": call.identity.name, "reason": body.reason}
    settled = await ask(call, SUBJECT, call.identity.tenant, "resume", said)
    return answer(detection_view(paused), 200 if settled else 202)
