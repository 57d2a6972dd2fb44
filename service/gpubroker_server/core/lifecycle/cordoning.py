"""Operators' requests about a node: cordon, drain and uncordon. Each sets the node's whole state, so a cordon
ends a drain and leaves the node closed."""

from dataclasses import replace
from typing import Any

from gpubroker_server.core.domain.decisions import AuditNote, Decision, Notice, Request
from gpubroker_server.core.domain.units import Instant, NodeName, node_key
from gpubroker_server.core.lifecycle.runs import dissolved_pledges
from gpubroker_server.core.world.event_codec import cordon_fields
from gpubroker_server.core.world.world import World

CORDONINGS = frozenset({"cordon", "drain", "uncordon"})


def carry_out(world: World, request: Request, now: Instant, done: Decision) -> Decision:
    """Pledges on a closed node are dissolved: their tasks are planned again, elsewhere."""
    node = world.nodes.get(NodeName(request.task))
    if node is None:
        return done
    reason, closes = str(request.fields.get("reason") or ""), request.what != "uncordon"
    state: dict[str, Any] = {"cordoned": closes, "cordon_reason": reason if closes else ""}
    state |= {"draining_since": None, "drain_deadline_at": None}
    if request.what == "drain":
        limit = request.fields.get("deadline_seconds")
        state["draining_since"] = node.draining_since or now
        state["drain_deadline_at"] = None if limit is None else Instant(now + limit)
    places = node_key(node.name), *world.by_node.get(node.name, ())
    row = replace(node, **state, version=node.version + 1)
    said = str(request.fields["by"]), f"node.{request.what}", node.name, reason
    return replace(
        done,
        nodes=(row,),
        notices=(Notice("cordon.changed", node.name, cordon_fields(row)),),
        pledges=dissolved_pledges(world, places) if closes else (),
        audit=(AuditNote(now, request.tenant, *said),),
    )
