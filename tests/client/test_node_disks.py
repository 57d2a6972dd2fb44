"""The disks of a node through SDK and command line."""

from typing import Any

import pytest
from gpubroker import AsyncBroker, Broker

from tests.client.command_line import Run
from tests.client.recorded_service import RecordedService, Reply

SEEN: dict[str, Any] = {
    "node": "n1",
    "taken_at": "2026-11-21T10:00:00Z",
    "disks": [{"path": "/scratch", "total_bytes": 1000, "free_bytes": 340, "level": "clean"}],
    "roots": [{"path": "/scratch", "class": "log"}],
    "deleted": False,
    "first_pass": True,
    "files": [
        {
            "path": f"/scratch/{n}.log",
            "class": "log",
            "size_bytes": 2_000_000,
            "modified_at": "2026-11-01T10:00:00Z",
        }
        for n in range(51)
    ],
    "freed_bytes": 102_000_000,
    "kept": {"not_needed": 3},
    "message": "/other: missing",
}


async def test_the_sdk_looks_and_cleans(service: RecordedService) -> None:
    service.reply_with(*[Reply(200, SEEN)] * 3)
    async with AsyncBroker(service.url) as broker:
        seen = await broker.disk("n1")
        assert (seen.node, seen.first_pass, seen.kept) == ("n1", True, {"not_needed": 3})
    with Broker(service.url) as broker:
        broker.clean("n1")
        broker.clean("n1", dry_run=False)
    assert [(asked.method, asked.path, asked.body) for asked in service.requests] == [
        ("GET", "/nodes/n1/disk", None),
        ("POST", "/nodes/n1/disk/clean", {"dry_run": True}),
        ("POST", "/nodes/n1/disk/clean", {"dry_run": False}),
    ]


@pytest.mark.parametrize(
    ("line", "method", "body"),
    [
        ("disk n1", "GET", None),
        ("clean n1", "POST", {"dry_run": True}),
        ("clean n1 --yes", "POST", {"dry_run": False}),
    ],
)
def test_the_commands_show_what_would_go(
    service: RecordedService, run: Run, line: str, method: str, body: dict[str, Any] | None
) -> None:
    service.reply_with(Reply(200, SEEN))
    ended = run(line)
    assert ended.code == 0
    [asked] = service.requests
    assert (asked.method, asked.body) == (method, body)
    for text in (
        "66%",
        "/scratch/0.log",
        "and 1 more",
        "51 files",
        "would go",
        "3 kept: not needed",
        "! /other",
    ):
        assert text in ended.out
    assert "first pass" in ended.out
    assert "/scratch/50.log" not in ended.out


def test_a_full_node_is_shown_as_such(service: RecordedService, run: Run) -> None:
    full = {"name": "n1", "disk_full": "/scratch (71% used, 70% allowed)"}
    service.reply_with(Reply(200, {"items": [full]}))
    shown = run("nodes").out
    assert "disk full" in shown
    assert "nothing starts until there is room on /scratch" in shown


def test_nothing_to_delete_is_said(service: RecordedService, run: Run) -> None:
    service.reply_with(Reply(200, {**SEEN, "files": [], "freed_bytes": 0}))
    assert "nothing to delete" in run("clean n1 --yes").out


def test_without_roots_it_says_that_nothing_is_ever_deleted(service: RecordedService, run: Run) -> None:
    service.reply_with(Reply(200, {**SEEN, "roots": [], "files": [], "disks": [], "message": ""}))
    shown = run("disk n1").out
    assert "fleet.disk.roots" in shown
    assert "first pass" not in shown
