"""Cordon, drain and uncordon through SDK and command line."""

from typing import Any

import httpx
import pytest
from gpubroker import AsyncBroker, Refused
from gpubroker_server.core.control.history import POINTS
from gpubroker_server.gateway.cluster.history import PAGE_POINTS

from tests.builders import a_device
from tests.client.command_line import Run
from tests.client.recorded_service import RecordedService, Reply
from tests.gateway.harness import Gateway

NODE: dict[str, Any] = {"name": "n2", "ready": True, "cordoned": True, "cordon_reason": "a fan"}
GPU = {"key": "local/n1/GPU-1", "uuid": "GPU-1", "node": "n1", "kind": "sim-24g", "physical_mb": 24576}
DRAIN = {"since": "2026-11-21T10:00:00Z", "deadline_at": "2026-11-21T10:10:00Z", "left": 3, "done": False}


async def test_the_sdk_cordons_drains_and_uncordons() -> None:
    async with Gateway() as gateway:
        token = (await gateway.client("sdk")).headers["authorization"].removeprefix("Bearer ")
        transport = httpx.ASGITransport(gateway.app)
        async with AsyncBroker("http://127.0.0.1:8470", token, transport=transport) as broker:
            closed = await broker.cordon("n1", "a fan")
            assert (closed.cordoned, closed.cordon_reason, closed.drain) == (True, "a fan", None)
            drained = await broker.drain("n1", deadline_seconds=600)
            assert drained.drain is not None
            assert (drained.drain.left, drained.drain.done) == (0, True)
            assert (await broker.stats()).nodes.cordoned == 1
            assert (await broker.uncordon("n1")).cordoned is False
            with pytest.raises(Refused, match="no node"):
                await broker.cordon("n9")


async def test_the_sdk_closes_and_reopens_a_gpu() -> None:
    async with Gateway() as gateway:
        token = (await gateway.client("sdk")).headers["authorization"].removeprefix("Bearer ")
        transport = httpx.ASGITransport(gateway.app)
        async with AsyncBroker("http://127.0.0.1:8470", token, transport=transport) as broker:
            closed = (await broker.close_gpu("n1/gpu0", "a fan")).closed
            assert closed is not None
            assert (closed.cause, closed.reason) == ("operator", "a fan")
            assert (await broker.reopen_gpu("gpu0")).closed is None
            with pytest.raises(Refused, match="no GPU"):
                await broker.close_gpu("gpu9")


@pytest.mark.parametrize(
    ("line", "path", "reason"),
    [
        ("close-gpu n1/gpu0 --because fan", "/gpus/n1%2Fgpu0/close", "fan"),
        ("reopen-gpu GPU-a", "/gpus/GPU-a/reopen", ""),
    ],
)
def test_the_commands_about_a_gpu_send_what_was_said(
    service: RecordedService, run: Run, line: str, path: str, reason: str
) -> None:
    shown = {"cause": "operator", "reason": "a fan", "since": "2026-11-21T10:00:00Z", "by": "olga"}
    service.reply_with(Reply(200, {**GPU, "closed": shown}))
    ended = run(line)
    assert ended.code == 0
    assert "! closed: a fan" in ended.out
    [asked] = service.requests
    assert (asked.method, asked.path, asked.body) == ("POST", path, {"reason": reason})


@pytest.mark.parametrize(
    ("line", "path", "body"),
    [
        ("cordon n2", "/nodes/n2/cordon", {"reason": ""}),
        ("drain n2", "/nodes/n2/drain", {"reason": ""}),
        (
            "drain n2 --deadline 10m --because fan",
            "/nodes/n2/drain",
            {"reason": "fan", "deadline_seconds": 600},
        ),
        ("uncordon n2 --because mended", "/nodes/n2/uncordon", {"reason": "mended"}),
    ],
)
def test_the_commands_send_what_was_said(
    service: RecordedService, run: Run, line: str, path: str, body: dict[str, Any]
) -> None:
    service.reply_with(Reply(200, NODE))
    ended = run(line)
    assert ended.code == 0
    assert "n2" in ended.out
    [asked] = service.requests
    assert (asked.method, asked.path, asked.body) == ("POST", path, body)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ["cordoned", "! n2: cordoned because 'a fan'"]),
        ({"ready": False}, ["not answering", "! n2: cordoned because 'a fan'"]),
        (
            {"drain": DRAIN},
            ["draining", "! n2: 3 still there; what is left at 2026-11-21 10:10:00Z is killed"],
        ),
        ({"drain": {**DRAIN, "deadline_at": None}}, ["draining", "! n2: 3 still there\n"]),
        ({"drain": {**DRAIN, "left": 0, "done": True}, "cordon_reason": ""}, ["drained"]),
    ],
)
def test_nodes_shows_what_is_closed_and_what_is_left(
    service: RecordedService, run: Run, fields: dict[str, Any], expected: list[str]
) -> None:
    service.reply_with(Reply(200, {"items": [{**NODE, **fields}]}))
    shown = "\n".join(line.rstrip() for line in run("nodes").out.splitlines()) + "\n"
    assert [text for text in expected if text not in shown] == [], shown
    assert ("!" in shown) == any("!" in text for text in expected)


def test_stats_counts_closed_nodes(service: RecordedService, run: Run) -> None:
    nodes = {"total": 5, "ready": 4, "cordoned": 2, "draining": 1}
    service.reply_with(
        Reply(200, {"nodes": nodes}), Reply(200, {"nodes": {**nodes, "cordoned": 0, "draining": 0}})
    )
    assert "4 of 5 ready · 2 cordoned · 1 draining" in run("stats").out
    assert "ready" not in run("stats").out


async def test_the_sdk_asks_for_one_node_and_for_more_of_the_past() -> None:
    async with Gateway() as gateway:
        token = (await gateway.client("sdk")).headers["authorization"].removeprefix("Bearer ")
        transport = httpx.ASGITransport(gateway.app)
        async with AsyncBroker("http://127.0.0.1:8470", token, transport=transport) as broker:
            node = await broker.node("n1", history="1h")
            assert [gpu.uuid for gpu in node.devices] == ["gpu0"]
            assert node.gpu_mb.total == (await broker.gpus()).items[0].physical_mb
            since = [(await broker.nodes(history=text)).items[0].history.since for text in ("1h", "0")]
            assert since == sorted(since)
            for number in range(2, PAGE_POINTS // POINTS + 3):
                gateway.world.add_device(a_device(f"gpu{number}", index=number))
            every = await broker.gpus(history="1h")
            assert (len(every), every.has_more) == (PAGE_POINTS // POINTS + 2, False)
            with pytest.raises(Refused, match="no node"):
                await broker.node("n9")


@pytest.mark.parametrize(
    ("measured", "shown"),
    [
        (None, []),
        ({"stale": True}, []),
        (
            {"cpu": 0.5, "memory_total_mb": 100, "memory_available_mb": 40, "disks": [], "stale": False},
            ["50%", "60%"],
        ),
        (
            {
                "cpu": 0.5, "memory_total_mb": 0, "memory_available_mb": 0, "stale": False,
                "disks": [{"total_mb": 0, "free_mb": 0}, {"total_mb": 100, "free_mb": 10}],
            },
            ["50%", "100%", "90%"],
        ),
    ],
)  # fmt: skip
def test_nodes_show_how_busy_and_full_they_are(
    service: RecordedService, run: Run, measured: dict[str, Any] | None, shown: list[str]
) -> None:
    service.reply_with(Reply(200, {"items": [{**NODE, "measured": measured}]}))
    assert [word for word in run("nodes").out.split() if word.endswith("%")] == shown
