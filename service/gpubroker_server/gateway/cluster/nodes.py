"""Routes that list, cordon, drain and uncordon nodes: what each node has, and what is used of it."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

from fastapi import Query, Response
from gpubroker.wire.answered import OverviewPage, Time, part_of
from gpubroker.wire.nodes import (
    Amount,
    Disk,
    Drain,
    MeasuredNode,
    MebibyteAmount,
    NodeAgent,
    NodeDetail,
    NodeHolder,
    ObjectStore,
    RunAmount,
)
from gpubroker.wire.nodes import Node as ShownNode
from msgspec import convert
from pydantic import Field

from gpubroker_server.core.domain.device import Node, NodeSample
from gpubroker_server.core.domain.holders import Gang
from gpubroker_server.core.domain.lease import HolderKind, Lease
from gpubroker_server.core.domain.node_capacity import NodeUsage
from gpubroker_server.core.domain.units import MIB_BYTES, Instant, NodeName, TaskId
from gpubroker_server.core.world.node_holders import still_on
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.cluster.devices import ITEMS_AT_ONCE, idle_seconds, shown_gpus
from gpubroker_server.gateway.cluster.history import HistoryPageQuery, HistoryQuery
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.http.bodies import Because, Body, JsonBody, in_order
from gpubroker_server.http.identity import Identity, Scope
from gpubroker_server.http.problems import Problem
from gpubroker_server.http.routing import STORED, Caller, Endpoint, Resource, answer

resource = Resource("cluster")

MAX_SECONDS = 30 * 86_400.0
MAX_NAMED = 20
NO_HISTORY = HistoryQuery(history="0")

AnyNode = TypeVar("AnyNode", bound=ShownNode)


_SORTED_BY: Final[Mapping[str, Callable[[ShownNode], Any]]] = {
    "name": lambda node: node.name,
    "cpu": lambda node: node.cpu.free,
    "memory_mb": lambda node: node.memory_mb.free,
    "gpu_mb": lambda node: node.gpu_mb.free,
    "runs": lambda node: node.runs.used,
    "idle_seconds": lambda node: node.idle_seconds,
}


class NodesQuery(HistoryPageQuery):
    sort: Annotated[
        Literal[
            "name", "-name", "cpu", "-cpu", "memory_mb", "-memory_mb", "gpu_mb", "-gpu_mb",
            "runs", "-runs", "idle_seconds", "-idle_seconds",
        ],
        Field(description="`cpu`, `memory_mb`, `gpu_mb`: what is free. `-`: the most first; ties by name."),
    ] = "name"  # fmt: skip
    boot_id: Annotated[
        str | None,
        Field(
            max_length=100,
            description="Only the nodes on the machine whose kernel says this boot id "
            "(/proc/sys/kernel/random/boot_id).",
        ),
    ] = None


@resource.route(
    "GET /nodes", "nodes_list", Scope.CLUSTER_READ, OverviewPage[ShownNode], "cursor-invalid follower-stale"
)
async def list_nodes(caller: Caller, parts: Parts, query: Annotated[NodesQuery, Query()]) -> Response:
    """List all nodes: CPU, host memory, run slots and GPU memory in total, held and free, what is measured,
    and their agents."""
    moment = parts.freshness.moment()
    asked = [node.name for node in parts.world.nodes.values() if query.boot_id in (None, node.boot_id)]
    if query.sort in ("name", "-name"):
        names = sorted(asked, reverse=query.sort == "-name")
    else:
        every = await _shown_nodes(caller, parts, sorted(asked), NO_HISTORY)
        names = [NodeName(node.name) for node in in_order(every, query.sort, _SORTED_BY)]
    page, next_cursor = query.cut(names, f"nodes {query.sort} {query.boot_id or ''}".strip())
    return answer(
        OverviewPage(**moment, **part_of(await _shown_nodes(caller, parts, page, query), next_cursor))
    )


async def _shown_nodes(
    caller: Caller, parts: Parts, names: Sequence[NodeName], query: HistoryQuery
) -> list[ShownNode]:
    items: list[ShownNode] = []
    for name in names:
        if (node := parts.world.nodes.get(name)) is not None:
            items.append(_shown(ShownNode, caller, parts, node, query))
        if len(items) % ITEMS_AT_ONCE == 0:
            await asyncio.sleep(0)
    return items


@resource.route("GET /nodes/{node}", "nodes_get", Scope.CLUSTER_READ, NodeDetail, "not-found follower-stale")
async def get_node(
    caller: Caller, parts: Parts, node: str, query: Annotated[HistoryQuery, Query()]
) -> Response:
    """Read one node, with its devices as `GET /gpus` has them."""
    parts.freshness.moment()
    known, keys = _known(parts, node), parts.world.by_node.get(NodeName(node), ())
    devices = tuple(shown_gpus(caller, parts, keys, query))
    return answer(_shown(NodeDetail, caller, parts, known, query, devices=devices))


class CordonNode(Body):
    """`reason` is recorded with the name of your token, and shown with the node."""

    reason: Because = ""


class DrainNode(CordonNode):
    deadline_seconds: Annotated[
        float | None,
        Field(
            ge=0,
            le=MAX_SECONDS,
            description="From now; then all that is left is ended, whatever its priority. Null: what is "
            "critical, or protected from preemption, stays.",
        ),
    ] = None


def _change(verb: str) -> Callable[[Endpoint], Endpoint]:
    """Return the decorator of a route that requests a change of a node from the leader."""
    return resource.route(
        f"POST /nodes/{{node}}/{verb}",
        f"nodes_{verb}",
        Scope.CLUSTER_WRITE,
        ShownNode,
        "malformed-json not-found follower-stale leader-outdated",
        accepted=STORED,
        response_description="The node as it is now.",
    )


@_change("cordon")
async def cordon_node(
    caller: Caller,
    parts: Parts,
    node: str,
    body: JsonBody[CordonNode] = CordonNode(),  # noqa: B008  # frozen
) -> Response:
    """Cordon a node: nothing new starts on it, and what runs there goes on. This ends a drain of the node."""
    return await _ask(caller, parts, node, "cordon", {"reason": body.reason})


@_change("drain")
async def drain_node(
    caller: Caller,
    parts: Parts,
    node: str,
    body: JsonBody[DrainNode] = DrainNode(),  # noqa: B008  # frozen
) -> Response:
    """Cordon a node, and ask what runs there to leave by the rules of preemption: with notice and grace
    period, and back into the queue without using a retry. Models are unloaded.

    `drain.done` of the node is true when nothing is left. A later drain replaces the deadline of an earlier
    drain.
    """
    about = {"reason": body.reason, "deadline_seconds": body.deadline_seconds}
    return await _ask(caller, parts, node, "drain", about)


@_change("uncordon")
async def uncordon_node(
    caller: Caller,
    parts: Parts,
    node: str,
    body: JsonBody[CordonNode] = CordonNode(),  # noqa: B008  # frozen
) -> Response:
    """Uncordon a node: tasks may start on it again. This ends a drain of the node, but runs under notice
    still leave."""
    return await _ask(caller, parts, node, "uncordon", {"reason": body.reason})


async def _ask(caller: Caller, parts: Parts, name: str, what: str, about: dict[str, Any]) -> Response:
    node = await known_node(parts, name)
    settled = await parts.requests.ask(node, caller.tenant, what, {**about, "by": caller.name})
    shown = _shown(ShownNode, caller, parts, _known(parts, name), HistoryQuery())
    return answer(shown, 200 if settled else 202)


async def known_node(parts: Parts, name: str) -> NodeName:
    """Return the name of a node after the World has caught up. Raises Problem not-found if there is no such
    node, and Problem follower-stale if the World is too old."""
    await parts.freshness.catch_up()
    parts.freshness.moment()
    return _known(parts, name).name


def _known(parts: Parts, name: str) -> Node:
    """Return a node. Raises Problem not-found if there is no such node."""
    node = parts.world.nodes.get(NodeName(name))
    if node is None:
        names = ", ".join(sorted(parts.world.nodes)[:MAX_NAMED]) or "none yet"
        raise Problem("not-found", f'there is no node "{name[:100]}"; nodes: {names}')
    return node


def _drain(world: World, node: Node, since: Instant) -> Drain:
    left = len(still_on(world, node.name))
    return Drain(Time.at(since), Time.at_or_none(node.drain_deadline_at), left, left == 0)


def _shown(
    kind: type[AnyNode], viewer: Identity, parts: Parts, node: Node, query: HistoryQuery, **more: Any
) -> AnyNode:
    """Return the view of a node, with its agent as the leader knows it. `kind` is the type of the view, and
    `more` are its further fields."""
    world, leader = parts.world, parts.leadership.leader()
    agent = parts.leadership.executor_status().get("agents", {}).get(node.name)
    use, keys = world.use.get(node.name, NodeUsage()), world.by_node.get(node.name, ())
    ledgers = [ledger for key in keys if (ledger := world.ledgers[key]).device.offers]
    sample = world.node_samples.get(node.name)
    return kind(
        name=node.name,
        ready=node.ready,
        silent_since=Time.at_or_none(None if leader is None else leader.silent.get(node.name)),
        cordoned=node.cordoned,
        cordon_reason=node.cordon_reason,
        cordoned_by=node.cordoned_by,
        cordoned_at=Time.at_or_none(node.cordoned_at),
        drain=None if node.draining_since is None else _drain(world, node, node.draining_since),
        disk_full=world.full_disks.get(node.name),
        incarnation=node.incarnation,
        cpu=Amount(node.cpu, use.cpu, max(0.0, node.cpu - use.cpu)),
        memory_mb=MebibyteAmount(node.memory_mb, use.memory_mb, max(0, node.memory_mb - use.memory_mb)),
        runs=RunAmount(node.max_runs, use.runs),
        gpus=len(keys),
        gpu_mb=MebibyteAmount(
            total=sum(ledger.device.physical_mb for ledger in ledgers),
            used=sum(ledger.leased_mb() for ledger in ledgers),
            free=sum(ledger.offered_mb() for ledger in ledgers),
        ),
        measured=None if sample is None else _measured(parts, sample),
        holders=tuple(_holders(world, node.name, viewer)),
        history=query.reader(parts)(node.name),
        idle_seconds=idle_seconds(parts).get(node.name),
        labels=dict(node.labels),
        task_user=parts.rules.task_user,
        agent=None if agent is None else convert(agent, NodeAgent),
        **more,
    )


def _measured(parts: Parts, sample: NodeSample) -> MeasuredNode:
    store = sample.store
    return MeasuredNode(
        sampled_at=Time.at(sample.at),
        stale=sample.is_stale(parts.clock.now(), parts.policy.sample_period_seconds),
        cpu=sample.cpu,
        memory_total_mb=sample.memory_total_mb,
        memory_available_mb=sample.memory_available_mb,
        memory_pressure=sample.memory_pressure,
        disks=tuple(
            Disk(disk.path, disk.total_bytes // MIB_BYTES, disk.free_bytes // MIB_BYTES)
            for disk in sample.disks
        ),
        received_bytes=sample.received_bytes,
        sent_bytes=sample.sent_bytes,
        object_store=None if store is None else ObjectStore(*store, used_mb=sample.store_used_mb),
    )


def _holders(world: World, node: NodeName, viewer: Identity) -> Iterator[NodeHolder]:
    """Yield the holders of leases on the node's devices, then the tasks that run on the node without a
    lease."""
    held: dict[str, list[Lease]] = {}
    for key in world.by_node.get(node, ()):
        for _, holding in sorted(world.ledgers[key].holdings.items()):
            held.setdefault(holding.lease.holder, []).append(holding.lease)
    for holder, leases in held.items():
        yield _holder(world, leases[0].holder_kind, holder, leases[0].tenant, viewer, leases)
    for task in sorted(world.runs.get(node, ())):
        if task not in held:
            row = world.tasks[task]
            kind = HolderKind.GANG_MEMBER if isinstance(row.holder, Gang) else HolderKind.RUN
            yield _holder(world, kind, task, row.tenant, viewer)


def _holder(
    world: World,
    kind: HolderKind,
    holder: str,
    tenant: str,
    viewer: Identity,
    leases: Sequence[Lease] = (),
) -> NodeHolder:
    task, is_named = world.tasks.get(TaskId(holder)), viewer.may_see(tenant)
    return NodeHolder(
        kind=kind.value,
        id=holder if is_named else None,
        name=task.name if task is not None and is_named else None,
        tenant=tenant,
        gpus=len(leases),
        gpu_mb=sum(lease.mb for lease in leases),
    )
