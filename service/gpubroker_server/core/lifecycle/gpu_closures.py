"""GPUs on which nothing new starts, because their driver reports a fault, runs fail on them, or an operator
has closed them."""

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from gpubroker_server.core.domain.decisions import AuditNote, Decision, Request
from gpubroker_server.core.domain.device import Closure, Device, GpuHealth, NodeSample
from gpubroker_server.core.domain.gpu_faults import FAILURES, OPERATOR, FailingGpu, fault_of, is_mended
from gpubroker_server.core.domain.orders import NodeReport
from gpubroker_server.core.domain.units import DeviceKey, Instant
from gpubroker_server.core.lifecycle.runs import dissolved_pledges
from gpubroker_server.core.world.events import closure_notice
from gpubroker_server.core.world.world import World

REQUESTS = frozenset({"close_gpu", "reopen_gpu"})


def by_health(world: World, sample: NodeSample, now: Instant) -> Iterator[Decision]:
    """Yield decisions that close each GPU of a node, with its instances, whose driver says that it needs a
    reset, and that reopen those whose driver says that they no longer do."""
    for key in world.by_node.get(sample.node, ()) if sample.gpus else ():
        device = world.ledgers[key].device
        health = sample.gpus.get(device.parent or device.uuid)
        if health is not None and device.present:
            yield from _follow(world, device, health, now)


def _follow(world: World, device: Device, health: GpuHealth, now: Instant) -> Iterator[Decision]:
    closure, fault = device.closure, fault_of(health)
    if closure is not None and is_mended(closure.cause, health):
        yield _changed(device, None)
    elif fault is not None and (
        closure is None
        # An operator has reopened the device: only another fault closes it again.
        or (closure.is_waived and (closure.cause, closure.detail) != (fault.cause, fault.detail))
    ):
        yield closed(world, device, Closure(fault.cause, fault.detail, fault.words, now))


def by_failures(world: World, failing: Sequence[FailingGpu], now: Instant) -> Iterator[Decision]:
    """Yield decisions that close the devices on which runs fail right after their start."""
    for gpu in failing:
        ledger = world.ledgers.get(gpu.device)
        if ledger is not None and ledger.device.closure is None:
            reason = f"{gpu.times} runs in a row failed at once here: {', '.join(gpu.names)}"
            yield closed(world, ledger.device, Closure(FAILURES, "", reason, now))


def closed(world: World, device: Device, closure: Closure, **more: Any) -> Decision:
    """Return the decision that closes a device. Pledges on the device are dissolved, and their tasks are
    planned again for other devices."""
    return _changed(device, closure, pledges=dissolved_pledges(world, [device.key]), **more)


def _changed(device: Device, closure: Closure | None, done: Decision | None = None, **more: Any) -> Decision:
    row = replace(device, closure=closure, version=device.version + 1)
    decision = done or Decision(device.key, "gpu")
    return replace(decision, devices=(row,), notices=(closure_notice(row),), **more)


def carry_out(world: World, request: Request, now: Instant, done: Decision) -> Decision:
    """Close or reopen a device for an operator. An operator who reopens a device that still has its fault
    waives that fault, which then no longer closes the device."""
    ledger = world.ledgers.get(DeviceKey(request.task))
    if ledger is None:
        return done
    device, before = ledger.device, ledger.device.closure
    by, reason = str(request.fields["by"]), str(request.fields.get("reason") or "")
    action = "gpu.close" if request.what == "close_gpu" else "gpu.reopen"
    audit = (AuditNote(now, request.tenant, by, action, device.key, reason),)
    if request.what == "close_gpu":
        said = reason or f"closed by {by}"
        closure = Closure(OPERATOR, "", said, now, by)
        return closed(world, device, closure, done=done, audit=audit)
    if before is None or before.is_waived:
        return done
    waived = None if before.cause in (OPERATOR, FAILURES) else replace(before, is_waived=True, by=by)
    return _changed(device, waived, done, audit=audit)


def back_in_service(world: World, seen: NodeReport, rows: Sequence[Device]) -> dict[DeviceKey, Device]:
    """Return the rows of closed devices that were reset, by a reboot or since they return after they were
    lost. A closure by an operator stays. `rows` are the device rows that change anyway."""
    node, changed = world.nodes.get(seen.node.name), {device.key: device for device in rows}
    is_booted = node is not None and node.boot_id != seen.node.boot_id
    opened = {}
    for key in world.by_node.get(seen.node.name, ()):
        before = world.ledgers[key].device
        after = changed.get(key) or replace(before, version=before.version + 1)
        is_reset = after.present and (is_booted or not before.present)
        if before.closure is not None and before.closure.cause != OPERATOR and is_reset:
            opened[key] = replace(after, closure=None)
    return opened
