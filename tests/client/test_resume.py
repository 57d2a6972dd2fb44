"""Letting the leader go on with silent nodes, through SDK and command line."""

import httpx
import pytest
from gpubroker import AsyncBroker, Refused
from gpubroker_server.core.domain.units import NodeName
from gpubroker_server.core.lifecycle.silent_nodes import PausedDetection

from tests.builders import NOW
from tests.client.command_line import Run
from tests.client.recorded_service import RecordedService, Reply
from tests.client.test_quarantine import answering
from tests.gateway.harness import Gateway

PAUSED = {
    "state": "paused",
    "message": "2 nodes with 7 of 20 runs fell silent at once",
    "nodes": ["n1", "n2"],
    "runs": 7,
    "of_runs": 20,
}
STATS = Reply(200, {"detection": PAUSED})


async def test_the_sdk_tells_of_a_pause_and_ends_it() -> None:
    async with Gateway() as gateway:
        token = (await gateway.client("sdk")).headers["authorization"].removeprefix("Bearer ")
        transport = httpx.ASGITransport(gateway.app)
        async with AsyncBroker("http://127.0.0.1:8470", token, transport=transport) as broker:
            assert (await broker.stats()).detection["state"] == "watching"
            with pytest.raises(Refused) as refused:
                await broker.resume("looked")
            assert refused.value.code == "nothing-paused"
            gateway.paused_nodes = PausedDetection(NOW, (NodeName("n1"),), 3, 4, "why")
            resumed = await broker.resume("looked")
            assert (resumed.state, resumed.nodes, resumed.runs, resumed.of_runs) == ("paused", ("n1",), 3, 4)
            assert (await broker.stats()).detection["message"] == "why"


def test_resume_says_what_is_asserted_and_asks(
    service: RecordedService, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.told(STATS, Reply(200, PAUSED), STATS)
    monkeypatch.setattr("sys.stdin", answering("y\n"))
    ended = run("resume --because", "no power")
    assert (ended.code, ended.out.strip()) == (0, "given up unless they answer first: n1, n2")
    assert PAUSED["message"] in ended.err
    assert "because 'no power'" in ended.err
    assert (service.asked[-1].path, service.asked[-1].body) == ("/detection/resume", {"reason": "no power"})
    monkeypatch.setattr("sys.stdin", answering("n\n"))
    assert run("resume --because looked").code == 6


def test_a_pause_is_seen_in_the_totals(service: RecordedService, run: Run) -> None:
    service.told(STATS)
    assert f"! {PAUSED['message']}" in run("stats").out
