"""Nodes: what they have and what is used of it; cordon, drain and uncordon."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal, NotRequired

from fastapi import Query, Response
from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.core.domain.device import Node, NodeSample
from gpubroker_server.core.domain.lease import HolderKind
from gpubroker_server.core.domain.node_capacity import NodeUsage
from gpubroker_server.core.domain.units import Instant, NodeName, TaskId
from gpubroker_server.core.planning.draining import still_on
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.cluster.devices import ITEMS_AT_ONCE, GpuView, gpu_views, idle_seconds
from gpubroker_server.gateway.cluster.history import HistoryQuery, HistoryView
from gpubroker_server.gateway.http.bodies import Because, Body, in_order
from gpubroker_server.gateway.http.identity import Identity, Scope
from gpubroker_server.gateway.http.problems import Problem
from gpubroker_server.gateway.http.routing import STORED, Call, Endpoint, Resource, answer, view_of
from gpubroker_server.gateway.http.times import AsOf, Time, rfc3339, rfc3339_or_none
from gpubroker_server.gateway.parts import Parts

resource = Resource("cluster")

MIB = 2**20
MOST_SECONDS = 30 * 86_400.0
MOST_NAMED = 20


class Amount(TypedDict):
    """`used`: held by what runs there, whatever it really uses."""

    total: float
    used: float
    free: float


class MebibyteAmount(TypedDict):
    total: int
    used: int
    free: int


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


class DiskView(TypedDict):
    path: str
    total_mb: int
    free_mb: int


class ObjectStoreView(TypedDict):
    """Ray's, which does not say how much of it is in use."""

    total_mb: int
    spilled_mb: Annotated[int | None, Field(description="On disk for lack of memory; null if unknown.")]


class MeasuredView(TypedDict):
    """The machine as last measured, whatever uses it."""

    sampled_at: Time
    stale: Annotated[bool, Field(description="Not measured recently.")]
    cpu: Annotated[float, Field(description="Share of its CPUs that was busy: 0 to 1.")]
    memory_total_mb: int
    memory_available_mb: int
    memory_pressure: Annotated[
        float | None,
        Field(
            description="Share of the last 10 s in which processes waited for memory (PSI); null: unknown."
        ),
    ]
    disks: Annotated[
        list[DiskView],
        Field(description="Of Ray's session and of `fleet.watched_directories`, if they answer."),
    ]
    received_bytes: Annotated[int, Field(description="By all interfaces but loopback, since it booted.")]
    sent_bytes: int
    object_store: ObjectStoreView | None


class NodeHolderView(TypedDict):
    """`id` and `name` are null for other tenants' holders, unless the token is an admin's."""

    kind: str
    id: str | None
    name: str | None
    tenant: str
    gpus: Annotated[int, Field(description="Devices on which it has a lease; 0: it has CPU and memory only.")]
    gpu_mb: int


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
    disk_full: Annotated[str | None, Field(description="Nothing starts on it: which disk is too full.")]
    incarnation: Annotated[str, Field(description="Changes with each start of the node's agent.")]
    cpu: Amount
    memory_mb: MebibyteAmount
    runs: RunAmount
    gpus: int
    gpu_mb: Annotated[MebibyteAmount, Field(description="Of its GPUs that take tasks; `used`: leased.")]
    measured: Annotated[MeasuredView | None, Field(description="Null before the first sample.")]
    holders: list[NodeHolderView]
    history: HistoryView
    idle_seconds: Annotated[
        float | None, Field(description="How long its CPUs have been idle; null: they are not.")
    ]
    labels: dict[str, str]
    agent: Annotated[AgentView | None, Field(description="Null while it does not answer.")]


class NodeDetailView(NodeView):
    devices: list[GpuView]


class NodeList(AsOf):
    items: list[NodeView]


_SORTED_BY: Final[Mapping[str, Callable[[NodeView], Any]]] = {
    "name": lambda node: node["name"],
    "cpu": lambda node: node["cpu"]["free"],
    "memory_mb": lambda node: node["memory_mb"]["free"],
    "gpu_mb": lambda node: node["gpu_mb"]["free"],
    "runs": lambda node: node["runs"]["used"],
    "idle_seconds": lambda node: node["idle_seconds"],
}


class NodesQuery(HistoryQuery):
    sort: Annotated[
        Literal[
            "name", "-name", "cpu", "-cpu", "memory_mb", "-memory_mb", "gpu_mb", "-gpu_mb",
            "runs", "-runs", "idle_seconds", "-idle_seconds",
        ],
        Field(description="`cpu`, `memory_mb`, `gpu_mb`: what is free. `-`: the most first; ties by name."),
    ] = "name"  # fmt: skip


@resource.route("GET /nodes", "nodes_list", Scope.CLUSTER_READ, NodeList, "follower-stale validation-failed")
async def list_nodes(call: Call, parts: Parts, query: Annotated[NodesQuery, Query()]) -> Response:
    """List all nodes: CPU, host memory, run slots and GPU memory in total, held and free, what is measured,
    and their agents."""
    as_of = parts.freshness.as_of()
    view: NodeList = {**as_of, "items": []}
    for node in sorted(parts.world.nodes.values(), key=lambda node: node.name):
        view["items"].append(_node_view(call, parts, node, query))
        if len(view["items"]) % ITEMS_AT_ONCE == 0:
            await asyncio.sleep(0)
    view["items"] = in_order(view["items"], query.sort, _SORTED_BY)
    return answer(view)


@resource.route(
    "GET /nodes/{node}",
    "nodes_get",
    Scope.CLUSTER_READ,
    NodeDetailView,
    "not-found follower-stale validation-failed",
)
async def get_node(call: Call, parts: Parts, node: str, query: Annotated[HistoryQuery, Query()]) -> Response:
    """One node, with its devices as `GET /gpus` has them."""
    parts.freshness.as_of()
    known, keys = _known(parts, node), parts.world.by_node.get(NodeName(node), ())
    devices = list(gpu_views(call, parts, keys, query))
    view: NodeDetailView = {**_node_view(call, parts, known, query), "devices": devices}
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


def _change(verb: str) -> Callable[[Endpoint], Endpoint]:
    """The route of a request to the leader about a node."""
    return resource.route(
        f"POST /nodes/{{node}}/{verb}",
        f"nodes_{verb}",
        Scope.CLUSTER_WRITE,
        NodeView,
        "malformed-json not-found follower-stale validation-failed leader-outdated",
        accepted=STORED,
        response_description="The node as it is now.",
    )


@_change("cordon")
async def cordon_node(
    call: Call,
    parts: Parts,
    node: str,
    body: CordonNode = CordonNode(),  # noqa: B008  # frozen
) -> Response:
    """Start nothing new on a node. What runs there goes on; a drain of it ends."""
    return await _ask(call, parts, node, "cordon", {"reason": body.reason})


@_change("drain")
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


@_change("uncordon")
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
    view = _node_view(call, parts, _known(parts, name), HistoryQuery())
    return answer(view, 200 if settled else 202)


async def known_node(parts: Parts, name: str) -> NodeName:
    """For a request to the leader. Raises Problem if there is no such node."""
    await parts.freshness.catch_up()
    parts.freshness.as_of()
    return _known(parts, name).name


def _known(parts: Parts, name: str) -> Node:
    """Raises Problem if there is no such node."""
    node = parts.world.nodes.get(NodeName(name))
    if node is None:
        known = ", ".join(sorted(parts.world.nodes)[:MOST_NAMED]) or "none yet"
        raise Problem("not-found", f'there is no node "{name[:100]}"; nodes: {known}')
    return node


def _drain_view(world: World, node: Node, since: Instant) -> DrainView:
    left = len(still_on(world, node.name))
    return {
        "since": rfc3339(since),
        "deadline_at": rfc3339_or_none(node.drain_deadline_at),
        "left": left,
        "done": left == 0,
    }


def _node_view(call: Call, parts: Parts, node: Node, query: HistoryQuery) -> NodeView:
    """Its agent as the leader knows it."""
    world, leader = parts.world, parts.leadership.leader()
    agent = parts.leadership.executor_status().get("agents", {}).get(node.name)
    silent_since = None if leader is None else leader.silent.get(node.name)
    use, keys = world.use.get(node.name, NodeUsage()), world.by_node.get(node.name, ())
    ledgers = [ledger for key in keys if (ledger := world.ledgers[key]).device.offers]
    sample = world.node_samples.get(node.name)
    return {
        "name": node.name,
        "ready": node.ready,
        "silent_since": rfc3339_or_none(silent_since),
        "cordoned": node.cordoned,
        "cordon_reason": node.cordon_reason,
        "drain": None if node.draining_since is None else _drain_view(world, node, node.draining_since),
        "disk_full": world.full_disks.get(node.name),
        "incarnation": node.incarnation,
        "cpu": {"total": node.cpu, "used": use.cpu, "free": max(0.0, node.cpu - use.cpu)},
        "memory_mb": {
            "total": node.memory_mb,
            "used": use.memory_mb,
            "free": max(0, node.memory_mb - use.memory_mb),
        },
        "runs": {"limit": node.max_runs, "used": use.runs},
        "gpus": len(keys),
        "gpu_mb": {
            "total": sum(ledger.device.physical_mb for ledger in ledgers),
            "used": sum(ledger.leased_mb() for ledger in ledgers),
            "free": sum(max(0, ledger.free_mb()) for ledger in ledgers),
        },
        "measured": None if sample is None else _measured_view(parts, sample),
        "holders": _holder_views(world, node.name, call.identity),
        "history": query.reader(parts)(node.name),
        "idle_seconds": idle_seconds(parts).get(node.name),
        "labels": dict(node.labels),
        "agent": agent,
    }


def _measured_view(parts: Parts, sample: NodeSample) -> MeasuredView:
    store = sample.store
    disks = [
        {"path": disk.path, "total_mb": disk.total_bytes // MIB, "free_mb": disk.free_bytes // MIB}
        for disk in sample.disks
    ]
    return view_of(
        MeasuredView,
        sample,
        sampled_at=rfc3339(sample.at),
        stale=sample.is_stale(parts.clock.now(), parts.policy.sample_period_seconds),
        disks=disks,
        object_store=None if store is None else view_of(ObjectStoreView, store),
    )


def _holder_views(world: World, node: NodeName, viewer: Identity) -> list[NodeHolderView]:
    """What has leases on its devices, then tasks that have none there."""
    found: dict[str, NodeHolderView] = {}
    for key in world.by_node.get(node, ()):
        for _, holding in sorted(world.ledgers[key].holdings.items()):
            lease = holding.lease
            kind, holder = lease.holder_kind.value, lease.holder
            view = found.setdefault(holder, _holder_view(world, kind, holder, lease.tenant, viewer))
            view["gpus"] += 1
            view["gpu_mb"] += lease.mb
    for task in sorted(world.runs.get(node, ())):
        row = world.tasks[task]
        kind = HolderKind.GANG_MEMBER if row.members else HolderKind.RUN
        found.setdefault(task, _holder_view(world, kind.value, task, row.tenant, viewer))
    return list(found.values())


def _holder_view(world: World, kind: str, holder: str, tenant: str, viewer: Identity) -> NodeHolderView:
    task, is_named = world.tasks.get(TaskId(holder)), viewer.may_see(tenant)
    return {
        "kind": kind,
        "id": holder if is_named else None,
        "name": task.name if task is not None and is_named else None,
        "tenant": tenant,
        "gpus": 0,
        "gpu_mb": 0,
    }
