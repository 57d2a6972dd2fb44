"""Environments of waiting tasks: which nodes prepare them, what nodes report, and which tasks fail because no
node could prepare theirs."""

from collections.abc import Iterable, Iterator, Mapping

from msgspec.structs import replace

from gpubroker_server.core.domain.decisions import Decision, Outcome, write_move
from gpubroker_server.core.domain.demand import Demand, may_use_node
from gpubroker_server.core.domain.device import Node
from gpubroker_server.core.domain.environment import (
    ENVIRONMENT_FAILED,
    EnvironmentState,
    NodeEnvironment,
)
from gpubroker_server.core.domain.orders import EnvironmentReported, Failure, PrepareOrder
from gpubroker_server.core.domain.task import Move, Task, TaskState
from gpubroker_server.core.domain.units import Instant, NodeName
from gpubroker_server.core.world.events import environments_notice
from gpubroker_server.core.world.world import World

NODES_AT_ONCE = 16
"""The most nodes that prepare one environment at the same time, so that a package index is not asked by a
whole cluster at once."""
MOST_FAILURES = 200
"""The most tasks that fail in one cycle. The others fail in the next."""
ORDERED = "about to begin"


def due(world: World, now: Instant) -> list[Decision]:
    """Return the decisions that have nodes prepare the environments of waiting tasks, and that fail the tasks
    whose environment could be prepared on no node."""
    changed: dict[NodeName, tuple[Node, list[PrepareOrder]]] = {}
    failed: list[Decision] = []
    for key, ids in world.unprepared.items():
        tasks = [world.tasks[id] for id in sorted(ids) if not world.tasks[id].held]
        if not tasks:
            continue
        for node, order in _to_prepare(world, key, tasks):
            row, orders = changed.get(node.name, (node, []))
            entry = NodeEnvironment(key, EnvironmentState.PREPARING, now, ORDERED)
            changed[node.name] = _with_entry(row, entry), [*orders, order]
        failed += _failures(world, key, tasks, now)
    prepared = [replace(_written(row, "prepare"), orders=tuple(orders)) for row, orders in changed.values()]
    return prepared + failed[:MOST_FAILURES]


def seen(world: World, reports: Iterable[EnvironmentReported], now: Instant) -> list[Decision]:
    """Return one decision for each node whose row differs from what the node reports about environments."""
    rows: dict[NodeName, Node] = {}
    for report in reports:
        row = rows.get(report.node) or world.nodes.get(report.node)
        if row is not None:
            rows[report.node] = _with_report(row, report, now)
    return [_written(row, "environment") for name, row in rows.items() if row != world.nodes[name]]


def _written(row: Node, why: str) -> Decision:
    """Return the decision that writes a node's row with its changed environments."""
    nodes = (replace(row, version=row.version + 1),)
    return Decision(row.name, why, nodes=nodes, notices=(environments_notice(row),))


def _with_report(node: Node, report: EnvironmentReported, now: Instant) -> Node:
    others = tuple(known for known in node.environments if known.key != report.key)
    if report.state is None:
        return replace(node, environments=others)
    known, since = node.environment(report.key), now
    if known is not None and known.state is report.state:
        since = known.since
    entry = NodeEnvironment(report.key, report.state, since, report.step, report.python, report.message)
    return _with_entry(node, entry)


def _with_entry(node: Node, entry: NodeEnvironment) -> Node:
    others = (known for known in node.environments if known.key != entry.key)
    return replace(node, environments=tuple(sorted((*others, entry), key=lambda known: known.key)))


def reported(known: Node | None, agents: Node) -> tuple[NodeEnvironment, ...]:
    """Return the environments of a node by its agent's answer, with the times that its row has for states
    that go on."""
    before = {} if known is None else {entry.key: entry for entry in known.environments}
    return tuple(
        replace(entry, since=before[entry.key].since)
        if entry.key in before and before[entry.key].state is entry.state
        else entry
        for entry in agents.environments
    )


def _to_prepare(world: World, key: str, tasks: list[Task]) -> Iterator[tuple[Node, PrepareOrder]]:
    """Yield the nodes that are to prepare an environment, each with its order. A node whose preparation has
    failed tries again for a task that was submitted later."""
    states = {node.name: node.environment(key) for node in world.nodes.values()}
    under_way = sum(_is_under_way(state) for state in states.values())
    newest = max(task.submitted_at for task in tasks)
    for node in _eligible(world, tasks):
        state = states[node.name]
        if state is not None and not _may_try_again(state, newest):
            continue
        if under_way >= NODES_AT_ONCE:
            return
        under_way += 1
        wanting = next(task for task in tasks if _may_run_on(task, node))
        yield node, PrepareOrder(node.name, node.incarnation, key, wanting.id, wanting.tenant)


def _failures(world: World, key: str, tasks: list[Task], now: Instant) -> Iterator[Decision]:
    for task in tasks:
        states = {node.name: node.environment(key) for node in _eligible(world, [task])}
        if states and all(_has_failed_for(state, task) for state in states.values()):
            yield _failure_of(task, states, now)


def _failure_of(task: Task, states: Mapping[NodeName, NodeEnvironment | None], now: Instant) -> Decision:
    by_message: dict[str, list[NodeName]] = {}
    for name, state in states.items():
        by_message.setdefault("" if state is None else state.message, []).append(name)
    message = "\n".join(f"on node {', '.join(sorted(names))}: {text}" for text, names in by_message.items())
    failure = Failure(ENVIRONMENT_FAILED, f"its environment could not be prepared {message}")
    return Decision(
        task.id,
        "environment",
        tasks=(write_move(task, Move.FAILED, finished_at=now),),
        outcome=Outcome(task.id, task.fence, TaskState.FAILED, now, failure=failure),
    )


def _eligible(world: World, tasks: Iterable[Task]) -> list[Node]:
    """Return the nodes that take work now and that one of the tasks may use, by name."""
    demands = {demand for task in tasks for demand in _parts(task)}
    return [
        node
        for _, node in sorted(world.nodes.items())
        if world.takes_work(node) and any(may_use_node(demand, node) for demand in demands)
    ]


def _may_run_on(task: Task, node: Node) -> bool:
    return any(may_use_node(demand, node) for demand in _parts(task))


def _parts(task: Task) -> tuple[Demand, ...]:
    return task.demand.bundles or (task.demand,)


def _is_under_way(state: NodeEnvironment | None) -> bool:
    return state is not None and state.state is EnvironmentState.PREPARING


def _may_try_again(state: NodeEnvironment, newest: Instant) -> bool:
    return state.state is EnvironmentState.FAILED and newest > state.since


def _has_failed_for(state: NodeEnvironment | None, task: Task) -> bool:
    """Return True if the preparation has failed since the task was submitted."""
    return state is not None and state.state is EnvironmentState.FAILED and task.submitted_at <= state.since
