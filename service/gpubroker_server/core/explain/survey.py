"""Evaluate every node and device for one task."""

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct

from gpubroker_server.core.domain.demand import has_environment, may_use_device, may_use_node, need_mb
from gpubroker_server.core.domain.device import Node
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, Mib
from gpubroker_server.core.planning.forecasts.reservations import Forecast
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.nodes.node_room import Known
from gpubroker_server.core.planning.places import scores_of
from gpubroker_server.core.planning.plan_cache import PlanCache
from gpubroker_server.core.world.ledger import DeviceLedger
from gpubroker_server.core.world.world import World


class Verdict(StrEnum):
    """The evaluation of one device for one task; the first verdict that applies. It is published."""

    GONE = "gone"
    """The device's node no longer has it."""
    NOT_WANTED = "not_wanted"
    """The device's kind, power, size or node does not match the demand."""
    TOO_SMALL = "too_small"
    NODE_NOT_READY = "node_not_ready"
    CORDONED = "cordoned"
    DISK_FULL = "disk_full"
    """A disk of the device's node is too full for anything to start."""
    GPU_CLOSED = "gpu_closed"
    """The device needs a reset or a repair, or an operator has closed it."""
    ENVIRONMENT_PREPARING = "environment_preparing"
    """The device's node does not have the task's environment ready."""
    STALE = "stale"
    """The device's last sample is too old."""
    HELD_BACK = "held_back"
    """Background work may take no more of the device's node now."""
    FITS = "fits"
    KEPT_FOR_OTHERS = "kept_for_others"
    """The task would fit, but the free memory is pledged to tasks whose victims are stopping."""
    NO_ROOM = "no_room"


OPEN = frozenset({Verdict.FITS, Verdict.KEPT_FOR_OTHERS, Verdict.NO_ROOM})
"""Verdicts on devices that the task could use if they had enough free memory."""


class DeviceFinding(NamedTuple):
    ledger: DeviceLedger
    verdict: Verdict
    need_mb: Mib | None
    """The MiB that the task needs on this device; None if the device is too small, or not wanted."""
    free_mb: Mib
    """The MiB that are free for this task. Its own pledge, and pledges of lower priority, count as free."""


class NodeFinding(Struct, frozen=True):
    node: Node
    devices: tuple[DeviceFinding, ...]
    is_large_enough: bool
    """True if the node matches the demand and could run the task when empty."""
    has_headroom: bool
    """True if the node has a run slot, CPU and host memory left for the task."""
    full_disk: str = ""
    """The disk that is too full for anything to start; empty if none is."""
    has_environment: bool = True
    """True if the node has the task's environment ready."""

    @property
    def is_usable(self) -> bool:
        return self.node.ready and not (self.node.cordoned or self.full_disk) and self.has_environment

    @property
    def lacks_only_environment(self) -> bool:
        """True if the node could be used if it had the task's environment ready."""
        return self.node.ready and not (self.node.cordoned or self.full_disk or self.has_environment)

    @property
    def open_devices(self) -> list[DeviceFinding]:
        return [finding for finding in self.devices if finding.verdict in OPEN]

    def count(self, *verdicts: Verdict) -> int:
        return sum(finding.verdict in verdicts for finding in self.devices)


class Survey(Struct, frozen=True):
    """The findings about all nodes for one task. A survey refers to its draft and is void once the draft
    changes."""

    task: Task
    draft: Draft
    policy: Policy
    now: Instant
    nodes: tuple[NodeFinding, ...]
    """The findings by node, in name order; the devices of each are in key order."""
    forecasts: tuple[Forecast, ...] = ()
    """Forecasts that reserve room. The verdicts on devices ignore them."""
    known: Known | None = None
    """Cached facts about nodes."""


def survey_nodes(
    draft: Draft,
    task: Task,
    policy: Policy,
    now: Instant,
    forecasts: Iterable[Forecast] = (),
    known: Known | None = None,
) -> Survey:
    """Return the findings about every node for this task, without changing anything. The cost grows with the
    number of devices."""
    nodes = (draft.world.nodes[name] for name in sorted(draft.world.nodes))
    findings = tuple(_judge(draft, task, policy, now, node) for node in nodes)
    return Survey(task, draft, policy, now, findings, tuple(forecasts), known)


def _judge(draft: Draft, task: Task, policy: Policy, now: Instant, node: Node) -> NodeFinding:
    demand, period = task.demand, policy.sample_period_seconds
    is_open = may_use_node(demand, node)
    room = draft.headroom(node.name, task=task.id, priority=task.priority)
    full_disk = draft.world.full_disks.get(node.name, "")
    is_prepared = has_environment(demand, node)
    gives_gpus = room.gives_gpus or not demand.gpus
    closed = _closed(node, full_disk, is_prepared=is_prepared, gives_gpus=gives_gpus)
    devices = tuple(
        _judge_device(ledger, task, closed, is_open=is_open, is_stale=ledger.is_stale(now, period))
        for ledger in draft.ledgers_on(node.name)
    )
    matching = sum(finding.need_mb is not None for finding in devices)
    return NodeFinding(
        node,
        devices,
        is_large_enough=is_open
        and matching >= demand.gpus
        and node.cpu >= demand.cpu
        and node.memory_mb >= demand.memory_mb,
        has_headroom=room.fits(task),
        full_disk=full_disk,
        has_environment=is_prepared,
    )


def _closed(node: Node, full_disk: str, *, is_prepared: bool, gives_gpus: bool) -> Verdict | None:
    """Return the verdict that excludes a whole node; None if none does."""
    if not node.ready:
        return Verdict.NODE_NOT_READY
    if node.cordoned:
        return Verdict.CORDONED
    if full_disk:
        return Verdict.DISK_FULL
    if not is_prepared:
        return Verdict.ENVIRONMENT_PREPARING
    return None if gives_gpus else Verdict.HELD_BACK


def _judge_device(
    ledger: DeviceLedger,
    task: Task,
    closed: Verdict | None,
    *,
    is_open: bool,
    is_stale: bool,
) -> DeviceFinding:
    """Return the finding about one device. `closed` is the verdict that excludes the whole node, if any;
    `is_open` is True if the task may use the node."""
    demand, device = task.demand, ledger.device
    need = need_mb(demand, device) if demand.gpus else Mib(0)
    free = Mib(max(0, ledger.free_mb(task=task.id, priority=task.priority)))
    if not device.present:
        verdict = Verdict.GONE
    elif not (is_open and may_use_device(demand, device)):
        verdict = Verdict.NOT_WANTED
    elif need is None:
        verdict = Verdict.TOO_SMALL
    elif closed is not None:
        verdict = closed
    elif device.is_closed:
        verdict = Verdict.GPU_CLOSED
    elif is_stale:
        verdict = Verdict.STALE
    elif need <= free:
        verdict = Verdict.FITS
    else:
        verdict = Verdict.KEPT_FOR_OTHERS if need <= ledger.unallocated_mb() else Verdict.NO_ROOM
    return DeviceFinding(ledger, verdict, need, free)


class SurveyCache:
    """Makes surveys that share a cache of facts about nodes. The cache changes no answer."""

    def __init__(self) -> None:
        self._cache = PlanCache()

    def survey_nodes(
        self, world: World, task: Task, policy: Policy, now: Instant, forecasts: Iterable[Forecast] = ()
    ) -> Survey:
        """Return the survey for a task. The survey is void once the World changes, and nothing may be decided
        in its draft."""
        cache = self._cache
        cache.open(world, policy, now, now, scores_of(world, policy))
        draft = Draft(world, cache.revisions.changes, cache.revisions.growth)
        return survey_nodes(draft, task, policy, now, forecasts, cache.rooms)
