"""Routes by which an operator states that the holder of quarantined memory is gone, or that silent nodes are
lost."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import Response
from gpubroker.wire.answered import Overview, Time
from gpubroker.wire.quarantine import Detection, Released
from gpubroker.wire.quarantine import Quarantined as ShownQuarantined
from msgspec.structs import asdict
from pydantic import Field, StringConstraints

from gpubroker_server.core.domain.lease import Lease
from gpubroker_server.core.lifecycle.quarantine import Quarantined, quarantined, seen_in_use
from gpubroker_server.core.lifecycle.silent_nodes import PausedDetection
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.gateway.status.quarantine import quarantined_view
from gpubroker_server.http.bodies import Body, JsonBody, line
from gpubroker_server.http.identity import Identity, Scope
from gpubroker_server.http.problems import Problem
from gpubroker_server.http.routing import STORED, Caller, Resource, answer

resource = Resource("cluster")

Reason = Annotated[
    str,
    StringConstraints(max_length=500, pattern=r"^[^\x00-\x1f\x7f]*[^\x00-\x20\x7f][^\x00-\x1f\x7f]*$"),
    Field(
        description="Why, in your own words: what you checked. It is recorded with the name of your token.",
        examples=["powered n2 off, it is being repaired"],
    ),
]


class ReleaseQuarantine(Body):
    """The statement that the holder of quarantined memory is gone. Each list restricts the statement; an
    empty list does not."""

    reason: Reason
    attempts: Annotated[
        list[Annotated[int, Field(ge=1)]], Field(max_length=1000, description="Only these attempts.")
    ] = Field(default_factory=list)
    ranks: Annotated[
        list[Annotated[int, Field(ge=0)]], Field(max_length=1000, description="Only these ranks of a gang.")
    ] = Field(default_factory=list)
    devices: Annotated[
        list[Annotated[str, line(100, 1)]], Field(max_length=1024, description="Only these devices, by UUID.")
    ] = Field(default_factory=list)

    def includes(self, run: Quarantined) -> bool:
        """Return True if the statement is about this run, whatever its devices are."""
        return (not self.attempts or run.attempt in self.attempts) and (
            not self.ranks or run.rank in self.ranks
        )


@resource.route(
    "GET /quarantine", "quarantine_list", Scope.CLUSTER_READ, Overview[ShownQuarantined], "follower-stale"
)
async def list_quarantine(caller: Caller, parts: Parts) -> Response:
    """List the memory that counts as used because its holder is not confirmed to be gone, and which proof it
    waits for.

    The list has one entry for each attempt and rank of a task and for each external lease. The memory that
    has been in quarantine longest comes first.
    """
    return answer(Overview(**parts.freshness.moment(), items=_shown(caller, parts)))


@resource.route(
    "POST /quarantine/{holder_id}/release",
    "quarantine_release",
    Scope.CLUSTER_WRITE,
    Released,
    "malformed-json nothing-quarantined still-in-use follower-stale validation-failed",
    accepted=STORED,
    response_description="It is out of quarantine; the next measurement says what is free.",
)
async def release_quarantine(
    caller: Caller, parts: Parts, holder_id: str, body: JsonBody[ReleaseQuarantine]
) -> Response:
    """State that the processes of a task, or an external lease, are gone, so that its memory is released.

    Use it if no agent can prove that they are gone, for example because a machine does not come back. The
    name of your token and your reason are recorded. If the statement is wrong, the next measurement shows the
    memory that is still in use.
    """
    await parts.freshness.catch_up()
    parts.freshness.moment()
    leases = _stated_leases(caller, parts, holder_id, body)
    keys = [lease.key for lease in leases]
    fields = {"leases": keys, "by": caller.name, "reason": body.reason}
    settled = await parts.requests.ask(holder_id, leases[0].tenant, "attest", fields)
    released = Released(
        holder_id,
        sum(lease.mb for lease in leases),
        tuple(sorted({_uuid(parts, lease) for lease in leases})),
        _shown(caller, parts, holder_id),
    )
    return answer(released, 200 if settled else 202)


def _stated_leases(caller: Caller, parts: Parts, holder_id: str, body: ReleaseQuarantine) -> Sequence[Lease]:
    """Return the quarantined leases that the statement is about. Raises Problem if there are none, or if one
    of them is in use."""
    world = parts.world
    runs = [run for run in quarantined(world, holder_id) if _may_release(caller, run.tenant)]
    leases = [lease for run in runs if body.includes(run) for lease in run.leases]
    if body.devices:
        leases = [lease for lease in leases if _uuid(parts, lease) in body.devices]
    if not leases:
        found = "only other attempts, ranks or devices" if runs else "nothing"
        raise Problem("nothing-quarantined", holder=holder_id[:100], found=found)
    for lease in leases:
        used_mb = seen_in_use(world, lease, parts.clock.now(), parts.policy.sample_period_seconds)
        if used_mb:
            device = world.ledgers[lease.device].device
            raise Problem(
                "still-in-use",
                attempt=lease.fence,
                holder=holder_id,
                used_mb=used_mb,
                device=device.label,
                node=device.node,
            )
    return leases


def _shown(viewer: Identity, parts: Parts, holder: str | None = None) -> tuple[ShownQuarantined, ...]:
    """Return the views of the quarantined memory of one holder, or of all holders if `holder` is None."""
    world = parts.world
    return tuple(
        quarantined_view(world, run, named=_may_release(viewer, run.tenant))
        for run in quarantined(world, holder)
    )


def _may_release(viewer: Identity, tenant: str) -> bool:
    """Return True if the token may release memory of the tenant. An operator also sees the names of other
    tenants' holders, in order to check on their processes."""
    return viewer.may_see(tenant) or viewer.may(Scope.CLUSTER_WRITE)


def _uuid(parts: Parts, lease: Lease) -> str:
    return parts.world.ledgers[lease.device].device.uuid


SUBJECT = "detection"


class Resume(Body):
    """Let the leader give up the silent nodes that it holds back."""

    reason: Reason


@resource.route(
    "POST /detection/resume",
    "detection_resume",
    Scope.CLUSTER_WRITE,
    Detection,
    "malformed-json nothing-paused validation-failed",
    accepted=STORED,
    response_description="What was paused. The leader gives these nodes up, unless it hears from them first.",
)
async def resume_detection(caller: Caller, parts: Parts, body: JsonBody[Resume]) -> Response:
    """State that the silent nodes are lost, so that their runs start elsewhere.

    The leader pauses when too many nodes fall silent at once. Memory on lost nodes is quarantined until it is
    proven free. The name of your token and your reason are recorded.
    """
    paused = parts.leadership.paused()
    if paused is None:
        raise Problem("nothing-paused")
    fields = {"nodes": list(paused.nodes), "by": caller.name, "reason": body.reason}
    settled = await parts.requests.ask(SUBJECT, caller.tenant, "resume", fields)
    return answer(detection_view(paused), 200 if settled else 202)


def detection_view(paused: PausedDetection | None) -> Detection:
    if paused is None:
        return Detection("", (), 0, 0, "watching", None)
    return Detection(**{**asdict(paused), "since": Time.at(paused.since)}, state="paused")
