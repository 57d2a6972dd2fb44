"""Nodes: what they have and what is used of it; cordon, drain and uncordon."""

from typing import Annotated, Any, NotRequired

from fastapi import Response
from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.core.domain.device import Node
from gpubroker_server.core.domain.node_capacity import NodeUsage
from gpubroker_server.core.domain.units import Instant, NodeName
from gpubroker_server.core.planning.draining import still_on
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.cluster.parts import Parts
from gpubroker_server.gateway.http.bodies import Because, Body
from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.problems import Problem
from gpubroker_server.gateway.http.routing import STORED, Call, Resource, answer
from gpubroker_server.gateway.http.times import AsOf, Time, rfc3339, rfc3339_or_none

resource = Resource("cluster")

MOST_SECONDS = 30 * 86_400.0
MOST_NAMED = 20


class Amount(TypedDict):
    total: float
    used: float


class MebibyteAmount(TypedDict):
    total: int
    used: int


class RunAmount(TypedDict):
    limit: int
    used: int


class AgentView(TypedDict):
    release: Annotated[str | None, Field(description="Of gpubroker; null if it does not say.")]
    protocol: Annotated[int, Field(description="The version of its protocol with the leader.")]
    outdated: Annotated[bool, Field(description="It is of an earlier release than the leader.")]
    message: Annotated[str | None, Field(description="What happens to it, and what to do.")]
    gpu_faults: Annotated[
        NotRequired[dict[str, str]],
        Field(description="GPUs that it cannot use, by UUID or else by number, and why."),
    ]
    python: Annotated[NotRequired[str], Field(description="Its version there; as `ray`.")]
    ray: NotRequired[str]
    clock_ahead_seconds: Annotated[
        NotRequired[int], Field(description="How far the node's clock is ahead of the leader's.")
    ]


class DrainView(TypedDict):
    """What runs on the node is asked to leave."""

    since: Time
    deadline_at: Annotated[
        Time | None, Field(description="By when all that is left is ended, whatever its priority.")
    ]
    left: Annotated[
        int, Field(description="Runs, models and leases that are there, or not proven to be gone.")
    ]
    done: Annotated[bool, Field(description="Nothing is left: the machine can be taken away.")]


class NodeView(TypedDict):
    name: str
    ready: Annotated[bool, Field(description="Its agent has answered the leader.")]
    silent_since: Annotated[
        Time | None,
        Field(description="The last heartbeat of its agent, if more than two are overdue; null otherwise."),
    ]
    cordoned: Annotated[bool, Field(description="An operator says that nothing new starts on it.")]
    cordon_reason: Annotated[str, Field(description="In the operator's words; often empty.")]
    drain: Annotated[DrainView | None, Field(description="Null if it is not being drained.")]
    incarnation: Annotated[str, Field(description="Changes with each start of the node's agent.")]
    cpu: Amount
    memory_mb: MebibyteAmount
    runs: RunAmount
    gpus: int
    idle_seconds: Annotated[
        float | None, Field(description="How long its CPUs have been idle; null: they are not.")
    ]
    labels: dict[str, str]
    agent: Annotated[AgentView | None, Field(description="Null while it does not answer.")]


class NodeList(AsOf):
    items: list[NodeView]


@resource.route("GET /nodes", "nodes_list", Scope.CLUSTER_READ, NodeList, "follower-stale")
async def list_nodes(parts: Parts) -> Response:
    """List all nodes with their CPU, host memory and run slots, in total and in use, and their agents."""
    items = [_node_view(parts, parts.world.nodes[name]) for name in sorted(parts.world.nodes)]
    view: NodeList = {**parts.freshness.as_of(), "items": items}
    return answer(view)


class CordonNode(Body):
    """`reason` is recorded with the name of your token, and shown with the node."""

    reason: Because = ""


class DrainNode(CordonNode):
    deadline_seconds: Annotated[
        float | None,
        Field(
            ge=0,
            le=MOST_SECONDS,
            description="From now; then all that is left is ended, whatever its priority. Null: what is "
            "critical, or protected from preemption, stays.",
        ),
    ] = None


ERRORS = "malformed-json not-found follower-stale validation-failed leader-outdated"
RESPONSE = "The node as it is now."


@resource.route(
    "POST /nodes/{node}/cordon",
    "nodes_cordon",
    Scope.CLUSTER_WRITE,
    NodeView,
    ERRORS,
    accepted=STORED,
    response_description=RESPONSE,
)
async def cordon_node(
    call: Call,
    parts: Parts,
    node: str,
    body: CordonNode = CordonNode(),  # noqa: B008  # frozen
) -> Response:
    """Start nothing new on a node. What runs there goes on; a drain of it ends."""
    return await _ask(call, parts, node, "cordon", {"reason": body.reason})


@resource.route(
    "POST /nodes/{node}/drain",
    "nodes_drain",
    Scope.CLUSTER_WRITE,
    NodeView,
    ERRORS,
    accepted=STORED,
    response_description=RESPONSE,
)
async def drain_node(
    call: Call,
    parts: Parts,
    node: str,
    body: DrainNode = DrainNode(),  # noqa: B008  # frozen
) -> Response:
    """Cordon a node, and ask what runs there to leave by the rules of preemption: with notice and grace
    period, and back into the queue without using a retry. Models are unloaded.

    `drain.done` of the node says when nothing is left. A later drain replaces the deadline of an earlier one.
    """
    about = {"reason": body.reason, "deadline_seconds": body.deadline_seconds}
    return await _ask(call, parts, node, "drain", about)


@resource.route(
    "POST /nodes/{node}/uncordon",
    "nodes_uncordon",
    Scope.CLUSTER_WRITE,
    NodeView,
    ERRORS,
    accepted=STORED,
    response_description=RESPONSE,
)
async def uncordon_node(
    call: Call,
    parts: Parts,
    node: str,
    body: CordonNode = CordonNode(),  # noqa: B008  # frozen
) -> Response:
    """Let tasks start on a node again; a drain of it ends. Runs under notice leave nevertheless."""
    return await _ask(call, parts, node, "uncordon", {"reason": body.reason})


async def _ask(call: Call, parts: Parts, name: str, what: str, about: dict[str, Any]) -> Response:
    node = await known_node(parts, name)
    fields = {**about, "by": call.identity.name}
    settled = await parts.requests.ask(node, call.identity.tenant, what, fields)
    return answer(_node_view(parts, parts.world.nodes[node]), 200 if settled else 202)


async def known_node(parts: Parts, name: str) -> NodeName:
    """Raises Problem if there is no such node."""
    await parts.freshness.catch_up()
    parts.freshness.as_of()
    if NodeName(name) not in parts.world.nodes:
        known = ", ".join(sorted(parts.world.nodes)[:MOST_NAMED]) or "none yet"
        raise Problem("not-found", f'there is no node "{name[:100]}"; nodes: {known}')
    return NodeName(name)


def _drain_view(world: World, node: Node, since: Instant) -> DrainView:
    left = len(still_on(world, node.name))
    return {
        "since": rfc3339(since),
        "deadline_at": rfc3339_or_none(node.drain_deadline_at),
        "left": left,
        "done": left == 0,
    }


def _node_view(parts: Parts, node: Node) -> NodeView:
    """Its agent as the leader knows it."""
    world, leader = parts.world, parts.leadership.leader()
    agent = parts.leadership.executor_status().get("agents", {}).get(node.name)
    silent_since = None if leader is None else leader.silent.get(node.name)
    use = world.use.get(node.name, NodeUsage())
    return {
        "name": node.name,
        "ready": node.ready,
        "silent_since": rfc3339_or_none(silent_since),
        "cordoned": node.cordoned,
        "cordon_reason": node.cordon_reason,
        "drain": None if node.draining_since is None else _drain_view(world, node, node.draining_since),
        "incarnation": node.incarnation,
        "cpu": {"total": node.cpu, "used": use.cpu},
        "memory_mb": {"total": node.memory_mb, "used": use.memory_mb},
        "runs": {"limit": node.max_runs, "used": use.runs},
        "gpus": len(world.by_node.get(node.name, ())),
        "idle_seconds": parts.idle_seconds().get(node.name),
        "labels": dict(node.labels),
        "agent": agent,
    }
