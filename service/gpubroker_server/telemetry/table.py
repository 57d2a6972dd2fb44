"""The rows of the table of metrics, and the values that their readers use at a scrape."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

from gpubroker.wire.forecasts import ForecastsKept
from gpubroker.wire.stats import Scattered
from msgspec import Struct

from gpubroker_server.core.control.fleet import FleetSeen
from gpubroker_server.core.control.log_growth import LogGrowth
from gpubroker_server.core.domain.device import Device, NodeSample
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import DeviceKey, Instant
from gpubroker_server.core.explain.autoscaling import AutoscalingDemand, autoscaling_demand
from gpubroker_server.core.lifecycle.learning import SizeAccuracy, size_accuracies
from gpubroker_server.core.planning.forecasts.forecast_rounds import forecast_accuracies
from gpubroker_server.core.planning.fragmentation import Fragmentation
from gpubroker_server.core.world.ledger import DeviceLedger
from gpubroker_server.core.world.task_counts import finished_tasks
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.last_values import LeaderSeen
from gpubroker_server.ports.store import HeldBack
from gpubroker_server.telemetry.exposition import LabelNames, Metric, Samples, counter, gauge

GPU = ("gpu", "UUID", "hostname")
"""The labels of a GPU. They are spelled as by dcgm-exporter, so that metrics of both join on UUID without
relabelling."""
MAX_TENANTS = 100
"""The number of tenants that metrics show, which are those that hold most. GET /tenants shows all."""

LaneRow = tuple[str, int, int, int]
"""(the model, its slots, the requests that have a slot, the requests that wait for one)"""


class ServerRow(NamedTuple):
    """One model server."""

    name: str
    ways: Sequence[tuple[str, bool, int]]
    """(the protocol, True if it is used, the number of its faults)"""
    in_flight: int
    passed_on: int


class ExtensionRow(NamedTuple):
    """The events of one extension of this process, by what became of them."""

    name: str
    delivered: int
    failed: int
    dropped: int


class Sources(Struct, frozen=True):
    """The sources that a scrape reads."""

    world: World
    age_seconds: Callable[[], float]
    leader: Callable[[], LeaderSeen | None]
    """Returns the status that the leader last published, so that every gateway shows equal values."""
    policy: Policy
    now: Callable[[], Instant]
    fragmentation: Callable[[], tuple[Fragmentation, Scattered | None]]
    disk_full: Callable[[], str]
    database_log: Callable[[], LogGrowth | None]
    event_streams: Callable[[], int]
    """Returns the number of open event streams."""
    extensions: Callable[[], Sequence[ExtensionRow]] = tuple


class Scrape:
    """The values that the metrics of one scrape show. A value that several metrics show is computed once,
    when it is first needed."""

    def __init__(
        self,
        sources: Sources,
        held_back: HeldBack | None,
        lanes: Sequence[LaneRow] | None,
        servers: Sequence[ServerRow] | None,
    ) -> None:
        self.sources = sources
        self.world, self.policy, self.now = sources.world, sources.policy, sources.now()
        self.leader = sources.leader()
        self.held_back = held_back
        self.lanes, self.servers = lanes, servers
        """The lanes and the servers; None in a process without any."""

    @property
    def fleet(self) -> FleetSeen | None:
        """The state of the fleet; None before a leader has examined it."""
        return None if self.leader is None else self.leader.fleet

    @cached_property
    def ledgers(self) -> list[tuple[tuple[str, ...], DeviceLedger]]:
        """The devices, each with the label values of GPU."""
        return [(gpu_labels(ledger.device), ledger) for _, ledger in sorted(self.world.ledgers.items())]

    @cached_property
    def offered(self) -> list[tuple[tuple[str, ...], DeviceKey]]:
        """The devices that are offered to tasks, each with the label values of GPU."""
        return [(labels, ledger.device.key) for labels, ledger in self.ledgers if ledger.device.offers]

    @cached_property
    def fresh_nodes(self) -> list[NodeSample]:
        """The samples of nodes that are not stale."""
        period_seconds = self.policy.sample_period_seconds
        samples = (sample for _, sample in sorted(self.world.node_samples.items()))
        return [sample for sample in samples if not sample.is_stale(self.now, period_seconds)]

    @cached_property
    def finished(self) -> dict[TaskState, int]:
        return finished_tasks(self.world)

    @cached_property
    def tenants(self) -> list[tuple[str, int]]:
        """The tenants that hold most, and the MiB that each holds."""
        return self.world.accounts.largest(MAX_TENANTS)

    @cached_property
    def forecasts(self) -> list[ForecastsKept]:
        return forecast_accuracies(self.world)

    @cached_property
    def model_sizes(self) -> list[SizeAccuracy]:
        return size_accuracies(self.world)

    @cached_property
    def fragmentation(self) -> tuple[Fragmentation, Scattered | None]:
        return self.sources.fragmentation()

    @cached_property
    def autoscaling(self) -> AutoscalingDemand:
        return autoscaling_demand(self.world, self.policy, self.now)


class MetricRow(NamedTuple):
    """A metric. It is left out of a scrape if `read` returns None."""

    name: str
    about: str
    labels: LabelNames
    read: Callable[[Scrape], Samples | None]
    is_counter: bool = False
    """True for a counter. `_total` is appended to its name when it is written."""

    def metric(self, scrape: Scrape) -> Metric | None:
        samples = self.read(scrape)
        if samples is None:
            return None
        make = counter if self.is_counter else gauge
        return make(self.name, self.about, self.labels, samples)


def a_counter(
    name: str, about: str, labels: LabelNames, read: Callable[[Scrape], Samples | None]
) -> MetricRow:
    return MetricRow(name, about, labels, read, is_counter=True)


def gpu_labels(device: Device) -> tuple[str, ...]:
    """Return the label values of GPU for a device."""
    return str(device.index), device.uuid, device.node
