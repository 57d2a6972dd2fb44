"""Routes that list, close and reopen GPUs: what is leased, used and free on each, and by which holders."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any

from fastapi import Query, Response
from gpubroker.wire.answered import OverviewPage, Time, part_of
from gpubroker.wire.devices import ClosedGpu, Gpu, GpuHealth, Holder, Pledge
from gpubroker.wire.quarantine import Awaited
from msgspec.structs import astuple
from pydantic import Field

from gpubroker_server.core.domain.device import Device
from gpubroker_server.core.domain.policy import band_of
from gpubroker_server.core.domain.units import DeviceKey, TaskId
from gpubroker_server.core.planning.fragmentation import FreeMemory, fragmentation
from gpubroker_server.core.world.ledger import DeviceLedger, Holding
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.cluster.history import HistoryPageQuery, HistoryQuery
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.gateway.status.quarantine import awaited_by_lease
from gpubroker_server.gateway.status.task_view import priority_now
from gpubroker_server.http.bodies import Because, Body, JsonBody
from gpubroker_server.http.identity import Identity, Scope
from gpubroker_server.http.problems import Problem
from gpubroker_server.http.routing import STORED, Caller, Endpoint, Resource, answer

resource = Resource("cluster")

MAX_NAMED = 20
ITEMS_AT_ONCE = 100
"""The number of items after which other requests have their turn. The history of so many items takes 10
ms."""


class GpuQuery(HistoryPageQuery):
    idle: Annotated[bool | None, Field(description="True: only those that are idle; false: the others.")] = (
        None
    )


@resource.route(
    "GET /gpus", "gpus_list", Scope.CLUSTER_READ, OverviewPage[Gpu], "cursor-invalid follower-stale"
)
async def list_gpus(caller: Caller, parts: Parts, query: Annotated[GpuQuery, Query()]) -> Response:
    """List all devices: what is leased, used, unaccounted for and free, their holders, and the last minutes.

    A device is idle if it has used less than `fleet.idle_below_percent` for `fleet.idle_grace_seconds`.
    """
    moment, idle = parts.freshness.moment(), idle_seconds(parts)
    wanted = [key for key in sorted(parts.world.ledgers) if query.idle in (None, key in idle)]
    page, next_cursor = query.cut(wanted, f"gpus {query.idle}")
    items = []
    for gpu in shown_gpus(caller, parts, page, query):
        items.append(gpu)
        if len(items) % ITEMS_AT_ONCE == 0:
            await asyncio.sleep(0)
    return answer(OverviewPage(**moment, **part_of(items, next_cursor)))


class CloseGpu(Body):
    """`reason` is recorded with the name of your token, and shown with the GPU."""

    reason: Because = ""


def _change(verb: str) -> Callable[[Endpoint], Endpoint]:
    """Return the decorator of a route that requests a change of a GPU from the leader."""
    return resource.route(
        f"POST /gpus/{{gpu:path}}/{verb}",
        f"gpus_{verb}",
        Scope.CLUSTER_WRITE,
        Gpu,
        "malformed-json not-found follower-stale leader-outdated",
        accepted=STORED,
        response_description="The GPU as it is now.",
    )


@_change("close")
async def close_gpu(
    caller: Caller,
    parts: Parts,
    gpu: str,
    body: JsonBody[CloseGpu] = CloseGpu(),  # noqa: B008  # frozen
) -> Response:
    """Close a GPU: nothing new starts on it until it is reopened, and what runs there goes on. Name the GPU
    by its UUID or as `node/gpu0`."""
    return await _ask(caller, parts, gpu, "close_gpu", body.reason)


@_change("reopen")
async def reopen_gpu(
    caller: Caller,
    parts: Parts,
    gpu: str,
    body: JsonBody[CloseGpu] = CloseGpu(),  # noqa: B008  # frozen
) -> Response:
    """Reopen a GPU: tasks may start on it again, whoever has closed it. A fault that persists does not close
    it again; another fault does."""
    return await _ask(caller, parts, gpu, "reopen_gpu", body.reason)


async def _ask(caller: Caller, parts: Parts, gpu: str, what: str, reason: str) -> Response:
    await parts.freshness.catch_up()
    parts.freshness.moment()
    key = _known(parts.world, gpu)
    settled = await parts.requests.ask(key, caller.tenant, what, {"reason": reason, "by": caller.name})
    [shown] = shown_gpus(caller, parts, [key], HistoryQuery())
    return answer(shown, 200 if settled else 202)


def _known(world: World, gpu: str) -> DeviceKey:
    """Return the key of a device. Raises Problem if there is no such device."""
    devices = [world.ledgers[key].device for key in sorted(world.ledgers)]
    matching = [device.key for device in devices if gpu in (device.uuid, device.key, device.label)]
    if not matching:
        labels = ", ".join(device.label for device in devices[:MAX_NAMED])
        raise Problem("not-found", f'there is no GPU "{gpu[:100]}"; GPUs: {labels or "none yet"}')
    return matching[0]


def idle_seconds(parts: Parts) -> dict[str, float]:
    """Return for how many seconds each idle device (by key) and each idle node (by name) has been idle."""
    leader, now = parts.leadership.leader(), parts.clock.now()
    idle = () if leader is None or leader.fleet is None else leader.fleet.idle
    return {device.name: max(0.0, now - device.since) for device in idle}


_SHOWN = tuple(name for name in Gpu.__struct_fields__ if name in Device.__struct_fields__)


def _facts(device: Device) -> dict[str, Any]:
    """Return the fields that the view of a device takes over unchanged."""
    return {name: getattr(device, name) for name in _SHOWN}


def shown_gpus(
    viewer: Identity, parts: Parts, keys: Iterable[DeviceKey], query: HistoryQuery
) -> Iterator[Gpu]:
    world, now = parts.world, parts.clock.now()
    awaited, idle = awaited_by_lease(world), idle_seconds(parts)
    agents = parts.leadership.executor_status().get("agents", {})
    sums, history = fragmentation(world, parts.policy, now).devices, query.reader(parts)
    for key in keys:
        if key not in world.ledgers:
            continue  # The device was removed between two items.
        ledger, sample = world.ledgers[key], world.ledgers[key].sample
        device = ledger.device
        seen = world.node_samples.get(device.node)
        health = None if seen is None else seen.gpus.get(device.uuid)
        yield Gpu(
            **_facts(device),
            leased_mb=ledger.leased_mb(),
            used_mb=None if sample is None else sample.used_mb,
            foreign_mb=ledger.foreign_mb,
            unaccounted_mb=ledger.unexplained_mb,
            pledged_mb=sum(pledge.mb for pledge in ledger.pledges.values()),
            free_mb=ledger.offered_mb(),
            stranded_mb=sums.get(key, FreeMemory()).stranded_mb,
            utilization=None if sample is None else sample.utilization,
            health=None if health is None else GpuHealth(*astuple(health)),
            idle_seconds=idle.get(key),
            sampled_at=Time.at_or_none(ledger.sampled_at),
            stale=ledger.is_stale(now, parts.policy.sample_period_seconds),
            closed=_closed(device),
            fault=_fault(device, agents.get(device.node, {})),
            holders=tuple(
                _holder(world, ledger.holdings[holding], viewer, awaited)
                for holding in sorted(ledger.holdings)
            ),
            pledges=_pledges(ledger, viewer),
            history=history(key),
        )


def _closed(device: Device) -> ClosedGpu | None:
    closure = device.closure
    if closure is None or closure.is_waived:
        return None
    return ClosedGpu(closure.cause, closure.reason, Time.at(closure.since), closure.by)


def _fault(device: Device, agent: Mapping[str, Any]) -> str | None:
    """Return why the agent of the device's node cannot measure the device; None if it can."""
    fault: str | None = agent.get("gpu_faults", {}).get(device.uuid) or agent.get("gpu_absence")
    return fault


def _holder(world: World, holding: Holding, viewer: Identity, awaited: Mapping[str, Awaited]) -> Holder:
    lease = holding.lease
    task = world.tasks.get(TaskId(lease.holder))
    named, priority = viewer.may_see(lease.tenant), priority_now(world, lease)
    return Holder(
        kind=lease.holder_kind.value,
        id=lease.holder if named else None,
        name=task.name if task is not None and named else None,
        tenant=lease.tenant,
        priority=priority,
        band=band_of(priority)[0],
        gpu_mb=lease.mb,
        context_mb=lease.context_mb,
        measured_mb=holding.measured_mb,
        overused_mb=lease.overused_mb or None,
        state=lease.state.value,
        since=Time.at(lease.since),
        stopping=holding.stopping,
        quarantine=awaited.get(lease.key),
    )


def _pledges(ledger: DeviceLedger, viewer: Identity) -> tuple[Pledge, ...]:
    return tuple(
        Pledge(
            task=pledge.preemptor if viewer.may_see(pledge.tenant) else None,
            gpu_mb=pledge.mb,
            arrived_mb=ledger.reserved_free_mb(pledge),
            priority=pledge.priority,
            deadline_at=Time.at(pledge.deadline_at),
        )
        for _preemptor, pledge in sorted(ledger.pledges.items())
    )
