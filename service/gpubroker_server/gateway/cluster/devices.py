"""GPUs: what is leased, used and free, and by which holders."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated

from fastapi import Query, Response
from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.core.domain.policy import band_of
from gpubroker_server.core.domain.units import DeviceKey, TaskId
from gpubroker_server.core.planning.fragmentation import FreeMemory, fragmentation
from gpubroker_server.core.world.ledger import DeviceLedger, Holding
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.cluster.history import HistoryQuery, HistoryView
from gpubroker_server.gateway.http.identity import Identity, Scope
from gpubroker_server.gateway.http.routing import Call, Resource, answer, view_of
from gpubroker_server.gateway.http.times import AsOf, Time, rfc3339, rfc3339_or_none
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.gateway.status.quarantine import AwaitedView, awaited_by_lease
from gpubroker_server.gateway.status.task_view import priority_now
from gpubroker_server.gateway.status.views import Overused

resource = Resource("cluster")

ITEMS_AT_ONCE = 100
"""An hour of so many takes 10 ms; then others have their turn."""


class HolderView(TypedDict):
    """A holder of memory. `id` and `name` are null for other tenants' holders, unless the token is an
    admin's."""

    kind: str
    id: str | None
    name: str | None
    tenant: str
    priority: int
    band: str
    gpu_mb: int
    context_mb: Annotated[int, Field(description="Of `gpu_mb`, the process's own cost beyond its demand.")]
    measured_mb: int
    overused_mb: Overused
    state: str
    since: Time
    stopping: bool
    quarantine: Annotated[AwaitedView | None, Field(description="While its state is quarantined.")]


class PledgeView(TypedDict):
    """Memory that is being freed for one waiting task; `task` is null if it is another tenant's."""

    task: str | None
    gpu_mb: int
    arrived_mb: Annotated[int, Field(description="How much of it is already free, and kept for the task.")]
    priority: int
    deadline_at: Time


class DeviceView(TypedDict):
    """A device, apart from its use."""

    key: str
    uuid: str
    node: str
    kind: str
    index: int
    simulated: bool
    parent: Annotated[str, Field(description="UUID of the GPU of which it is an instance; empty for GPUs.")]
    split: Annotated[bool, Field(description="It has instances, which are leased instead of it.")]
    power: Annotated[int, Field(description="Rank of its kind; more is stronger, 0 is not ranked.")]
    context_mb: Annotated[int, Field(description="What each process takes beyond what it asked for.")]
    present: Annotated[bool, Field(description="False if its node no longer has it; kept while leased.")]
    physical_mb: int
    reserve_mb: Annotated[int, Field(description="Never leased.")]


class HealthView(TypedDict):
    """Null where the driver does not say."""

    power_watts: float | None
    temperature_celsius: float | None
    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    ecc_errors: Annotated[int | None, Field(description="Uncorrected, since the driver was loaded.")]
    xid: Annotated[int | None, Field(description="The last critical error that the driver told the agent.")]


class GpuView(DeviceView):
    """A device, its holders, and what is free of it."""

    leased_mb: int
    used_mb: Annotated[int | None, Field(description="As measured; null before the first sample.")]
    foreign_mb: Annotated[int, Field(description="Used by processes without a lease.")]
    unaccounted_mb: Annotated[int, Field(description="Used beyond what holders and processes explain.")]
    pledged_mb: int
    free_mb: Annotated[int, Field(description="What a task without a pledge could take now.")]
    stranded_mb: Annotated[int, Field(description="Of that, what the usual demands cannot use.")]
    utilization: Annotated[float | None, Field(description="0 to 1, as last measured.")]
    health: Annotated[
        HealthView | None,
        Field(
            description="Null of a simulated device, of an instance, and while its driver does not answer."
        ),
    ]
    idle_seconds: Annotated[float | None, Field(description="How long it has been idle; null: it is not.")]
    sampled_at: Time | None
    stale: Annotated[bool, Field(description="Not measured recently: takes nothing new.")]
    fault: Annotated[str | None, Field(description="Why its node's agent cannot measure it.")]
    holders: list[HolderView]
    pledges: list[PledgeView]
    history: HistoryView


class GpuList(AsOf):
    items: list[GpuView]


class GpuQuery(HistoryQuery):
    idle: Annotated[bool | None, Field(description="True: only those that are idle; false: the others.")] = (
        None
    )


@resource.route("GET /gpus", "gpus_list", Scope.CLUSTER_READ, GpuList, "follower-stale validation-failed")
async def list_gpus(call: Call, parts: Parts, query: Annotated[GpuQuery, Query()]) -> Response:
    """List all devices: what is leased, used, unaccounted for and free, their holders, and the last minutes.

    One is idle that has used less than `fleet.idle_below_percent` for `fleet.idle_grace_seconds`.
    """
    as_of, idle = parts.freshness.as_of(), idle_seconds(parts)
    wanted = (key for key in sorted(parts.world.ledgers) if query.idle in (None, key in idle))
    view: GpuList = {**as_of, "items": []}
    for gpu in gpu_views(call, parts, wanted, query):
        view["items"].append(gpu)
        if len(view["items"]) % ITEMS_AT_ONCE == 0:
            await asyncio.sleep(0)
    return answer(view)


def idle_seconds(parts: Parts) -> dict[str, float]:
    """How long each device (by key) and node (by name) has been idle that is."""
    leader, now = parts.leadership.leader(), parts.clock.now()
    idle = () if leader is None or leader.fleet is None else leader.fleet.idle
    return {one.name: max(0.0, now - one.since) for one in idle}


def gpu_views(call: Call, parts: Parts, keys: Iterable[DeviceKey], query: HistoryQuery) -> Iterator[GpuView]:
    world, now = parts.world, parts.clock.now()
    awaited, idle = awaited_by_lease(world), idle_seconds(parts)
    agents = parts.leadership.executor_status().get("agents", {})
    sums, history = fragmentation(world, parts.policy, now).devices, query.reader(parts)
    for key in keys:
        if key not in world.ledgers:
            continue  # it was removed meanwhile
        ledger, sample = world.ledgers[key], world.ledgers[key].sample
        device = ledger.device
        seen = world.node_samples.get(device.node)
        health = None if seen is None else seen.gpus.get(device.uuid)
        yield {
            **view_of(DeviceView, device),
            "leased_mb": ledger.leased_mb(),
            "used_mb": None if sample is None else sample.used_mb,
            "foreign_mb": ledger.foreign_mb,
            "unaccounted_mb": ledger.unexplained_mb,
            "pledged_mb": sum(pledge.mb for pledge in ledger.pledges.values()),
            "free_mb": max(0, ledger.free_mb()),
            "stranded_mb": sums.get(key, FreeMemory()).stranded_mb,
            "utilization": None if sample is None else sample.utilization,
            "health": None if health is None else view_of(HealthView, health),
            "idle_seconds": idle.get(key),
            "sampled_at": rfc3339_or_none(ledger.sampled_at),
            "stale": ledger.is_stale(now, parts.policy.sample_period_seconds),
            "fault": agents.get(device.node, {}).get("gpu_faults", {}).get(device.uuid),
            "holders": [
                _holder_view(world, ledger.holdings[holding], call.identity, awaited)
                for holding in sorted(ledger.holdings)
            ],
            "pledges": _pledge_views(ledger, call.identity),
            "history": history(key),
        }


def _holder_view(
    world: World, holding: Holding, viewer: Identity, awaited: Mapping[str, AwaitedView]
) -> HolderView:
    lease = holding.lease
    task = world.tasks.get(TaskId(lease.holder))
    named, priority = viewer.may_see(lease.tenant), priority_now(world, lease)
    return {
        "kind": lease.holder_kind.value,
        "id": lease.holder if named else None,
        "name": task.name if task is not None and named else None,
        "tenant": lease.tenant,
        "priority": priority,
        "band": band_of(priority)[0],
        "gpu_mb": lease.mb,
        "context_mb": lease.context_mb,
        "measured_mb": holding.measured_mb,
        "overused_mb": lease.overused_mb or None,
        "state": lease.state.value,
        "since": rfc3339(lease.since),
        "stopping": holding.stopping,
        "quarantine": awaited.get(lease.key),
    }


def _pledge_views(ledger: DeviceLedger, viewer: Identity) -> list[PledgeView]:
    return [
        {
            "task": pledge.preemptor if viewer.may_see(pledge.tenant) else None,
            "gpu_mb": pledge.mb,
            "arrived_mb": ledger.reserved_free_mb(pledge),
            "priority": pledge.priority,
            "deadline_at": rfc3339(pledge.deadline_at),
        }
        for _preemptor, pledge in sorted(ledger.pledges.items())
    ]
