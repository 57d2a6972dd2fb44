"""What nobody can confirm to be gone, as the API tells it, and what an operator may say of it."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, StringConstraints

from gpubroker_server.core.domain.units import NodeName, TaskId
from gpubroker_server.core.lifecycle.quarantine import Quarantined, quarantined
from gpubroker_server.core.world.ledger import Holding
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.http.bodies import Body
from gpubroker_server.gateway.http.identity import Identity, Scope
from gpubroker_server.gateway.http.text import line
from gpubroker_server.gateway.status.quarantine_views import AwaitedView, QuarantinedView
from gpubroker_server.gateway.status.task_view import rfc3339

Reason = Annotated[
    str,
    StringConstraints(max_length=500, pattern=r"^[^\x00-\x1f\x7f]*[^\x00-\x20\x7f][^\x00-\x1f\x7f]*$"),
    Field(
        description="Why, in your own words: what you looked at. It is kept with your token's name.",
        examples=["powered n2 off, it is being repaired"],
    ),
]


class ReleaseQuarantine(Body):
    """The statement that what had this memory is gone. What is left out narrows nothing."""

    reason: Reason
    attempts: Annotated[
        list[Annotated[int, Field(ge=1)]], Field(max_length=1000, description="Only of these.")
    ] = Field(default_factory=list)
    ranks: Annotated[
        list[Annotated[int, Field(ge=0)]], Field(max_length=1000, description="Only of these, of a gang.")
    ] = Field(default_factory=list)
    devices: Annotated[
        list[Annotated[str, line(100, 1)]], Field(max_length=1024, description="Only of these, by UUID.")
    ] = Field(default_factory=list)

    def names(self, one: Quarantined) -> bool:
        """Whether it speaks of this run, whatever of its devices."""
        return (not self.attempts or one.attempt in self.attempts) and (
            not self.ranks or one.rank in self.ranks
        )


def knows(viewer: Identity, tenant: str) -> bool:
    """Whether this token may know by name what belongs to this tenant: an operator must, to look after it."""
    return viewer.tenant == tenant or viewer.may(Scope.ADMIN) or viewer.may(Scope.CLUSTER_WRITE)


def quarantine_views(world: World, viewer: Identity, holder: str | None = None) -> list[QuarantinedView]:
    return [quarantined_view(world, one, knows(viewer, one.tenant)) for one in quarantined(world, holder)]


def quarantined_view(world: World, one: Quarantined, known: bool = True) -> QuarantinedView:
    """Without its name unless it is `known`."""
    task = world.tasks.get(TaskId(one.holder))
    return {
        "id": one.holder if known else None,
        "name": task.name if task is not None and known else None,
        "kind": one.kind.value,
        "tenant": one.tenant,
        "attempt": one.attempt,
        "rank": one.rank,
        "node": one.node,
        "node_ready": _answers(world, one.node),
        "gpu_mb": sum(lease.mb for lease in one.leases),
        "devices": [
            {
                "uuid": world.books[held.lease.device].device.uuid,
                "index": world.books[held.lease.device].device.index,
                "gpu_mb": held.lease.mb,
                "measured_mb": held.measured_mb,
            }
            for held in _holdings(world, one)
        ],
        **awaited_view(one),
    }


def awaited_view(one: Quarantined) -> AwaitedView:
    return {
        "quarantined_at": rfc3339(one.since),
        "awaits": [proof.value for proof in one.awaits],
        "message": one.message,
    }


def awaited_by_lease(world: World) -> dict[str, AwaitedView]:
    """Of each lease in quarantine, by its key."""
    return {lease.key: awaited_view(one) for one in quarantined(world) for lease in one.leases}


def _answers(world: World, node: NodeName) -> bool:
    return node in world.nodes and world.nodes[node].ready


def _holdings(world: World, one: Quarantined) -> Iterator[Holding]:
    return (world.books[lease.device].holdings[lease.key] for lease in one.leases)
