"""Memory whose holders nobody can confirm to be gone, and the operator's word that they are."""

from collections.abc import Sequence

from fastapi import APIRouter, Response

from gpubroker_server.core.domain.lease import Lease
from gpubroker_server.core.lifecycle.quarantine import quarantined, seen_in_use
from gpubroker_server.gateway.cluster.devices import as_of
from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.problems import Problem
from gpubroker_server.gateway.http.routing import Call, DirectRoute, answer, needs, problems
from gpubroker_server.gateway.status.quarantine import ReleaseQuarantine, knows, quarantine_views
from gpubroker_server.gateway.status.records import ask, caught_up
from gpubroker_server.gateway.status.views import QuarantineList, ReleasedView

router = APIRouter(route_class=DirectRoute, tags=["cluster"])


@router.get(
    "/quarantine",
    operation_id="quarantine_list",
    dependencies=[needs(Scope.CLUSTER_READ)],
    response_model=QuarantineList,
    responses=problems("unauthenticated", "forbidden", "follower-stale"),
)
async def list_quarantine(call: Call) -> Response:
    """List what counts as used because nobody can confirm that it is gone, and which proof it waits for.

    Longest first: runs of tasks, each attempt and rank by itself, and external leases.
    """
    view: QuarantineList = {**as_of(call.parts), "items": quarantine_views(call.parts.world, call.identity)}
    return answer(view)


@router.post(
    "/quarantine/{holder_id}/release",
    operation_id="quarantine_release",
    dependencies=[needs(Scope.CLUSTER_WRITE)],
    response_model=ReleasedView,
    response_description="It is out of quarantine; a measurement taken from now on says what is free.",
    responses={
        202: {"model": ReleasedView, "description": "Asked for; the leader has not carried it out yet."},
        **problems(
            "malformed-json",
            "unauthenticated",
            "forbidden",
            "nothing-quarantined",
            "still-in-use",
            "follower-stale",
            "validation-failed",
        ),
    },
)
async def release_quarantine(call: Call, holder_id: str, body: ReleaseQuarantine) -> Response:
    """State that the processes of a task, or an external lease, are gone, so that its memory is given back.

    For what no agent can prove, such as a machine that does not come back. Your token's name and your reason
    are noted with it. If the statement is wrong, what is still used is seen once its device is measured.
    """
    await caught_up(call.parts)
    as_of(call.parts)
    leases = _meant(call, holder_id, body)
    tenant = leases[0].tenant
    keys = [lease.key for lease in leases]
    said = {"leases": keys, "by": call.identity.name, "reason": body.reason}
    settled = await ask(call, holder_id, tenant, "attest", said)
    view: ReleasedView = {
        "id": holder_id,
        "gpu_mb": sum(lease.mb for lease in leases),
        "devices": sorted({_uuid(call, lease) for lease in leases}),
        "quarantine": quarantine_views(call.parts.world, call.identity, holder_id),
    }
    return answer(view, 200 if settled else 202)


def _meant(call: Call, holder_id: str, body: ReleaseQuarantine) -> Sequence[Lease]:
    """The leases in quarantine that the statement is about. Raises Problem if there are none, or if one of
    them is in use."""
    parts = call.parts
    runs = [one for one in quarantined(parts.world, holder_id) if knows(call.identity, one.tenant)]
    leases = [lease for one in runs if body.names(one) for lease in one.leases]
    if body.devices:
        leases = [lease for lease in leases if _uuid(call, lease) in body.devices]
    if not leases:
        raise Problem("nothing-quarantined", _nothing(holder_id[:100], bool(runs)))
    for lease in leases:
        used_mb = seen_in_use(parts.world, lease, parts.clock.now(), parts.policy.sample_period_seconds)
        if used_mb:
            device = parts.world.books[lease.device].device
            raise Problem(
                "still-in-use",
                f"attempt {lease.fence} of {holder_id} is there: it was just measured to use {used_mb} MiB "
                f"of {device.label}; end its process, or boot {device.node} anew",
            )
    return leases


def _nothing(holder: str, has_others: bool) -> str:
    if has_others:
        return f'of "{holder}" other attempts, ranks or devices are in quarantine; GET /quarantine lists them'
    return f'nothing of "{holder}" is in quarantine; GET /quarantine lists what is'


def _uuid(call: Call, lease: Lease) -> str:
    return call.parts.world.books[lease.device].device.uuid
