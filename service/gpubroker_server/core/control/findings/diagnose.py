"""Find everything that is wrong with the fleet, from the World and the other known facts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from gpubroker.wire.quarantine import HeldBack

from gpubroker_server.core.control.findings.closed import (
    QuotaLock,
    closed_nodes,
    held_back_nodes,
    paused_queues,
    quarantined_memory,
    quota_locks,
    silent_nodes,
)
from gpubroker_server.core.control.findings.finding import Finding
from gpubroker_server.core.control.findings.gpus import closed_gpus, failing_gpus, held_idle
from gpubroker_server.core.control.findings.nodes import (
    clocks_apart,
    full_disks,
    spilling_stores,
    unreached_nodes,
    unusable_gpus,
    versions_apart,
)
from gpubroker_server.core.control.findings.parts import (
    ServerWay,
    full_service_disk,
    growing_database_log,
    misplaced_servers,
    no_leader,
    unauthorized_servers,
    unreachable_database,
    unreachable_ray,
    unreachable_servers,
)
from gpubroker_server.core.control.findings.work import (
    StuckTask,
    all_on_one_node,
    bottlenecks,
    calls_wait,
    repeated_memory_failures,
    slow_starts,
    waits_for_ever,
)
from gpubroker_server.core.control.fleet import FleetSeen
from gpubroker_server.core.control.log_growth import LogGrowth
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import Instant, NodeName
from gpubroker_server.core.world.world import World


class FleetKnown(NamedTuple):
    """The facts about the fleet that are known besides the World."""

    executor: Mapping[str, Any]
    has_leader: bool
    fleet: FleetSeen = FleetSeen()
    """The fleet as the leader published it."""
    servers_down: Sequence[ServerWay] = ()
    servers_refusing: Sequence[ServerWay] = ()
    """Servers that do not accept the service's credentials."""
    stuck: Sequence[StuckTask] = ()
    age_seconds: float = 0.0
    is_stale: bool = False
    disk_full: str = ""
    late: Mapping[NodeName, Instant] = {}
    """Node whose agent misses heartbeats -> the time at which it was last heard."""
    held_back: HeldBack | None = None
    """The silent nodes that the leader does not give up."""
    held_back_since: Instant | None = None
    """The time since which the leader has not given up these nodes."""
    quota_locks: Sequence[QuotaLock] = ()
    database_log: LogGrowth | None = None
    led_until: Instant | None = None
    """The time at which a leader was last heard, if there is no leader now."""
    servers_misplaced: Mapping[str, str] = {}
    """Servers whose node or GPUs are not as the settings say -> what is wrong."""


def diagnose_fleet(world: World, policy: Policy, known: FleetKnown, now: Instant) -> Iterator[Finding]:
    """Yield the findings about the whole fleet, in no particular order."""
    period = policy.sample_period_seconds
    samples = [sample for sample in world.node_samples.values() if not sample.is_stale(now, period)]
    agents: Mapping[str, Mapping[str, Any]] = known.executor.get("agents") or {}
    of_parts: Iterable[Iterator[Finding]] = (
        no_leader(known.has_leader, known.led_until),
        unreachable_database(known.age_seconds, known.is_stale, now),
        full_service_disk(known.disk_full),
        growing_database_log(known.database_log, now),
        unreachable_ray(known.executor),
        unreachable_servers(known.servers_down),
        unauthorized_servers(known.servers_refusing),
        misplaced_servers(known.servers_misplaced),
    )
    of_fleet: Iterable[Iterator[Finding]] = (
        silent_nodes(world, known.late),
        held_back_nodes(known.held_back, known.held_back_since),
        closed_nodes(world),
        paused_queues(world),
        quarantined_memory(world),
        quota_locks(known.quota_locks, policy),
        held_idle(world, known.fleet, now),
        closed_gpus(world),
        failing_gpus(world, known.fleet.failing),
        waits_for_ever(known.stuck),
        repeated_memory_failures(known.fleet.memory_failures),
        all_on_one_node(world),
        slow_starts(world, now),
        bottlenecks(world, policy, now),
        calls_wait(known.fleet.waiting_calls),
        full_disks(samples),
        spilling_stores(samples),
        unreached_nodes(world, samples),
        unusable_gpus(world, agents),
        clocks_apart(agents),
        versions_apart(agents),
    )
    return chain(*of_parts, *of_fleet)
