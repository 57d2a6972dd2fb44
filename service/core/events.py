"""The event log's lines, and how a decision becomes some of them."""

from collections.abc import Iterator
from dataclasses import dataclass

from service.core.codec import device_fields, lease_fields, node_fields, pledge_fields, task_changes
from service.core.plan import Decision, Fields
from service.core.units import Instant, Position


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the log: what changed on which row, in commit order. Never a payload."""

    position: Position
    at: Instant
    kind: str
    """`task.admitted`, `lease.released`, `pledge.made`, `device.seen`, `node.seen`, `request.made`, ..."""
    key: str
    version: int
    tenant: str
    fields: Fields


@dataclass(frozen=True, slots=True)
class NewEvent:
    """An event that has no position yet; the last statement before COMMIT numbers it."""

    kind: str
    key: str
    version: int
    tenant: str
    fields: Fields


def events_of(decision: Decision) -> Iterator[NewEvent]:
    """The log lines of one decision, in a fixed order: nodes, devices, tasks, leases, pledges, requests."""
    for node in decision.nodes:
        yield NewEvent("node.seen", node.name, node.version, "", node_fields(node))
    for device in decision.devices:
        yield NewEvent("device.seen", device.key, device.version, "", device_fields(device))
    for write in decision.tasks:
        task = write.task
        yield NewEvent(f"task.{write.what}", task.id, task.version, task.tenant, task_changes(write))
    for lease in decision.leases:
        fields = lease_fields(lease) if lease.version == 1 else {"state": lease.state}
        yield NewEvent(f"lease.{lease.state}", lease.key, lease.version, lease.tenant, fields)
    for written in decision.pledges:
        pledge, end = written.pledge, written.end
        what = "made" if end is None else str(end)
        yield NewEvent(f"pledge.{what}", pledge.key, 1, pledge.tenant, pledge_fields(pledge))
    for request in decision.requests_done:
        yield NewEvent("request.done", request, 1, "", {})
