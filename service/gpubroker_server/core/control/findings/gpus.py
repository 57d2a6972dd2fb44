"""Find GPUs that are closed, on which runs fail, or that are held and not used, with the likely cause."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from gpubroker_server.core.control.findings.finding import Finding, Severity
from gpubroker_server.core.control.fleet import FleetSeen
from gpubroker_server.core.domain.gpu_faults import OPERATOR, FailingGpu
from gpubroker_server.core.domain.holders import External, Model
from gpubroker_server.core.domain.lease import HolderKind, LeaseState
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import DeviceKey, Instant, Seconds, TaskId
from gpubroker_server.core.world.background import IDLE_TOP
from gpubroker_server.core.world.ledger import NOISE_DIVISOR, DeviceLedger, Holding
from gpubroker_server.core.world.world import World

BUSY_SHARE = 0.5
"""The busy share of a node's CPUs from which they probably do the work that the GPU should do."""


def closed_gpus(world: World) -> Iterator[Finding]:
    """Yield a finding for each GPU on which nothing new starts."""
    for ledger in world.ledgers.values():
        device, closure = ledger.device, ledger.device.closure
        if closure is None or closure.is_waived or device.parent:
            continue
        by_operator = closure.cause == OPERATOR
        cause = f"Nothing new starts on {device.label} ({device.uuid}): {closure.reason}."
        mend = (
            "" if by_operator else f"reset or replace it (nvidia-smi -r -i {device.uuid}, on {device.node}); "
        )
        remedy = f"{mend}gpubroker reopen-gpu {device.label}"
        severity = Severity.NOTE if by_operator else Severity.CRITICAL
        evidence = {"cause": closure.cause} | ({"detail": closure.detail} if closure.detail else {})
        yield Finding("gpu-closed", device.label, severity, cause, evidence, remedy, closure.since)


def failing_gpus(world: World, failing: Iterable[FailingGpu]) -> Iterator[Finding]:
    """Yield a finding for each open GPU on which runs fail quickly that work on other GPUs."""
    for gpu in failing:
        ledger = world.ledgers.get(gpu.device)
        if ledger is not None and not ledger.device.is_closed:
            label = ledger.device.label
            cause = f"{gpu.times} runs in a row failed at once on {label}, last {', '.join(gpu.names)}."
            remedy = f"gpubroker close-gpu {label}, then look at it: nvidia-smi -q, dmesg | grep -i xid"
            evidence = {"failures": gpu.times}
            yield Finding("gpu-fails-runs", label, Severity.WARNING, cause, evidence, remedy, gpu.first_at)


class UnusedHolding(NamedTuple):
    """A holding of a task on a GPU on which nothing computes."""

    ledger: DeviceLedger
    holding: Holding
    task: Task
    since: Instant


def held_idle(world: World, fleet: FleetSeen, now: Instant) -> Iterator[Finding]:
    return (_finding(world, *unused) for unused in unused_holdings(world, fleet, now))


def unused_holdings(world: World, fleet: FleetSeen, now: Instant) -> Iterator[UnusedHolding]:
    """Yield each holding on an idle GPU that has lasted for `idle_grace_seconds`. Younger ones are left out,
    because a holder may prepare its work first."""
    for resource in fleet.idle:
        ledger = world.ledgers.get(DeviceKey(resource.name))
        if ledger is None or ledger.sample is None:
            continue  # a node, or a GPU that is gone
        for holding in ledger.holdings.values():
            task, lease = world.tasks.get(TaskId(holding.lease.holder)), holding.lease
            since = max(resource.since, lease.since)
            is_held = lease.state is LeaseState.HELD and not holding.is_leaving
            # The base cost of a model server does not compute, and idle work runs on idle GPUs.
            if lease.holder_kind is HolderKind.SERVER or lease.priority <= IDLE_TOP:
                continue
            if task is not None and is_held and now - since >= fleet.idle_grace_seconds:
                yield UnusedHolding(ledger, holding, task, since)


def held_idle_seconds(world: World, fleet: FleetSeen, now: Instant) -> dict[DeviceKey, Seconds]:
    """Return, by device, for how long a holder has kept the GPU without use; with several holders, the
    longest time."""
    seconds_by_device: dict[DeviceKey, Seconds] = {}
    for holding in unused_holdings(world, fleet, now):
        key = holding.ledger.device.key
        seconds_by_device[key] = Seconds(max(seconds_by_device.get(key, 0.0), now - holding.since))
    return seconds_by_device


def _finding(world: World, ledger: DeviceLedger, holding: Holding, task: Task, since: Instant) -> Finding:
    assert ledger.sample is not None, "only what is measured is idle"
    sample, device = world.node_samples.get(ledger.device.node), ledger.device
    evidence: dict[str, str | float] = {
        "task": task.id,
        "held_mb": holding.lease.mb,
        "used_mb": holding.measured_mb,
        "utilization": ledger.sample.utilization or 0.0,
    }
    if sample is not None:
        evidence["node_cpu"] = round(sample.cpu, 3)
    elsewhere = _used_elsewhere(world, ledger, holding)
    is_external = isinstance(task.holder, External)
    if isinstance(task.holder, Model):
        kind, remedy = "gpu-held-unasked", f"gpubroker unload {task.holder.model}"
        cause = f"Nothing has been asked of model {task.holder.model}, which keeps its memory."
    elif elsewhere is not None:
        kind, remedy = "gpu-held-wrong-device", f"gpubroker stack {task.id}"
        cause = (
            f"{task.name} uses nothing of its GPU, and {elsewhere.device.label} is used without a lease: "
            "does it choose a GPU by number, instead of those in CUDA_VISIBLE_DEVICES?"
        )
        evidence["used_without_lease"] = elsewhere.device.label
        evidence["without_lease_mb"] = _unleased_mb(elsewhere)
    elif not is_external and sample is not None and sample.cpu >= BUSY_SHARE:
        kind, remedy = "gpu-held-on-cpu", f"gpubroker stack {task.id}"
        cause = f"{task.name} does not use the GPU, and its node's CPUs are busy: does its model run on them?"
    else:
        end = "gpubroker lease release" if is_external else "gpubroker cancel"
        kind, remedy = "gpu-held-unasked", f"{end} {task.id}"
        cause = f"{task.name} holds memory and computes nothing: it waits for data, or for requests."
    subject = f"{device.label} {task.name}"
    return Finding(kind, subject, Severity.WARNING, cause, evidence, remedy, since, task.tenant)


def _used_elsewhere(world: World, ledger: DeviceLedger, holding: Holding) -> DeviceLedger | None:
    """Return another GPU of the node that a process without a lease uses, if the holder uses nothing of its
    own GPU."""
    if holding.measured_mb > ledger.device.context_mb:
        return None
    others = (world.ledgers[key] for key in world.by_node[ledger.device.node])
    return next((other for other in others if other is not ledger and _unleased_mb(other)), None)


def _unleased_mb(ledger: DeviceLedger) -> int:
    """Return the MiB in use without a lease beyond those that the operator has declared. Small amounts count
    as 0, because contexts and the driver may take them."""
    used_mb = ledger.foreign_mb - ledger.device.declared_foreign_mb
    return used_mb if used_mb > ledger.device.physical_mb // NOISE_DIVISOR else 0
