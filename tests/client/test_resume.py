"""Giving up silent nodes after a pause of detection, through SDK and command line."""

import httpx
import pytest
from gpubroker import AsyncBroker, Refused
from gpubroker_server.core.domain.units import NodeName
from gpubroker_server.core.lifecycle.silent_nodes import PausedDetection

from tests.builders import NOW
from tests.client.command_line import Run
from tests.client.recorded_service import RecordedService, Reply
from tests.gateway.harness import Gateway

PAUSED = {
    "state": "paused",
    "message": "2 nodes with 7 of 20 runs fell silent at once",
    "nodes": ["n1", "n2"],
    "runs": 7,
    "of_runs": 20,
}
STATS = Reply(200, {"detection": PAUSED})


async def test_the_sdk_shows_and_ends_a_pause() -> None:
    async with Gateway() as gateway:
        token = (await gateway.client("sdk")).headers["authorization"].removeprefix("Bearer ")
        transport = httpx.ASGITransport(gateway.app)
        async with AsyncBroker("http://127.0.0.1:8470", token, transport=transport) as broker:
            assert (await broker.stats()).detection.state == "watching"
            with pytest.raises(Refused) as refused:
                await broker.resume("looked")
            assert refused.value.code == "nothing-paused"
            gateway.paused_nodes = PausedDetection("why", (NodeName("n1"),), 3, 4, NOW)
            resumed = await broker.resume("looked")
            assert (resumed.state, resumed.nodes, resumed.runs, resumed.of_runs) == ("paused", ("n1",), 3, 4)
            assert (await broker.stats()).detection.message == "why"


def test_resume_needs_a_reason_and_no_confirmation(service: RecordedService, run: Run) -> None:
    service.reply_with(Reply(200, PAUSED))
    ended = run("resume --because", "no power")
    assert (ended.code, ended.out.strip()) == (0, "given up unless they answer first: n1, n2")
    assert "because 'no power'" in ended.err
    [asked] = service.requests
    assert (asked.path, asked.body) == ("/detection/resume", {"reason": "no power"})
    assert run("resume").code == 2


def test_stats_shows_a_pause(service: RecordedService, run: Run) -> None:
    service.reply_with(STATS)
    assert f"! {PAUSED['message']}" in run("stats").out


def test_stats_shows_a_full_disk(service: RecordedService, run: Run) -> None:
    service.reply_with(Reply(200, {"disk_full": "disk full: /data (No space left on device)"}))
    assert "! disk full: /data" in run("stats").out
