"""Asking about the disks of a node, and having it cleaned."""

import asyncio
import json
from typing import Any

import pytest
from gpubroker_server.core.domain.decisions import Decision

from tests.gateway.harness import Client, Gateway, problem, until

TOLD: dict[str, Any] = {
    "at": 1_000_000_000.0,
    "deleted": False,
    "first_pass": False,
    "message": "",
    "kept": {"young": 3},
    "roots": [{"path": "/scratch", "class": "log"}],
    "disks": [{"path": "/scratch", "total_bytes": 100, "free_bytes": 34, "level": "clean"}],
    "files": [
        {"path": "/scratch/a.log", "class": "log", "size_bytes": 7, "modified_at": 1.0},
        {"path": "/scratch/b.log", "class": "log", "size_bytes": 5, "modified_at": 2.0},
    ],
}


async def asked_of_the_leader(gateway: Gateway, **told: Any) -> dict[str, Any]:
    """Answers as the leader does; returns what it was asked."""
    await until(lambda: bool(gateway.world.requests))
    [request] = gateway.world.requests.values()
    digest = await gateway.blobs.put(json.dumps({**TOLD, **told}).encode(), owner="n1")
    await gateway.commit(Decision("n1", request.what, requests_done=(request.id,), answer=digest))
    return {"what": request.what, "node": request.task, **request.fields}


async def test_a_look_says_what_would_go_and_why_the_rest_stays(gateway: Gateway) -> None:
    reader = await gateway.client("reader", "cluster:read")
    looking = asyncio.create_task(reader.get("/nodes/n1/disk"))
    assert await asked_of_the_leader(gateway) == {"what": "disk", "node": "n1", "by": "reader"}
    seen = (await looking).json()
    assert (seen["node"], seen["deleted"], seen["freed_bytes"]) == ("n1", False, 12)
    assert (seen["kept"], seen["disks"]) == ({"young": 3}, TOLD["disks"])
    assert [file["path"] for file in seen["files"]] == ["/scratch/a.log", "/scratch/b.log"]
    problem(await reader.post("/nodes/n1/disk/clean"), 403, "forbidden")


@pytest.mark.parametrize(
    ("body", "dry_run"), [(None, True), ({"dry_run": True}, True), ({"dry_run": False}, False)]
)
async def test_cleaning_is_a_dry_run_unless_it_says_otherwise(
    gateway: Gateway, body: dict[str, Any] | None, dry_run: bool
) -> None:
    cleaning = asyncio.create_task(gateway.admin.post("/nodes/n1/disk/clean", json=body))
    asked = await asked_of_the_leader(gateway, deleted=not dry_run)
    assert (asked["what"], asked["dry_run"]) == ("clean", dry_run)
    assert (await cleaning).json()["deleted"] is not dry_run


async def test_a_node_that_does_not_answer_and_one_that_is_not_there(gateway: Gateway, api: Client) -> None:
    looking = asyncio.create_task(gateway.admin.get("/nodes/n1/disk"))
    await until(lambda: bool(gateway.world.requests))
    await gateway.commit(Decision("n1", "disk", requests_done=tuple(gateway.world.requests)))
    assert "n1" in problem(await looking, 503, "disk-unavailable")["detail"]
    problem(await gateway.admin.get("/nodes/n9/disk"), 404, "not-found")


async def test_an_earlier_leader_cannot_look_at_disks(gateway: Gateway) -> None:
    gateway.leader_release = "0.2.9"
    problem(await gateway.admin.get("/nodes/n1/disk"), 409, "leader-outdated")
    problem(await gateway.admin.post("/nodes/n1/disk/clean"), 409, "leader-outdated")
