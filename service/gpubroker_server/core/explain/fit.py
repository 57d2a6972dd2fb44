"""Check whether a set of components fits a fleet: find the place of each component, the resources that are
missing, and the runs that the components displace."""

from collections import Counter
from collections.abc import Generator, Iterable, Sequence

from gpubroker.wire.plans import Missing, MissingGpus, Totals
from gpubroker.wire.policy import GpuKind
from msgspec import Struct

from gpubroker_server.core.domain.demand import Demand, may_use_device, need_mb
from gpubroker_server.core.domain.device import Device, DeviceSample, Node, kind_of
from gpubroker_server.core.domain.holders import holder_of
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.ranks import leaving_members
from gpubroker_server.core.domain.reasons import Reason
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import DeviceKey, Instant, Mib, TaskId, device_key, in_gib
from gpubroker_server.core.explain.blockers import Blocker
from gpubroker_server.core.explain.diagnosis import diagnose
from gpubroker_server.core.explain.possible import check_task
from gpubroker_server.core.explain.survey import Survey, survey_nodes
from gpubroker_server.core.explain.what_if import WhatIf, reservation_blockers
from gpubroker_server.core.planning.decisions import admit, evict
from gpubroker_server.core.planning.find_way import Evict, Start
from gpubroker_server.core.planning.forecasts.reservations import Forecast
from gpubroker_server.core.planning.gangs.gang_search import Gang
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.preemption.eviction import Eviction
from gpubroker_server.core.world.world import World

WHOLE_MB = 2**24
"""The size in MiB that a whole device counts in the order of placement. It is at least that of the largest
device."""


class Component(Struct, frozen=True):
    """`count` tasks, or gangs, of one demand, all running at once."""

    name: str
    count: int
    demand: Demand
    priority: int
    apart: tuple[Demand, ...] = ()
    """The demands of the component's roles if they share one process. Without colocation each role runs by
    itself."""


class Placed(Struct, frozen=True):
    component: str
    number: int
    """The number of the task among those of its component, from 0."""
    places: Gang
    """The places of the task: one, or for a gang one per rank."""
    is_gang: bool
    displaced: int
    """The number of runs that would have to stop, or to give up ranks, before the task starts."""


class Unplaced(Struct, frozen=True):
    component: Component
    count: int
    reason: Reason
    message: str
    """The reason why the first of these tasks has no place."""


class Displaced(Struct, frozen=True):
    run: Task
    ranks: tuple[int, ...] | None
    """The ranks that leave a gang that goes on; None if the whole run leaves."""


class FleetPlan(Struct, frozen=True):
    placed: tuple[Placed, ...]
    unplaced: tuple[Unplaced, ...]
    displaced: tuple[Displaced, ...]
    missing: Missing
    totals: Totals
    totals_apart: Totals
    """The totals without colocation."""

    @property
    def fits(self) -> bool:
        return not self.unplaced

    @property
    def message(self) -> str:
        """A text about the tasks without a place and the missing resources, or about the runs that would have
        to leave."""
        if not self.fits:
            without = ", ".join(
                f"{shortage.count} of {shortage.component.name}" for shortage in self.unplaced
            )
            cause = _missing_in_words(self.missing) or self.unplaced[0].message
            return f"it does not fit: there is no place for {without}; {cause}"
        whole = sum(run.ranks is None for run in self.displaced)
        gangs = [run.ranks for run in self.displaced if run.ranks is not None]
        ranks = sum(map(len, gangs))
        conditions = []
        if whole:
            conditions.append("1 run leaves" if whole == 1 else f"{whole} runs leave")
        if gangs:
            subject = "1 gang gives" if len(gangs) == 1 else f"{len(gangs)} gangs give"
            conditions.append(f"{subject} up {ranks} rank{'s' * (ranks > 1)}")
        return f"it fits if {' and '.join(conditions)}" if conditions else "it fits"


def _missing_in_words(missing: Missing) -> str:
    """Return a text about the missing resources; empty if enough is left in total."""
    parts = []
    for lacking in missing.gpus:
        kind = f" {' or '.join(lacking.kinds)}" if lacking.kinds else ""
        if lacking.whole_gpus:
            parts.append(f"{lacking.whole_gpus} whole{kind} GPU{'s' * (lacking.whole_gpus > 1)}")
        if lacking.gpu_mb:
            parts.append(f"{in_gib(lacking.gpu_mb)} of{kind} GPU memory")
    if missing.cpu:
        parts.append(f"{missing.cpu:g} CPU{'s' * (missing.cpu != 1)}")
    if missing.memory_mb:
        parts.append(f"{in_gib(missing.memory_mb)} of host memory")
    return f"missing: at least {', '.join(parts)}" if parts else ""


FleetPlanSteps = Generator[None, None, FleetPlan]


def plan_fleet(
    world: World,
    components: Sequence[Component],
    tenant: str,
    policy: Policy,
    now: Instant,
    forecasts: Sequence[Forecast] = (),
) -> FleetPlanSteps:
    """Place all components beside the present runs, in the order of `_placement_order`, without changing the
    World. A component that a submission would refuse is not placed. A component without room displaces runs
    of lower priority, as a task would. Stopping runs count as gone; of the queue, only tasks with `forecasts`
    count. The generator yields after each task; the World must not change before it returns."""
    draft = Draft(world)
    _receive_all(draft)
    what_if = WhatIf(draft, policy, now, forecasts)
    placed: list[Placed] = []
    unplaced: list[Unplaced] = []
    displaced: dict[TaskId, Displaced] = {}
    for component in sorted(components, key=_placement_order):
        is_refused = check_task(_task(component, 0, tenant, now), world, policy) is not None
        for number in range(component.count):
            task = _task(component, number, tenant, now)
            places, displacements = (None, ()) if is_refused else _put(draft, what_if, task, now)
            for displacement in displacements:
                displaced[displacement.run.id] = _joined(displacement, displaced.get(displacement.run.id))
            if places is None:
                blocker = _why(survey_nodes(draft, task, policy, now, forecasts))
                unplaced.append(
                    Unplaced(component, component.count - number, blocker.reason, blocker.message)
                )
                break
            is_gang = bool(task.demand.bundles)
            placed.append(Placed(component.name, number, places, is_gang, len(displacements)))
            yield
    lacking = [(shortage.component.demand, shortage.count) for shortage in unplaced]
    return FleetPlan(
        tuple(placed),
        tuple(unplaced),
        tuple(displaced[name] for name in sorted(displaced)),
        shortage_of(lacking, free_capacity(draft), world),
        totals_of([(component.demand, component.count) for component in components], world),
        totals_of(
            [
                (role, component.count)
                for component in components
                for role in component.apart or (component.demand,)
            ],
            world,
        ),
    )


def _receive_all(draft: Draft) -> None:
    """Change the draft as if all stopping runs had left. Memory that they free for other tasks stays
    pledged."""
    world = draft.world
    for name in sorted(world.active):
        run = world.tasks[name]
        if run.state is TaskState.STOPPING:
            draft.remove_run(run)
        elif members := leaving_members(run):
            draft.remove_run(run, [member.rank for member in members])
    for node in world.nodes:
        draft.release_ended(node)


def _put(
    draft: Draft, what_if: WhatIf, task: Task, now: Instant
) -> tuple[Gang | None, tuple[Displaced, ...]]:
    """Place the task as the planner would place it once its victims have left. Return its places, or None,
    and the runs that it displaces."""
    way = what_if.way(task)
    places, displacements = way.places if isinstance(way, Start) else None, tuple[Displaced, ...]()
    if isinstance(way, Evict):
        displacements = _make_room(draft, task, way.eviction, now)
        places = what_if.places(task)
    if places is None:
        return None, ()
    admit(draft, task, places, now)
    draft.assume_started(task.id)  # a fleet is planned as it will be, not as it starts
    return places, displacements


def _make_room(draft: Draft, task: Task, eviction: Eviction, now: Instant) -> tuple[Displaced, ...]:
    evict(draft, task, eviction, now)
    displacements = tuple(Displaced(run, eviction.surplus.get(run.id)) for run in eviction.victims)
    for displacement in displacements:
        draft.remove_run(draft.task(displacement.run.id), displacement.ranks)
    return displacements


def _why(survey: Survey) -> Blocker:
    """Return the most structural reason why there is no place."""
    blockers = diagnose(survey).blockers or tuple(reservation_blockers(survey))
    gave_up = Blocker(Reason.FRAGMENTED, "the search reached its limit before it found a place")
    return blockers[0] if blockers else gave_up


def _joined(displacement: Displaced, before: Displaced | None) -> Displaced:
    """Return a displacement of a run combined with the earlier one, if any. A gang that has given up ranks
    may give up more ranks for the next task, or stop."""
    if before is None:
        return displacement
    ranks = (
        None if displacement.ranks is None else tuple(sorted({*(before.ranks or ()), *displacement.ranks}))
    )
    return Displaced(before.run, ranks)


def _task(component: Component, number: int, tenant: str, now: Instant) -> Task:
    name = f"{component.name} {number + 1}"
    id, demand = TaskId(f"plan:{name}"), component.demand
    return Task(id, tenant, name, component.priority, demand, now, holder=holder_of(demand))


def _placement_order(component: Component) -> tuple[int, float, float, str]:
    """Return the order of components: higher priority first, so that no component displaces another; then the
    largest."""
    parts = component.demand.bundles or (component.demand,)
    gpu_mb = sum(part.gpus * _mb_of(part) for part in parts)
    return -component.priority, -gpu_mb, -sum(part.cpu for part in parts), component.name


def _mb_of(demand: Demand) -> float:
    if demand.takes_whole_devices:
        return WHOLE_MB
    return demand.gpu_mb or (demand.gpu_fraction or 0) * WHOLE_MB


class FreeCapacity(Struct, frozen=True):
    devices: tuple[tuple[DeviceKey, Mib], ...]
    """(device, MiB left) of each device on which some memory is left."""
    cpu: float
    memory_mb: int


def totals_of(wanted: Iterable[tuple[Demand, int]], world: World) -> Totals:
    """Return the totals of all demands. `wanted` has pairs of a demand and the number of tasks with it; gangs
    count with all ranks."""
    devices = [ledger.device for ledger in world.ledgers.values()]
    gpus = whole = gpu_mb = memory_mb = 0
    cpu = 0.0
    for part, count in _parts(wanted).items():
        gpus += count * part.gpus
        whole += count * part.gpus * part.takes_whole_devices
        gpu_mb += count * part.gpus * _shared_mb(part, devices)
        cpu += count * part.cpu
        memory_mb += count * part.memory_mb
    return Totals(gpus, gpu_mb, round(cpu, 6), memory_mb, whole)


def _shared_mb(part: Demand, devices: Sequence[Device]) -> int:
    """Return the MiB of each shared device that the demand takes. A fraction counts as a fraction of the
    largest device that the demand may use; 0 if it may use none."""
    if not part.gpus or part.takes_whole_devices:
        return 0
    return part.gpu_mb or max((need_mb(part, device) or 0 for device in devices), default=0)


def free_capacity(draft: Draft) -> FreeCapacity:
    """Return the capacity of usable nodes that is neither leased nor pledged."""
    devices: list[tuple[DeviceKey, Mib]] = []
    cpu, memory_mb = 0.0, 0
    for node in sorted(draft.usable_nodes()):
        room = draft.headroom(node)
        cpu += max(0.0, room.cpu)
        memory_mb += max(0, room.memory_mb)
        for ledger in draft.ledgers_on(node):
            if ledger.device.offers and (free := ledger.offered_mb()) > 0:
                devices.append((ledger.device.key, Mib(free)))
    return FreeCapacity(tuple(devices), round(cpu, 6), memory_mb)


def shortage_of(unplaced: Iterable[tuple[Demand, int]], left: FreeCapacity, world: World) -> Missing:
    """Return the least capacity that would have to be added for the demands in `unplaced`, however it is
    spread over nodes."""
    wanted = _parts(unplaced)
    devices_known = [ledger.device for ledger in world.ledgers.values()]
    usable = {
        part: [device for device in devices_known if may_use_device(part, device)]
        for part in wanted
        if part.gpus
    }
    free = dict(left.devices)
    gpus: dict[tuple[str, ...], tuple[int, int]] = {}
    # Demands with the fewest usable devices take what is left of them first.
    for part, devices in sorted(usable.items(), key=lambda item: len(item[1])):
        whole, mb = _taken_from(free, part, wanted[part] * part.gpus, devices)
        before = gpus.get(part.where.kinds, (0, 0))
        gpus[part.where.kinds] = before[0] + whole, before[1] + mb
    cpu = sum(count * part.cpu for part, count in wanted.items())
    memory_mb = sum(count * part.memory_mb for part, count in wanted.items())
    return Missing(
        tuple(MissingGpus(kinds, *amounts) for kinds, amounts in sorted(gpus.items()) if any(amounts)),
        round(max(0.0, cpu - left.cpu), 6),
        max(0, memory_mb - left.memory_mb),
    )


def _taken_from(
    free: dict[DeviceKey, Mib], part: Demand, count: int, devices: list[Device]
) -> tuple[int, int]:
    """Take `count` devices, or their MiB, out of `free`. Return (devices, MiB) that are missing."""
    if part.takes_whole_devices:
        whole = [
            device.key for device in devices if free.get(device.key, 0) >= max(1, device.allocatable_mb)
        ][:count]
        for key in whole:
            del free[key]
        return count - len(whole), 0
    mb_each = max((need_mb(part, device) or 0 for device in devices), default=0) or part.gpu_mb or 0
    lacking = count * mb_each
    for device in devices:
        taken = min(lacking, free.get(device.key, 0))
        if taken:
            free[device.key] = Mib(free[device.key] - taken)
            lacking -= taken
    return 0, lacking


def _parts(wanted: Iterable[tuple[Demand, int]]) -> Counter[Demand]:
    """Count the equal demands, each rank of a gang as a task of its own."""
    parts: Counter[Demand] = Counter()
    for demand, count in wanted:
        for part in demand.bundles or (demand,):
            parts[part] += count
    return parts


MAX_RUNS = 10_000
"""The run slots of a node that is only planned: more than any plan uses."""


class Machine(Struct, frozen=True):
    """One node of a fleet that is only planned."""

    node: Node
    gpus: tuple[tuple[str, Mib], ...] = ()
    """(kind, MiB that may be leased) of each GPU."""


def fleet_of(machines: Iterable[Machine], kinds: Iterable[GpuKind], now: Instant) -> World:
    """Return a World with these machines, on which nothing runs and whose devices were just measured."""
    world, all_kinds = World(), tuple(kinds)
    for machine in machines:
        node = machine.node.name
        world.add_node(machine.node)
        for index, (reported, mb) in enumerate(machine.gpus):
            key, kind = device_key("plan", node, f"gpu{index}"), kind_of(reported, all_kinds)
            power, context_mb = (kind.power, Mib(kind.context_mb)) if kind else (0, Mib(0))
            device = Device(key, node, f"gpu{index}", reported, index, mb, power=power, context_mb=context_mb)
            world.add_device(device)
            world.measure([DeviceSample(key, now, Mib(0))])
    return world
