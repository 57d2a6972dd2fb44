"""What one task would find on every node and device: the facts behind `why does it wait`."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from service.core.backfill import Forecast
from service.core.device import Node
from service.core.draft import Draft
from service.core.ledger import Book
from service.core.need import may_use_device, may_use_node, need_mb
from service.core.policy import Policy
from service.core.task import Task
from service.core.units import Instant, Mib


class Verdict(StrEnum):
    """One device, judged for one task. The first that applies."""

    GONE = "gone"
    """Its node no longer has it."""
    NOT_WANTED = "not_wanted"
    """The task may not use it: its kind, its power, its size or its node is not among what is asked for."""
    TOO_SMALL = "too_small"
    """Even empty it could not give what is asked."""
    NODE_NOT_READY = "node_not_ready"
    CORDONED = "cordoned"
    STALE = "stale"
    """Nobody knows how much of it is in use: its last sample is too old."""
    FITS = "fits"
    KEPT_FOR_OTHERS = "kept_for_others"
    """It would fit, but what is free is kept for tasks that wait for runs to stop."""
    NO_ROOM = "no_room"


OPEN = frozenset({Verdict.FITS, Verdict.KEPT_FOR_OTHERS, Verdict.NO_ROOM})
"""Nothing but memory keeps the task from such a device, if anything does."""


@dataclass(frozen=True, slots=True)
class DeviceFinding:
    book: Book
    verdict: Verdict
    need_mb: Mib | None
    """None if it is too small, or not wanted."""
    free_mb: Mib
    """What this task could have of it now: its own pledge and those of lower priority count as free."""


@dataclass(frozen=True, slots=True)
class NodeFinding:
    node: Node
    devices: tuple[DeviceFinding, ...]
    is_large_enough: bool
    """Empty, it could run the task, and the task may use it."""
    has_headroom: bool
    """A run slot, CPU and host memory are left for it."""

    @property
    def is_usable(self) -> bool:
        return self.node.ready and not self.node.cordoned

    @property
    def open_devices(self) -> list[DeviceFinding]:
        return [finding for finding in self.devices if finding.verdict in OPEN]

    def count(self, *verdicts: Verdict) -> int:
        return sum(finding.verdict in verdicts for finding in self.devices)


@dataclass(frozen=True, slots=True)
class Survey:
    """Reads from the draft it was made of; use it before that changes."""

    task: Task
    draft: Draft
    policy: Policy
    now: Instant
    nodes: tuple[NodeFinding, ...]
    """In name order, their devices in key order."""
    forecasts: tuple[Forecast, ...] = ()
    """Those that hold now. They keep room, which a device's verdict does not tell."""


def survey(
    draft: Draft, task: Task, policy: Policy, now: Instant, forecasts: Iterable[Forecast] = ()
) -> Survey:
    """Look at every node for this task. Changes nothing; costs as much as there are devices."""
    nodes = (draft.world.nodes[name] for name in sorted(draft.world.nodes))
    found = tuple(_judge(draft, task, policy, now, node) for node in nodes)
    return Survey(task, draft, policy, now, found, tuple(forecasts))


def _judge(draft: Draft, task: Task, policy: Policy, now: Instant, node: Node) -> NodeFinding:
    demand = task.demand
    devices = tuple(
        _judge_device(book, task, node, stale=book.is_stale(now, policy.sample_period_seconds))
        for book in draft.books_on(node.name)
    )
    matching = sum(finding.need_mb is not None for finding in devices)
    return NodeFinding(
        node,
        devices,
        is_large_enough=may_use_node(demand, node)
        and matching >= demand.gpus
        and node.cpu >= demand.cpu
        and node.memory_mb >= demand.memory_mb,
        has_headroom=draft.headroom(node.name, task=task.id, priority=task.priority).fits(task),
    )


def _judge_device(book: Book, task: Task, node: Node, *, stale: bool) -> DeviceFinding:
    demand = task.demand
    need = need_mb(demand, book.device) if demand.gpus else Mib(0)
    free = Mib(max(0, book.free_mb(task=task.id, priority=task.priority)))
    if not book.device.present:
        verdict = Verdict.GONE
    elif not (may_use_node(demand, node) and may_use_device(demand, book.device)):
        verdict = Verdict.NOT_WANTED
    elif need is None:
        verdict = Verdict.TOO_SMALL
    elif not node.ready:
        verdict = Verdict.NODE_NOT_READY
    elif node.cordoned:
        verdict = Verdict.CORDONED
    elif stale:
        verdict = Verdict.STALE
    elif need <= free:
        verdict = Verdict.FITS
    else:
        verdict = Verdict.KEPT_FOR_OTHERS if need <= book.unheld_mb() else Verdict.NO_ROOM
    return DeviceFinding(book, verdict, need, free)
