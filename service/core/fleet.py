"""Whether a set of components fits a fleet: where each goes, what is missing, and whom it would displace."""

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace

from service.core.backfill import Forecast
from service.core.demand import Demand
from service.core.device import Device, DeviceSample, Node
from service.core.draft import Draft
from service.core.kinds import Kind, kind_of
from service.core.lease import HolderKind, Lease
from service.core.policy import Policy
from service.core.task import Placement, Task, TaskState
from service.core.trial import Planner
from service.core.units import DeviceKey, Fence, Instant, Mib, NodeName, TaskId, device_key
from service.core.world import World


@dataclass(frozen=True, slots=True)
class Component:
    """So many tasks of one demand, all to run at once."""

    name: str
    count: int
    demand: Demand
    priority: int
    apart: tuple[Demand, ...] = ()
    """What its roles ask for, if they take turns in one process; without colocation each runs by itself."""


@dataclass(frozen=True, slots=True)
class Placed:
    component: str
    place: Placement
    displaced: tuple[TaskId, ...] = ()
    """Runs that would have to leave first."""


@dataclass(frozen=True, slots=True)
class Totals:
    gpus: int
    """Devices that are used, whole or in part, one for each part."""
    whole_gpus: int
    gpu_mb: int
    """Of those that are not whole."""
    cpu: float
    memory_mb: int


@dataclass(frozen=True, slots=True)
class FleetPlan:
    placed: tuple[Placed, ...]
    missing: dict[str, int]
    """Component -> how many of it have no place."""
    displaced: tuple[Task, ...]
    totals: Totals
    totals_apart: Totals
    """Without colocation."""

    @property
    def fits(self) -> bool:
        return not self.missing


@dataclass(frozen=True, slots=True)
class Machine:
    """One node of a fleet that need not exist."""

    name: str
    cpu: float
    memory_mb: Mib
    gpus: tuple[tuple[str, Mib], ...] = ()
    """(kind, MiB that may be leased) of each."""
    labels: tuple[tuple[str, str], ...] = ()


def fleet_of(machines: Iterable[Machine], kinds: Iterable[Kind], now: Instant) -> World:
    """A World of these machines, empty and just measured."""
    world, known = World(), tuple(kinds)
    for machine in machines:
        node = NodeName(machine.name)
        world.add_node(Node(node, machine.cpu, machine.memory_mb, 10_000, "", "", labels=machine.labels))
        for index, (reported, size) in enumerate(machine.gpus):
            key, kind = device_key("plan", node, f"gpu{index}"), kind_of(reported, known)
            power, context_mb = (kind.power, kind.context_mb) if kind else (0, Mib(0))
            device = Device(
                key, node, f"gpu{index}", reported, index, size, power=power, context_mb=context_mb
            )
            world.add_device(device)
            world.measure([DeviceSample(key, now, Mib(0))])
    return world


def plan_fleet(
    world: World,
    components: Sequence[Component],
    tenant: str,
    policy: Policy,
    now: Instant,
    forecasts: Sequence[Forecast] = (),
) -> FleetPlan:
    """All of `planning` at once."""
    steps = planning(world, components, tenant, policy, now, forecasts)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            plan: FleetPlan = end.value
            return plan


def planning(
    world: World,
    components: Sequence[Component],
    tenant: str,
    policy: Policy,
    now: Instant,
    forecasts: Sequence[Forecast] = (),
) -> Generator[None, None, FleetPlan]:
    """Place all components beside what runs, the hardest to place first. Changes nothing.

    What finds no room displaces runs of lower priority as a task would; of those nobody else need leave for
    the same component. Of what waits in the queue only the `forecasts` count, which keep room.
    Pauses after each task; the World must not change meanwhile.
    """
    draft = Draft(world)
    planner = Planner(draft, policy, now, forecasts)
    placed: list[Placed] = []
    displaced: dict[TaskId, Task] = {}
    missing: dict[str, int] = {}
    for component in sorted(components, key=_hardness):
        for number in range(component.count):
            task = _task(component, number, tenant, now)
            found = _put(draft, planner, task, displaced)
            if found is None:
                missing[component.name] = component.count - number
                break
            placed.append(replace(found, component=component.name))
            yield
    runs = tuple(displaced[name] for name in sorted(displaced))
    apart = [(role, it.count) for it in components for role in it.apart or (it.demand,)]
    together = [(it.demand, it.count) for it in components]
    return FleetPlan(tuple(placed), missing, runs, _totals(together), _totals(apart))


def _put(draft: Draft, planner: Planner, task: Task, displaced: dict[TaskId, Task]) -> Placed | None:
    trial = planner.attempt(task)
    victims = () if trial.eviction is None else trial.eviction.victims
    for victim in victims:
        draft.dismiss(victim)
        displaced[victim.id] = victim
    if victims:
        trial = planner.attempt(task)
    if trial.places is None:
        return None
    [place] = trial.places
    _occupy(draft, task, place)
    return Placed("", place, tuple(victim.id for victim in victims))


def _occupy(draft: Draft, task: Task, place: Placement) -> None:
    runs = replace(task, state=TaskState.ADMITTED, fence=Fence(1), node=place.node)
    draft.replace_task(task, runs)
    for device, mb in place.devices:
        draft.put_lease(_lease(runs, device, mb))


def _lease(task: Task, device: DeviceKey, mb: Mib) -> Lease:
    since = task.submitted_at
    return Lease(HolderKind.RUN, task.id, task.fence, device, mb, task.tenant, task.priority, since)


def _task(component: Component, number: int, tenant: str, now: Instant) -> Task:
    name = f"{component.name} {number + 1}"
    return Task(TaskId(f"plan:{name}"), tenant, name, component.priority, component.demand, now)


def _hardness(component: Component) -> tuple[int, float, float, str]:
    """Higher priority first, so that nobody displaces what was just placed; then what needs most."""
    demand = component.demand
    size = float("inf") if demand.takes_whole_devices else demand.gpu_mb or (demand.gpu_fraction or 0) * 2**20
    return -component.priority, -demand.gpus * size if demand.gpus else 0.0, -demand.cpu, component.name


def _totals(wanted: Iterable[tuple[Demand, int]]) -> Totals:
    gpus = whole = gpu_mb = memory_mb = 0
    cpu = 0.0
    for demand, count in wanted:
        gpus += count * demand.gpus
        whole += count * demand.gpus * demand.takes_whole_devices
        gpu_mb += count * demand.gpus * (0 if demand.takes_whole_devices else demand.gpu_mb or 0)
        cpu += count * demand.cpu
        memory_mb += count * demand.memory_mb
    return Totals(gpus, whole, gpu_mb, round(cpu, 6), memory_mb)
