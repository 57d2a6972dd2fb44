"""The table of metrics: the name, the meaning, the labels and the reader of each. Durations are counted as
they occur; all other values are read at each scrape. No task is a label, and the cost of a scrape does not
grow with the queue."""

from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from typing import Final

from gpubroker_server.core.control.log_growth import LogGrowth
from gpubroker_server.core.domain.task import TERMINAL, TaskState
from gpubroker_server.core.domain.units import MIB_BYTES
from gpubroker_server.core.world.ledger import DeviceLedger
from gpubroker_server.core.world.task_counts import live_tasks, models_by_state, oldest_queued, pending_tasks
from gpubroker_server.core.world.tenant_accounts import guarantees
from gpubroker_server.ports.last_values import LeaderSeen
from gpubroker_server.ports.store import HeldBack
from gpubroker_server.telemetry import fleet, inferences, nodes
from gpubroker_server.telemetry.exposition import DurationCollector, Metric, Samples
from gpubroker_server.telemetry.table import (
    GPU,
    MAX_TENANTS,
    LaneRow,
    MetricRow,
    Scrape,
    ServerRow,
    Sources,
    a_counter,
)

REQUEST_SECONDS = "gpubroker_http_request_duration_seconds"
WAIT_SECONDS = "gpubroker_model_wait_seconds"
CALL_SECONDS = "gpubroker_grpc_call_duration_seconds"

_RELEASE = version("gpubroker-server")
_TENANT = ("tenant",)
_METHODS = frozenset({"GET", "POST", "PATCH", "DELETE", "PUT", "HEAD", "OPTIONS"})


def _tasks(scrape: Scrape) -> Samples:
    return [((state.value, band), count) for (state, band), count in live_tasks(scrape.world).items()]


def _models(scrape: Scrape) -> Samples:
    models, bases = models_by_state(scrape.world)
    return [
        (("server",), bases),
        *(((state.value,), models[state]) for state in TaskState if state not in TERMINAL),
    ]


def _oldest_seconds(scrape: Scrape) -> Samples:
    oldest = oldest_queued(scrape.world)
    return [((band,), max(0.0, scrape.now - since)) for band, since in oldest.items()]


def _workers(scrape: Scrape) -> Samples:
    sets = scrape.world.worker_sets
    wanted, running = sum(workers.count for workers in sets.values()), sets.running(scrape.world.tasks)
    return [(("wanted",), wanted), (("running",), running)]


def _per_gpu(name: str, about: str, read: Callable[[DeviceLedger], float | None]) -> MetricRow:
    def samples(scrape: Scrape) -> Samples:
        values = ((labels, read(ledger)) for labels, ledger in scrape.ledgers)
        return [(labels, value) for labels, value in values if value is not None]

    return MetricRow(name, about, GPU, samples)


def _used_bytes(ledger: DeviceLedger) -> int | None:
    return None if ledger.sample is None else ledger.sample.used_mb * MIB_BYTES


def _stranded_bytes(scrape: Scrape) -> Samples:
    stranded = scrape.fragmentation[0].devices
    return [
        (labels, stranded[ledger.device.key].stranded_mb * MIB_BYTES)
        for labels, ledger in scrape.ledgers
        if ledger.device.key in stranded
    ]


def _scattered(scrape: Scrape) -> Samples:
    demand = scrape.fragmentation[1]
    return [((), 0 if demand is None else demand.waiting)]


def _guaranteed_bytes(scrape: Scrape) -> Samples:
    known = guarantees(scrape.policy, (tenant for tenant, _ in scrape.tenants), MAX_TENANTS)
    return [((tenant,), mb * MIB_BYTES) for tenant, mb in known.items()]


def _used_byte_seconds(scrape: Scrape) -> Samples:
    accounts = scrape.world.accounts
    return [((tenant,), accounts.used(tenant, scrape.now) * MIB_BYTES) for tenant, _ in scrape.tenants]


def _of_leader(name: str, about: str, read: Callable[[LeaderSeen], float]) -> MetricRow:
    """Return a metric of the leader. It is left out if no leader is known."""
    return MetricRow(
        name, about, (), lambda scrape: None if scrape.leader is None else [((), read(scrape.leader))]
    )


def _of_database(name: str, about: str, read: Callable[[HeldBack], float]) -> MetricRow:
    return MetricRow(
        name, about, (), lambda scrape: [((), read(scrape.held_back))] if scrape.held_back else []
    )


def _of_log(name: str, about: str, read: Callable[[LogGrowth], float]) -> MetricRow:
    def samples(scrape: Scrape) -> Samples | None:
        log = scrape.sources.database_log()
        return None if log is None else [((), read(log))]

    return MetricRow(name, about, (), samples)


def _of_lanes(name: str, about: str, column: int) -> MetricRow:
    """Return a metric of lanes. Only models that requests name have a lane."""

    def samples(scrape: Scrape) -> Samples | None:
        return None if scrape.lanes is None else [((row[0],), float(row[column])) for row in scrape.lanes]

    return MetricRow(name, about, ("model",), samples)


def _of_server(row: ServerRow) -> Iterable[tuple[tuple[str, str], bool, int]]:
    """Yield the labels of each protocol of a model server, True if the protocol is used, and its number of
    faults."""
    return (((row.name, protocol), up, faults) for protocol, up, faults in row.ways)


def _of_servers(read: Callable[[ServerRow], Samples]) -> Callable[[Scrape], Samples | None]:
    return lambda scrape: (
        None if scrape.servers is None else [sample for row in scrape.servers for sample in read(row)]
    )


_TASKS: Final = (
    MetricRow(
        "gpubroker_build_info", "Always 1; what runs here.", ("version",), lambda _: [((_RELEASE,), 1)]
    ),
    MetricRow("gpubroker_tasks", "Tasks that are not finished.", ("state", "band"), _tasks),
    MetricRow(
        "gpubroker_pending_tasks",
        "Pending tasks by the reason that is known without planning.",
        ("reason",),
        lambda scrape: [((reason,), count) for reason, count in pending_tasks(scrape.world).items()],
    ),
    MetricRow(
        "gpubroker_pending_oldest_seconds",
        "Time since the submit of the oldest task that is queued.",
        ("band",),
        _oldest_seconds,
    ),
    MetricRow(
        "gpubroker_workers",
        "Workers of sets: `wanted`, and those that are `running`.",
        ("state",),
        _workers,
    ),
    MetricRow(
        "gpubroker_models",
        "Models in the ledger that are wanted or loaded, which are no tasks; `server`: servers' base costs.",
        ("state",),
        _models,
    ),
    a_counter(
        "gpubroker_tasks_finished",
        "Tasks that ever finished; survives pruning.",
        ("state",),
        lambda scrape: [((state.value,), scrape.finished[state]) for state in sorted(TERMINAL)],
    ),
    a_counter(
        "gpubroker_preemptions",
        "Tasks and models that made room since this process started.",
        ("holder",),
        lambda scrape: [((holder,), scrape.world.preempted[holder]) for holder in ("task", "model")],
    ),
)

_DEVICES: Final = (
    MetricRow(
        "gpubroker_gpu_info",
        "Always 1; what each device is.",
        (*GPU, "kind"),
        lambda scrape: [((*labels, ledger.device.kind), 1) for labels, ledger in scrape.ledgers],
    ),
    _per_gpu(
        "gpubroker_gpu_memory_capacity_bytes",
        "Physical memory of the device.",
        lambda ledger: ledger.device.physical_mb * MIB_BYTES,
    ),
    _per_gpu(
        "gpubroker_gpu_memory_leased_bytes",
        "Memory that is leased.",
        lambda ledger: ledger.leased_mb() * MIB_BYTES,
    ),
    _per_gpu(
        "gpubroker_gpu_memory_quarantined_bytes",
        "Leased to holders not confirmed gone.",
        lambda ledger: ledger.quarantined_mb() * MIB_BYTES,
    ),
    _per_gpu("gpubroker_gpu_memory_used_bytes", "Memory in use, as last measured.", _used_bytes),
    _per_gpu(
        "gpubroker_gpu_memory_overused_bytes",
        "Memory that runs use beyond their leases.",
        lambda ledger: (ledger.held_mb() - ledger.leased_mb()) * MIB_BYTES,
    ),
    _per_gpu(
        "gpubroker_gpu_memory_foreign_bytes",
        "Memory in use that no lease explains.",
        lambda ledger: (ledger.foreign_mb + ledger.unexplained_mb) * MIB_BYTES,
    ),
    _per_gpu(
        "gpubroker_gpu_memory_free_bytes",
        "Memory that a task without a pledge could take now.",
        lambda ledger: ledger.offered_mb() * MIB_BYTES,
    ),
    MetricRow(
        "gpubroker_gpu_memory_stranded_bytes",
        "Free memory that the usual demands cannot use.",
        GPU,
        _stranded_bytes,
    ),
    MetricRow(
        "gpubroker_gpu_memory_scattered",
        "Waiting tasks of the most frequent demand, if their memory is free in sum but not in one piece.",
        (),
        _scattered,
    ),
    _per_gpu(
        "gpubroker_gpu_utilization_ratio",
        "Share of time the device computed, as last measured.",
        lambda ledger: None if ledger.sample is None else ledger.sample.utilization,
    ),
)

_TENANTS: Final = (
    MetricRow(
        "gpubroker_tenant_held_bytes",
        "GPU memory that the tenant holds, until it is confirmed free.",
        _TENANT,
        lambda scrape: [((tenant,), mb * MIB_BYTES) for tenant, mb in scrape.tenants],
    ),
    MetricRow(
        "gpubroker_tenant_guaranteed_bytes",
        "GPU memory that the tenant is guaranteed.",
        _TENANT,
        _guaranteed_bytes,
    ),
    MetricRow(
        "gpubroker_tenant_usage_byte_seconds",
        "Memory held times seconds, with a half-life.",
        _TENANT,
        _used_byte_seconds,
    ),
)

_FORECASTS: Final = (
    MetricRow(
        "gpubroker_forecast_error_seconds",
        "Median difference between the first forecast of a start and the start, by the forecast's basis.",
        ("basis",),
        lambda scrape: [((forecast.basis,), forecast.median_error_seconds) for forecast in scrape.forecasts],
    ),
    MetricRow(
        "gpubroker_forecast_within_p90_ratio",
        "Share of forecast tasks that started by the p90; 0.9 is right.",
        ("basis",),
        lambda scrape: [((forecast.basis,), forecast.within_p90) for forecast in scrape.forecasts],
    ),
)

_MODELS: Final = (
    MetricRow(
        "gpubroker_model_server_up",
        "1 if a model server is used, 0 after several failures in a row.",
        ("server", "protocol"),
        _of_servers(lambda row: [(labels, up) for labels, up, _ in _of_server(row)]),
    ),
    MetricRow(
        "gpubroker_model_server_requests_in_flight",
        "Requests sent to a model server without a response yet.",
        ("server",),
        _of_servers(lambda row: [((row.name,), float(row.in_flight))]),
    ),
    a_counter(
        "gpubroker_model_server_faults",
        "Calls of a model server that were refused, broke off or timed out.",
        ("server", "protocol"),
        _of_servers(lambda row: [(labels, float(faults)) for labels, _, faults in _of_server(row)]),
    ),
    a_counter(
        "gpubroker_model_server_requests_passed_on",
        "Requests that were sent to another server after a failure.",
        ("server",),
        _of_servers(lambda row: [((row.name,), float(row.passed_on))]),
    ),
    MetricRow(
        "gpubroker_model_size_ratio",
        "Median ratio of leased to measured memory of models.",
        ("server",),
        lambda scrape: [((size.server,), size.ratio) for size in scrape.model_sizes],
    ),
    MetricRow(
        "gpubroker_model_size_enough_ratio",
        "Share of models that use no more than their lease.",
        ("server",),
        lambda scrape: [((size.server,), size.enough) for size in scrape.model_sizes],
    ),
    _of_lanes("gpubroker_model_slots", "Requests that a model gets at once.", 1),
    _of_lanes("gpubroker_model_requests_in_flight", "Requests that have a slot.", 2),
    _of_lanes("gpubroker_model_requests_waiting", "Requests that wait for a slot.", 3),
)

_SERVICE: Final = (
    MetricRow(
        "gpubroker_event_log_position",
        "Position of the last event this process has applied.",
        (),
        lambda scrape: [((), scrape.world.position)],
    ),
    MetricRow(
        "gpubroker_world_age_seconds",
        "Seconds since the World was last known to be current.",
        (),
        lambda scrape: [((), scrape.sources.age_seconds())],
    ),
    _of_database(
        "gpubroker_database_oldest_transaction_seconds",
        "Age of the database's oldest transaction.",
        lambda held_back: held_back.transaction_seconds,
    ),
    _of_database(
        "gpubroker_database_oldest_slot_transactions",
        "Transactions since the oldest that a replication slot keeps rows for.",
        lambda held_back: held_back.slot_transactions,
    ),
    _of_log(
        "gpubroker_database_log_bytes",
        "Size of SQLite's write-ahead log, or of what PostgreSQL keeps of its own for a replication slot.",
        lambda log: log.size_bytes,
    ),
    _of_log(
        "gpubroker_database_log_grown_bytes",
        "By how much that has grown since it was last shortened.",
        lambda log: log.grown_bytes,
    ),
    MetricRow(
        "gpubroker_event_streams",
        "Event streams that are open at this gateway.",
        (),
        lambda scrape: [((), float(scrape.sources.event_streams()))],
    ),
    MetricRow(
        "gpubroker_disk_full",
        "1 if a disk that this process writes to is full, else 0.",
        (),
        lambda scrape: [((), bool(scrape.sources.disk_full()))],
    ),
    a_counter(
        "gpubroker_extension_events",
        "Events that extensions of this process got, by what became of them.",
        ("extension", "outcome"),
        lambda scrape: [
            ((row.name, outcome), float(count))
            for row in scrape.sources.extensions()
            for outcome, count in zip(row._fields[1:], row[1:], strict=True)
        ],
    ),
    MetricRow(
        "gpubroker_leader_known",
        "1 if this process leads or hears of the process that does, else 0.",
        (),
        lambda scrape: [((), scrape.leader is not None)],
    ),
    _of_leader("gpubroker_leader_term", "Term of the known leader.", lambda leader: leader.term),
    _of_leader(
        "gpubroker_leader_lease_seconds",
        "Seconds that the known leader's lease had left when it said so.",
        lambda leader: leader.lease_seconds,
    ),
    _of_leader(
        "gpubroker_silent_nodes",
        "Silent nodes that are not given up; absent without a known leader.",
        lambda leader: 0 if leader.paused is None else len(leader.paused.nodes),
    ),
)

METRICS: Final[tuple[MetricRow, ...]] = (
    *_TASKS,
    *_DEVICES,
    *nodes.METRICS,
    *fleet.LOOKED,
    *fleet.FOR_AUTOSCALERS,
    *_TENANTS,
    *_FORECASTS,
    *inferences.METRICS,
    *_MODELS,
    *_SERVICE,
)

HISTOGRAMS: Final[Mapping[str, tuple[str, ...]]] = {
    REQUEST_SECONDS: ("method", "route", "status"),
    CALL_SECONDS: ("method", "code"),
    WAIT_SECONDS: (),
    inferences.WAIT_SECONDS: (),
}
"""The labels of each histogram, by its name."""


class Telemetry:
    """The metrics of one app. Two apps in one process have separate values."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._held_back: HeldBack | None = None
        self._lanes: Callable[[], Iterable[LaneRow]] | None = None
        self._servers: Callable[[], Iterable[ServerRow]] | None = None
        requests = DurationCollector(
            REQUEST_SECONDS, "Time to answer, by route template.", HISTOGRAMS[REQUEST_SECONDS]
        )
        calls = DurationCollector(
            CALL_SECONDS, "Time to the end of a call over gRPC.", HISTOGRAMS[CALL_SECONDS]
        )
        waits = DurationCollector(WAIT_SECONDS, "Time that requests waited for a slot, if they had to.", ())
        self._durations = (requests, calls, waits)
        self._note_request, self._note_call, self._note_wait = requests.note, calls.note, waits.note

    def note_held_back(self, held_back: HeldBack | None) -> None:
        """Set the values of the database for the next scrape, which does not wait for the database."""
        self._held_back = held_back

    def on_request(self, method: str, route: str, status: int, seconds: float) -> None:
        self._note_request((method if method in _METHODS else "other", route, status), seconds)

    def on_call(self, method: str, code: str, seconds: float) -> None:
        self._note_call((method, code), seconds)

    def on_waited(self, seconds: float) -> None:
        self._note_wait((), seconds)

    def show_lanes(self, read: Callable[[], Iterable[LaneRow]]) -> None:
        self._lanes = read

    def show_servers(self, read: Callable[[], Iterable[ServerRow]]) -> None:
        self._servers = read

    def metrics(self) -> list[Metric]:
        """Read all metrics, for `text_of`."""
        lanes = None if self._lanes is None else list(self._lanes())
        servers = None if self._servers is None else list(self._servers())
        scrape = Scrape(self._sources, self._held_back, lanes, servers)
        read = [metric for row in METRICS if (metric := row.metric(scrape)) is not None]
        waits = inferences.wait_metric(self._sources.world)
        return [*read, waits, *(durations.metric() for durations in self._durations)]
