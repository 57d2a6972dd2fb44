"""Names of metrics, labels and log fields. Durations are counted here, the rest is read at each scrape."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from importlib.metadata import version
from itertools import chain
from typing import NamedTuple

from gpubroker_server.core.domain.estimates import What
from gpubroker_server.core.domain.lease import LeaseState
from gpubroker_server.core.domain.policy import Policy, band_of
from gpubroker_server.core.domain.task import TERMINAL, TaskState
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.explain.autoscaling import autoscaling_demand
from gpubroker_server.core.lifecycle.learning import size_accuracies
from gpubroker_server.core.planning.forecasts.forecast_rounds import accuracy_topic
from gpubroker_server.core.planning.forecasts.reservations import Basis
from gpubroker_server.core.planning.fragmentation import Fragmentation, ScatteredDemand
from gpubroker_server.core.world.ledger import DeviceLedger
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.last_values import LeaderSeen
from gpubroker_server.ports.store import HeldBack
from gpubroker_server.telemetry import fleet, inferences, nodes
from gpubroker_server.telemetry.durations import DurationCollector
from gpubroker_server.telemetry.exposition import Metric, counter, gauge
from gpubroker_server.telemetry.nodes import GPU, Read

_RELEASE = version("gpubroker-server")

_MIB = 1024 * 1024
_TENANT = ("tenant",)
MOST_TENANTS = 100
"""Metrics show the tenants that hold most; GET /tenants shows all."""

GAUGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "gpubroker_build_info": ("Always 1; what runs here.", ("version",)),
    "gpubroker_tasks": ("Tasks that are not finished.", ("state", "band")),
    "gpubroker_pending_tasks": ("Pending tasks by the reason that is known without planning.", ("reason",)),
    "gpubroker_pending_oldest_seconds": (
        "Time since the submit of the oldest task that is queued.",
        ("band",),
    ),
    "gpubroker_workers": ("Workers of sets: `wanted`, and those that are `running`.", ("state",)),
    **nodes.GAUGES,
    **fleet.GAUGES,
    "gpubroker_silent_nodes": ("Silent nodes that are not given up; absent without a known leader.", ()),
    "gpubroker_gpu_info": ("Always 1; what each device is.", (*GPU, "modelName")),
    "gpubroker_gpu_memory_capacity_bytes": ("Physical memory of the device.", GPU),
    "gpubroker_gpu_memory_leased_bytes": ("Memory that is leased.", GPU),
    "gpubroker_gpu_memory_quarantined_bytes": ("Leased to holders not confirmed gone.", GPU),
    "gpubroker_gpu_memory_used_bytes": ("Memory in use, as last measured.", GPU),
    "gpubroker_gpu_memory_overused_bytes": ("Memory that runs use beyond their leases.", GPU),
    "gpubroker_gpu_memory_foreign_bytes": ("Memory in use that no lease explains.", GPU),
    "gpubroker_gpu_memory_free_bytes": ("Memory that a task without a pledge could take now.", GPU),
    "gpubroker_gpu_memory_stranded_bytes": ("Free memory that the usual demands cannot use.", GPU),
    "gpubroker_gpu_memory_scattered": (
        "Waiting tasks of the most frequent demand, if their memory is free in sum but not in one piece.",
        (),
    ),
    "gpubroker_gpu_utilization_ratio": ("Share of time the device computed, as last measured.", GPU),
    "gpubroker_tenant_held_bytes": ("GPU memory that the tenant holds, until it is confirmed free.", _TENANT),
    "gpubroker_tenant_guaranteed_bytes": ("GPU memory that the tenant is guaranteed.", _TENANT),
    "gpubroker_tenant_usage_byte_seconds": ("Memory held times seconds, with a half-life.", _TENANT),
    "gpubroker_event_log_position": ("Position of the last event this process has applied.", ()),
    "gpubroker_forecast_error_seconds": (
        "Median difference between the first forecast of a start and the start, by the forecast's basis.",
        ("basis",),
    ),
    "gpubroker_forecast_within_p90_ratio": (
        "Share of forecast tasks that started by the p90; 0.9 is right.",
        ("basis",),
    ),
    "gpubroker_world_age_seconds": ("Seconds since the World was last known to be current.", ()),
    "gpubroker_database_oldest_transaction_seconds": ("Age of the database's oldest transaction.", ()),
    "gpubroker_database_oldest_slot_transactions": (
        "Transactions since the oldest that a replication slot keeps rows for.",
        (),
    ),
    "gpubroker_model_server_up": (
        "1 if a model server is used, 0 after several failures in a row.",
        ("server", "protocol"),
    ),
    "gpubroker_model_server_requests_in_flight": (
        "Requests sent to a model server without a response yet.",
        ("server",),
    ),
    "gpubroker_model_size_ratio": ("Median ratio of leased to measured memory of models.", ("server",)),
    "gpubroker_model_size_enough_ratio": ("Share of models that use no more than their lease.", ("server",)),
    "gpubroker_model_slots": ("Requests that a model gets at once.", ("model",)),
    "gpubroker_model_requests_in_flight": ("Requests that have a slot.", ("model",)),
    "gpubroker_model_requests_waiting": ("Requests that wait for a slot.", ("model",)),
    **inferences.GAUGES,
    "gpubroker_disk_full": ("1 if a disk that this process writes to is full, else 0.", ()),
    "gpubroker_leader_known": ("1 if this process leads or hears of the process that does, else 0.", ()),
    "gpubroker_leader_term": ("Term of the known leader.", ()),
    "gpubroker_leader_lease_seconds": ("Seconds that the known leader's lease had left when it said so.", ()),
}
COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "gpubroker_tasks_finished": ("Tasks that ever finished; survives pruning.", ("state",)),
    "gpubroker_preemptions": ("Tasks and models that made room since this process started.", ("holder",)),
    **nodes.COUNTERS,
    **fleet.COUNTERS,
    **inferences.COUNTERS,
    "gpubroker_model_server_faults": (
        "Calls of a model server that were refused, broke off or timed out.",
        ("server", "protocol"),
    ),
    "gpubroker_model_server_requests_passed_on": (
        "Requests that were sent to another server after a failure.",
        ("server",),
    ),
}
REQUEST_SECONDS = "gpubroker_http_request_duration_seconds"
WAIT_SECONDS = "gpubroker_model_wait_seconds"
CALL_SECONDS = "gpubroker_grpc_call_duration_seconds"
LaneRow = tuple[str, int, int, int]
"""Model, its slots, requests that have one, requests that wait."""


class ServerRow(NamedTuple):
    """Of one model server."""

    name: str
    ways: Sequence[tuple[str, bool, int]]
    """Protocol, whether it is used, number of faults."""
    in_flight: int
    passed_on: int


_METHODS = frozenset({"GET", "POST", "PATCH", "DELETE", "PUT", "HEAD", "OPTIONS"})


@dataclass(frozen=True, slots=True)
class Sources:
    """Where figures come from at a scrape."""

    world: World
    age_seconds: Callable[[], float]
    leader: Callable[[], LeaderSeen | None]
    """In any process, as it last published itself: every gateway shows the same."""
    policy: Policy
    now: Callable[[], Instant]
    fragmentation: Callable[[], tuple[Fragmentation, ScatteredDemand | None]]
    disk_full: Callable[[], str]


class Telemetry:
    """One per app, so that two apps in one process do not mix their figures."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._held_back: HeldBack | None = None
        self._shown: list[Callable[[], Iterable[Read]]] = []
        requests = DurationCollector(
            REQUEST_SECONDS, "Time to answer, by route template.", ("method", "route", "status")
        )
        calls = DurationCollector(CALL_SECONDS, "Time to the end of a call over gRPC.", ("method", "code"))
        waits = DurationCollector(WAIT_SECONDS, "Time that requests waited for a slot, if they had to.", ())
        self._durations = (requests, calls, waits)
        self._note_request, self._note_call, self._note_wait = requests.note, calls.note, waits.note

    def note_held_back(self, held_back: HeldBack | None) -> None:
        """Call it before a scrape, which does not wait."""
        self._held_back = held_back

    def on_request(self, method: str, route: str, status: int, seconds: float) -> None:
        self._note_request((method if method in _METHODS else "other", route, status), seconds)

    def on_call(self, method: str, code: str, seconds: float) -> None:
        self._note_call((method, code), seconds)

    def on_waited(self, seconds: float) -> None:
        self._note_wait((), seconds)

    def show_lanes(self, read: Callable[[], Iterable[LaneRow]]) -> None:
        """Only models that are asked have metrics: their names come from clients."""
        self._shown.append(lambda: _lane_samples(read()))

    def show_servers(self, read: Callable[[], Iterable[ServerRow]]) -> None:
        self._shown.append(lambda: _server_samples(read()))

    def metrics(self) -> list[Metric]:
        """For `text_of`. The cost grows with what is held and active and with how many demands differ, not
        with the queue. No task is a label."""
        read = chain(_world_samples(self._sources, self._held_back), *(shown() for shown in self._shown))
        waits = inferences.wait_metric(self._sources.world)
        return [*map(_metric, read), waits, *(durations.metric() for durations in self._durations)]


def _world_samples(sources: Sources, held_back: HeldBack | None) -> Iterator[Read]:
    world, now, leader = sources.world, sources.now(), sources.leader()
    yield "gpubroker_build_info", [((_RELEASE,), 1)]
    yield from _task_metrics(world, now)
    yield from _device_metrics(world)
    yield from nodes.node_samples(world, now, sources.policy.sample_period_seconds)
    yield from fleet.fleet_samples(world, None if leader is None else leader.fleet, now)
    yield from fleet.autoscaling_samples(autoscaling_demand(world, sources.policy, now))
    yield from _fragmentation_metrics(world, *sources.fragmentation())
    yield from _tenant_metrics(sources)
    yield from _forecast_metrics(world)
    yield from inferences.inference_samples(world)
    sizes = size_accuracies(world)
    yield "gpubroker_model_size_ratio", [((of.server,), of.ratio) for of in sizes]
    yield "gpubroker_model_size_enough_ratio", [((of.server,), of.enough) for of in sizes]
    yield "gpubroker_event_log_position", [((), world.position)]
    yield "gpubroker_world_age_seconds", [((), sources.age_seconds())]
    known = [] if held_back is None else [held_back]
    yield "gpubroker_database_oldest_transaction_seconds", [((), it.transaction_seconds) for it in known]
    yield "gpubroker_database_oldest_slot_transactions", [((), it.slot_transactions) for it in known]
    yield "gpubroker_disk_full", [((), bool(sources.disk_full()))]
    yield from _leader_metrics(world, leader)


def _lane_samples(rows: Iterable[LaneRow]) -> Iterator[Read]:
    known = list(rows)
    for index, name in enumerate(("slots", "requests_in_flight", "requests_waiting"), 1):
        yield f"gpubroker_model_{name}", [((row[0],), float(row[index])) for row in known]


def _server_samples(rows: Iterable[ServerRow]) -> Iterator[Read]:
    known = list(rows)
    ways = [(row.name, *way) for row in known for way in row.ways]
    yield "gpubroker_model_server_up", [((name, way), up) for name, way, up, _ in ways]
    yield "gpubroker_model_server_requests_in_flight", [((row.name,), float(row.in_flight)) for row in known]
    yield "gpubroker_model_server_faults", [((name, way), float(faults)) for name, way, _, faults in ways]
    yield "gpubroker_model_server_requests_passed_on", [((row.name,), float(row.passed_on)) for row in known]


def _metric(read: Read) -> Metric:
    name, samples = read
    if name in COUNTERS:
        return counter(name, *COUNTERS[name], samples)
    return gauge(name, *GAUGES[name], samples)


def _leader_metrics(world: World, leader: LeaderSeen | None) -> Iterator[Read]:
    """The leader alone hears the nodes: without one nothing is claimed about them."""
    yield "gpubroker_leader_known", [((), leader is not None)]
    if leader is None:
        return
    yield "gpubroker_leader_term", [((), leader.term)]
    yield "gpubroker_leader_lease_seconds", [((), leader.lease_seconds)]
    held_back = () if leader.paused is None else leader.paused.nodes
    yield "gpubroker_silent_nodes", [((), len(held_back))]
    silent = {*leader.silent, *held_back}
    expected = [node for node in world.nodes.values() if node.ready or node.draining_since is None]
    ready = {node.name: node.ready and node.name not in silent for node in expected}
    yield "gpubroker_node_ready", [((name,), is_ready) for name, is_ready in ready.items()]
    agents = leader.executor.get("agents", {})
    faults = {node: len(agent.get("gpu_faults", ())) for node, agent in agents.items()}
    yield "gpubroker_node_gpu_faults", [((node,), count) for node, count in faults.items()]


def _task_metrics(world: World, now: Instant) -> Iterator[Read]:
    queue = world.queue
    waiting: Counter[int] = Counter()
    oldest: dict[str, float] = {}
    for (_tenant, priority, *_alike), group in queue.groups.items():
        waiting[priority] += len(group)
        submitted_at, _task = group.member(0)
        band = band_of(priority)[0]
        oldest[band] = min(submitted_at, oldest.get(band, submitted_at))
    live: Counter[tuple[str, str]] = Counter()
    for priority, count in waiting.items():
        live[TaskState.PENDING.value, band_of(priority)[0]] += count
    for task in (*queue.held, *queue.awaiting, *queue.delayed, *queue.paused, *world.active):
        row = world.tasks[task]
        live[row.state.value, band_of(row.priority)[0]] += 1
    yield "gpubroker_tasks", live.items()
    reasons = {
        "Held": len(queue.held),
        "DependencyPending": len(queue.awaiting),
        "NotBefore": len(queue.delayed),
        "QueuePaused": len(queue.paused),
        "Queued": waiting.total(),
    }
    yield "gpubroker_pending_tasks", [((reason,), count) for reason, count in reasons.items()]
    sets = world.worker_sets
    workers = {"wanted": sum(it.count for it in sets.values()), "running": sets.running(world.tasks)}
    yield "gpubroker_workers", [((state,), count) for state, count in workers.items()]
    ages = [((band,), max(0.0, now - since)) for band, since in oldest.items()]
    yield "gpubroker_pending_oldest_seconds", ages
    preempted = [((holder,), world.preempted[holder]) for holder in ("task", "model")]
    yield "gpubroker_preemptions", preempted
    finished: Counter[str] = Counter()
    for (_tenant, state), count in world.finished.items():
        finished[state.value] += count
    yield "gpubroker_tasks_finished", [((state.value,), finished[state.value]) for state in sorted(TERMINAL)]


def _forecast_metrics(world: World) -> Iterator[Read]:
    """Of each basis with known errors."""
    errors = ((basis, world.learned.sketch(accuracy_topic(basis, What.START_ERROR))) for basis in Basis)
    medians = [((basis.value,), median) for basis, e in errors if (median := e.quantile(0.5)) is not None]
    shares = ((basis, world.learned.sketch(accuracy_topic(basis, What.START_SHARE))) for basis in Basis)
    held = [((basis.value,), share) for basis, s in shares if (share := s.share_until(1.0)) is not None]
    yield "gpubroker_forecast_error_seconds", medians
    yield "gpubroker_forecast_within_p90_ratio", held


def _tenant_metrics(sources: Sources) -> Iterator[Read]:
    accounts, policy = sources.world.accounts, sources.policy
    held = nlargest(MOST_TENANTS, ((accounts.held_mb(tenant), tenant) for tenant in accounts))
    yield "gpubroker_tenant_held_bytes", [((tenant,), mb * _MIB) for mb, tenant in held]
    # Configured tenants come first, to show unused guarantees.
    named = [tenant.name for tenant in policy.tenants if tenant.name != "*"]
    known = list(dict.fromkeys([*named, *(tenant for _, tenant in held)]))[:MOST_TENANTS]
    guaranteed = [(tenant, policy.tenant(tenant).guaranteed_mb) for tenant in known]
    yield "gpubroker_tenant_guaranteed_bytes", [((t,), mb * _MIB) for t, mb in guaranteed if mb is not None]
    now = sources.now()
    used = [((tenant,), accounts.used(tenant, now) * _MIB) for _, tenant in held]
    yield "gpubroker_tenant_usage_byte_seconds", used


def _device_metrics(world: World) -> Iterator[Read]:
    ledgers = [world.ledgers[key] for key in sorted(world.ledgers)]
    labels = {
        ledger.device.key: (str(ledger.device.index), ledger.device.uuid, ledger.device.node)
        for ledger in ledgers
    }
    yield "gpubroker_gpu_info", [((*labels[b.device.key], b.device.kind), 1) for b in ledgers]

    def per_device(name: str, read: Callable[[DeviceLedger], float | None]) -> Read:
        values = ((labels[ledger.device.key], read(ledger)) for ledger in ledgers)
        return name, [(at, value) for at, value in values if value is not None]

    yield per_device("gpubroker_gpu_memory_capacity_bytes", lambda b: b.device.physical_mb * _MIB)
    yield per_device("gpubroker_gpu_memory_leased_bytes", lambda b: b.leased_mb() * _MIB)
    yield per_device("gpubroker_gpu_memory_quarantined_bytes", lambda b: _quarantined_mb(b) * _MIB)
    yield per_device(
        "gpubroker_gpu_memory_used_bytes", lambda b: None if b.sample is None else b.sample.used_mb * _MIB
    )
    yield per_device("gpubroker_gpu_memory_overused_bytes", lambda b: (b.held_mb() - b.leased_mb()) * _MIB)
    yield per_device("gpubroker_gpu_memory_foreign_bytes", lambda b: (b.foreign_mb + b.unexplained_mb) * _MIB)
    yield per_device("gpubroker_gpu_memory_free_bytes", lambda b: max(0, b.free_mb()) * _MIB)
    yield per_device(
        "gpubroker_gpu_utilization_ratio", lambda b: None if b.sample is None else b.sample.utilization
    )


def _fragmentation_metrics(
    world: World, found: Fragmentation, scattered: ScatteredDemand | None
) -> Iterator[Read]:
    devices = [(world.ledgers[key].device, of) for key, of in sorted(found.devices.items())]
    yield (
        "gpubroker_gpu_memory_stranded_bytes",
        [((str(d.index), d.uuid, d.node), of.stranded_mb * _MIB) for d, of in devices],
    )
    yield "gpubroker_gpu_memory_scattered", [((), scattered.waiting if scattered else 0)]


def _quarantined_mb(ledger: DeviceLedger) -> int:
    leases = (holding.lease for holding in ledger.holdings.values())
    return sum(lease.mb for lease in leases if lease.state is LeaseState.QUARANTINED)
