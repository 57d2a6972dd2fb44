"""Asking about the disks of a node, and having it cleaned."""

import asyncio
from typing import Any

import pytest
from gpubroker_server.broker.disk_passes import GIVEN_UP_SECONDS
from gpubroker_server.core.control.disk_guard import DiskGuard
from gpubroker_server.core.domain.device import (
    DiskOrder,
    DiskReport,
    DiskSample,
    FileClass,
    FoundFile,
    NodeSample,
    WatchedRoot,
)
from gpubroker_server.core.domain.units import Mib, NodeName

from tests.gateway.harness import Client, Gateway, problem, until

GUARD = DiskGuard(roots=(WatchedRoot("/scratch", FileClass.LOG),))
FILES = tuple(
    FoundFile("/scratch", name, FileClass.LOG, size, number * 10**9, number)
    for number, (name, size) in enumerate((("a.log", 7), ("b.log", 5)), start=1)
)


@pytest.fixture(autouse=True)
def _a_disk_is_filling(gateway: Gateway) -> None:
    gateway.change(guard=GUARD)
    disks = (DiskSample("/scratch", 100, 38),)
    sample = NodeSample(NodeName("n1"), gateway.clock.now(), 0.1, Mib(1), Mib(1), disks=disks)
    gateway.world.measure((), [sample])


async def asked_of_the_agent(gateway: Gateway) -> dict[str, Any]:
    """The agent looks, and deletes what it is told to; returns what the leader was asked."""
    await until(lambda: bool(gateway.world.requests))
    [request] = gateway.world.requests.values()
    while request.id in gateway.world.requests:
        order = await ordered(gateway)
        assert (order.node, order.request) == ("n1", request.id)
        kept = (("young", 3),) if order.deletes is None else ()
        await gateway.hear(DiskReport(order.node, gateway.clock.now(), order.request, FILES, kept))
    return {"what": request.what, "node": request.task, **request.fields}


async def ordered(gateway: Gateway) -> DiskOrder:
    await until(lambda: bool(gateway.agents.looked))
    return gateway.agents.looked.pop()


async def test_a_look_says_what_would_go_and_why_the_rest_stays(gateway: Gateway) -> None:
    reader = await gateway.client("reader", "cluster:read")
    looking = asyncio.create_task(reader.get("/nodes/n1/disk"))
    assert await asked_of_the_agent(gateway) == {"what": "disk", "node": "n1", "by": "reader"}
    seen = (await looking).json()
    assert (seen["node"], seen["deleted"], seen["freed_bytes"]) == ("n1", False, 12)
    disk = {"path": "/scratch", "total_bytes": 100, "free_bytes": 38, "level": "warn"}
    assert (seen["kept"], seen["disks"]) == ({"young": 3}, [disk])
    assert [file["path"] for file in seen["files"]] == ["/scratch/a.log", "/scratch/b.log"]
    problem(await reader.post("/nodes/n1/disk/clean"), 403, "forbidden")


@pytest.mark.parametrize(
    ("body", "dry_run"), [(None, True), ({"dry_run": True}, True), ({"dry_run": False}, False)]
)
async def test_cleaning_is_a_dry_run_unless_it_says_otherwise(
    gateway: Gateway, body: dict[str, Any] | None, dry_run: bool
) -> None:
    cleaning = asyncio.create_task(gateway.admin.post("/nodes/n1/disk/clean", json=body))
    asked = await asked_of_the_agent(gateway)
    assert (asked["what"], asked["dry_run"]) == ("clean", dry_run)
    assert (await cleaning).json()["deleted"] is not dry_run


async def test_a_node_that_does_not_answer_and_one_that_is_not_there(gateway: Gateway, api: Client) -> None:
    looking = asyncio.create_task(gateway.admin.get("/nodes/n1/disk"))
    await ordered(gateway)
    gateway.clock.advance(GIVEN_UP_SECONDS + 1.0)
    await gateway.turn()
    assert "n1" in problem(await looking, 503, "disk-unavailable")["detail"]
    problem(await gateway.admin.get("/nodes/n9/disk"), 404, "not-found")


async def test_an_earlier_leader_cannot_look_at_disks(gateway: Gateway) -> None:
    gateway.leader_release = "0.2.9"
    problem(await gateway.admin.get("/nodes/n1/disk"), 409, "leader-outdated")
    problem(await gateway.admin.post("/nodes/n1/disk/clean"), 409, "leader-outdated")
