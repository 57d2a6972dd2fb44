"""Worlds in one line: nodes, devices, tasks and leases, for every test of the core.

world = a_world(a_device("gpu0"), holding(a_task("low", priority=10, gpu_mb=60 * GIB), "gpu0"))
submit(world, a_task("high", priority=80, gpu_mb=40 * GIB))
commit(world, plan_cycle(world, Policy(), NOW).decisions)
check_ledger(world)
"""

from collections.abc import Iterable
from typing import Any, TypeVar

from gpubroker_server.core.domain.decisions import Decision, Request, TaskWrite, write_move
from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.device import Device, DeviceSample, Node
from gpubroker_server.core.domain.estimates import Sketch
from gpubroker_server.core.domain.holders import holder_of
from gpubroker_server.core.domain.lease import HolderKind, Lease, LeaseState, Pledge, Proof, release
from gpubroker_server.core.domain.task import Move, Task, TaskState
from gpubroker_server.core.domain.units import (
    DeviceKey,
    Fence,
    Instant,
    Mib,
    NodeName,
    Position,
    TaskId,
    device_key,
)
from gpubroker_server.core.world.events import Event, NewEvent, events_of, submitted
from gpubroker_server.core.world.payload import encode
from gpubroker_server.core.world.world import World
from msgspec import Struct
from msgspec.structs import replace

NOW = Instant(1_000_000.0)
GIB = 1024
"""MiB in one GiB: `gpu_mb=18 * GIB`."""

_DEMAND_FIELDS = frozenset(Demand.__struct_fields__)

AnyOrder = TypeVar("AnyOrder")


def key(device: str | DeviceKey, node: str = "n1") -> DeviceKey:
    """`key("gpu0")` names gpu0 of n1; `key("gpu0", "n2")` and `key("n2/gpu0")` the one of n2."""
    if device.count("/") == 2:
        return DeviceKey(device)
    if "/" in device:
        node, device = device.split("/")
    return device_key("test", node, device)


def a_node(name: str = "n1", **fields: Any) -> Node:
    """A ready node with 64 CPUs, 256 GiB and 64 run slots."""
    facts = {"cpu": 64.0, "memory_mb": Mib(256 * GIB), "max_runs": 64, "incarnation": f"{name}-1"}
    return Node(name=NodeName(name), **{**facts, "boot_id": f"boot-{name}", **fields})


def a_device(uuid: str = "gpu0", node: str = "n1", mb: int = 80 * GIB, **fields: Any) -> Device:
    """An H100 of 80 GiB, all of it allocatable."""
    digits = "".join(c for c in uuid if c.isdigit()) or "0"
    facts = {"kind": "H100", "index": int(digits), "simulated": True, **fields}
    return Device(key=key(uuid, node), node=NodeName(node), uuid=uuid, physical_mb=Mib(mb), **facts)


def a_demand(**fields: Any) -> Demand:
    """A demand; a size without a number of GPUs means one GPU."""
    if "gpus" not in fields and any(name in fields for name in ("gpu_mb", "gpu_fraction", "exclusive")):
        fields["gpus"] = 1
    if "custom" in fields:
        fields["custom"] = tuple(sorted(dict(fields["custom"]).items()))
    return Demand(**fields)


def a_task(id: str = "task", **fields: Any) -> Task:
    """Return a pending task of priority 50, submitted at NOW. Takes the fields of Task and of Demand alike.
    Without a holder it has that which the demand tells."""
    demand = {name: fields.pop(name) for name in list(fields) if name in _DEMAND_FIELDS}
    facts: dict[str, Any] = {"tenant": "default", "name": id, "priority": 50, "submitted_at": NOW, **fields}
    facts.setdefault("demand", a_demand(**demand))
    facts.setdefault("holder", holder_of(facts["demand"]))
    return Task(id=TaskId(id), **facts)


def a_lease(task: Task, device: str | DeviceKey, mb: int, **fields: Any) -> Lease:
    """The lease of a task's newest claim on a device, HELD by default."""
    facts = {"since": task.admitted_at or NOW, "state": LeaseState.HELD, "version": 2, **fields}
    return Lease(
        HolderKind.RUN, task.id, task.fence, key(device), Mib(mb), task.tenant, task.priority, **facts
    )


def a_pledge(preemptor: Task, device: str | DeviceKey, mb: int, **fields: Any) -> Pledge:
    facts = {"priority": preemptor.priority, "made_at": NOW, "deadline_at": Instant(NOW + 30.0), **fields}
    return Pledge(preemptor.id, key(device), Mib(mb), tenant=preemptor.tenant, **facts)


def a_sample(device: str | DeviceKey, at: float = NOW, **fields: Any) -> DeviceSample:
    return DeviceSample(key(device), Instant(at), **{"used_mb": Mib(0), **fields})


def a_sketch(values: Iterable[float]) -> Sketch:
    """Of what was learned in this order."""
    sketch = Sketch()
    for value in values:
        sketch = sketch.add(value)
    return sketch


class Holding(Struct, frozen=True):
    """A task that has been claimed, and its leases."""

    task: Task
    leases: tuple[Lease, ...]


def holding(
    task: Task,
    *devices: str | DeviceKey,
    mb: int | None = None,
    node: str | None = None,
    state: TaskState = TaskState.RUNNING,
    lease_state: LeaseState = LeaseState.HELD,
    **fields: Any,
) -> Holding:
    """The task as a run that holds `mb` (its own `gpu_mb` by default) of each device.

    RUNNING since 100 s before NOW unless `state` or `fields` (any of Task's) say otherwise. Without
    devices it runs on `node` and holds CPU only.
    """
    where = node or (key(devices[0]).split("/")[1] if devices else "n1")
    since = Instant(NOW - 100.0)
    facts: dict[str, Any] = {"fence": Fence(1), "version": 3, "node": NodeName(where), "admitted_at": since}
    if state is not TaskState.ADMITTED:
        facts["started_at"] = since
    claimed = replace(task, state=state, **{**facts, **fields})
    size = mb if mb is not None else (task.demand.gpu_mb or 0)
    return Holding(claimed, tuple(a_lease(claimed, d, size, state=lease_state) for d in devices))


Part = Node | Device | Task | Holding | Lease | Pledge | Request | DeviceSample


def a_world(*parts: Part, now: float = NOW) -> World:
    """A World of these parts. Devices get a fresh, empty sample and, where it is missing, their node.

    Parts may come in any order. Without any node or device: one node n1 with one 80 GiB device gpu0.
    """
    world = World()
    world.as_of = Instant(now)
    if not any(isinstance(part, Node | Device) for part in parts):
        parts = (a_device(), *parts)
    named = {part.name for part in parts if isinstance(part, Node)}
    missing = {part.node for part in parts if isinstance(part, Device)} - named
    for node in [part for part in parts if isinstance(part, Node)] + [a_node(n) for n in sorted(missing)]:
        world.add_node(node)
    for device in (part for part in parts if isinstance(part, Device)):
        world.add_device(device)
        world.measure([a_sample(device.key, now)])
    for part in parts:
        if isinstance(part, Task):
            world.add_task(part)
        elif isinstance(part, Holding):
            world.add_task(part.task)
    for part in parts:
        _add_account(world, part)
    return world


def _add_account(world: World, part: Part) -> None:
    match part:
        case Holding():
            for lease in part.leases:
                world.add_lease(lease)
        case Lease():
            world.add_lease(part)
        case Pledge():
            world.add_pledge(part)
        case Request():
            world.add_request(part)
        case DeviceSample():
            world.measure([part])


def submit(world: World, *tasks: Task) -> None:
    """Enter tasks through the log, as a committed submission does."""
    for task in tasks:
        _append(world, [submitted(task)])


def orders_of_kind(decision: Decision, kind: type[AnyOrder]) -> list[AnyOrder]:
    """Return the decision's orders, which are all of this kind."""
    found: list[AnyOrder] = [order for order in decision.orders if isinstance(order, kind)]
    assert len(found) == len(decision.orders)
    return found


def commit(world: World, decisions: Decision | Iterable[Decision], now: float | None = None) -> None:
    """Make decisions true: turn them into events, as a store does, and apply those to the world.

    Refuses what a store would refuse: a task or lease whose version is not the next one.
    """
    for decision in [decisions] if isinstance(decisions, Decision) else list(decisions):
        for write in decision.tasks:
            known = world.tasks[write.task.id].version
            assert write.task.version == known + 1, f"stale write of task {write.task.id}"
        for lease in decision.leases:
            before = world.leases.get((lease.holder, lease.fence), {}).get(lease.key)
            assert lease.version == (before.version + 1 if before else 1), f"stale write of {lease.key}"
        _append(world, events_of(decision), now)


def _append(world: World, events: Iterable[NewEvent], now: float | None = None) -> None:
    at = Instant(world.as_of if now is None else now)
    for new in events:
        position = Position(world.position + 1)
        world.apply([Event(position, at, new.kind, new.key, new.version, new.tenant, encode(new.payload))])


def let_go(world: World, task: str, *, requeue: bool = True) -> None:
    """The run is confirmed gone: its leases are released, and it is pending again (or it has succeeded)."""
    row = world.tasks[TaskId(task)]
    moved = row.stop_reason if row.is_moving else None
    cleared = {"node": None, "stop_reason": moved, "stop_deadline_at": None, "freeing_for": None}
    writes: list[TaskWrite] = []
    if not row.is_terminal:
        what = Move.REQUEUED if requeue else Move.SUCCEEDED
        writes.append(write_move(row, what, **cleared))
    leases = [release(lease, Proof.PROCESS_ABSENT) for lease in world.leases_of(row)]
    commit(world, Decision(row.id, "gone", tasks=tuple(writes), leases=tuple(leases)))


def check_ledger(world: World) -> None:
    """No byte is leased or promised twice: on no device do leases, foreign memory and what is kept free
    for preemptors exceed what may be leased."""
    for ledger in world.ledgers.values():
        leased = sum(holding.lease.mb for holding in ledger.holdings.values())
        kept = sum(ledger.reserved_free_mb(pledge) for pledge in ledger.pledges.values())
        there_is = ledger.device.physical_mb - ledger.device.reserve_mb - ledger.foreign_mb
        assert leased + kept <= there_is, f"{ledger.device.key} is overcommitted"
