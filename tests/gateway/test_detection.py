"""Silent nodes that the leader holds back: how that is shown, and resuming."""

from gpubroker_server.core.domain.limits import ServiceLimits
from gpubroker_server.core.domain.units import Instant, NodeName, Seconds
from gpubroker_server.core.lifecycle.silent_nodes import PausedDetection

from tests.builders import NOW
from tests.gateway.harness import Client, Gateway

PAUSED = PausedDetection(
    "2 nodes with 7 of 20 runs", (NodeName("n1"), NodeName("n2")), 7, 20, Instant(NOW - 60.0)
)
REASON = {"reason": "rack 4 has no power"}


async def paused(gateway: Gateway, *scopes: str) -> Client:
    gateway.paused_nodes = PAUSED
    return await gateway.client("olga", *scopes, tenant="ops")


async def test_detection_is_normally_not_paused(api: Client) -> None:
    assert (await api.get("/stats")).json()["detection"]["state"] == "watching"
    assert (await api.get("/readyz")).json()["parts"]["nodes"] == "ok"
    assert "gpubroker_silent_nodes 0.0" in (await api.get("/metrics")).text
    refused = await api.post("/detection/resume", json=REASON)
    assert (refused.status_code, refused.json()["code"]) == (409, "nothing-paused")


async def test_detection_pause_is_shown_everywhere_and_the_service_stays_ready(
    gateway: Gateway,
) -> None:
    """It is shown in stats, readiness and metrics."""
    olga = await paused(gateway)
    told = (await olga.get("/stats")).json()["detection"]
    assert (told["state"], told["nodes"], told["runs"], told["of_runs"]) == ("paused", ["n1", "n2"], 7, 20)
    assert told["message"] == PAUSED.message
    ready = await olga.get("/readyz")
    assert (ready.status_code, ready.json()["status"]) == (200, "ready")
    assert ready.json()["parts"]["nodes"] == "paused: n1, n2 silent"
    running = await olga.submit()
    await gateway.admit(running)
    task = await olga.submit()
    said = (await olga.get(f"/tasks/{task}/explain")).json()["message"]
    assert said.endswith("(paused: n1, n2 silent; gpubroker stats says why)")
    assert [item["notice"] for item in (await olga.get("/tasks")).json()["items"]] == [
        "paused: n1, n2 silent"
    ] * 2
    await olga.post(f"/tasks/{task}/cancel")
    await gateway.turn()
    assert "paused" not in (await olga.get(f"/tasks/{task}/explain")).json()["message"]
    assert "gpubroker_silent_nodes 2.0" in (await olga.get("/metrics")).text


async def test_operator_has_the_leader_give_up_the_nodes_that_are_silent_now(
    gateway: Gateway,
) -> None:
    olga = await paused(gateway, "cluster:write")
    asked = await olga.post("/detection/resume", json=REASON)
    assert (asked.status_code, asked.json()["nodes"]) == (200, ["n1", "n2"])
    [note] = gateway.store.audited()
    assert (note.actor, note.tenant, note.subject) == ("olga", "ops", "n1, n2")
    assert note.reason == "rack 4 has no power"


async def test_without_a_leader_the_request_is_stored(gateway: Gateway) -> None:
    gateway.leads = False
    gateway.change(limits=ServiceLimits(settle_seconds=Seconds(0.01)))
    olga = await paused(gateway)
    assert (await olga.post("/detection/resume", json=REASON)).status_code == 202


async def test_resuming_needs_an_operator_and_a_reason(gateway: Gateway) -> None:
    viewer = await paused(gateway, "cluster:read", "tasks:write")
    assert (await viewer.post("/detection/resume", json=REASON)).status_code == 403
    olga = await gateway.client("olga2", "cluster:write")
    assert (await olga.post("/detection/resume", json={"reason": " "})).status_code == 422
