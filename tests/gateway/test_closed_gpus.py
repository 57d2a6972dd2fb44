"""Close and reopen a GPU over HTTP, and what is shown of one that its driver reports as broken."""

from typing import Any

from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.device import GpuHealth, NodeSample
from gpubroker_server.core.domain.units import Mib, NodeName
from msgspec.structs import replace

from tests.builders import GIB, key
from tests.gateway.harness import Client, Gateway


async def the_gpu(api: Client) -> dict[str, Any]:
    [gpu] = (await api.get("/gpus")).json()["items"]
    return dict(gpu)


async def test_an_operator_closes_and_reopens_a_gpu(gateway: Gateway, api: Client) -> None:
    olga = await gateway.client("olga", "cluster:write", "cluster:read", tenant="ops")
    closed = await olga.post("/gpus/gpu0/close", json={"reason": "a fan is broken"})
    assert closed.status_code == 200
    shown = closed.json()["closed"]
    assert (shown["cause"], shown["reason"], shown["by"]) == ("operator", "a fan is broken", "olga")
    assert shown == (await the_gpu(api))["closed"]
    assert (await the_gpu(api))["free_mb"] == 0
    assert (await api.get("/stats")).json()["gpu"]["free_mb"] == 0
    [node] = (await api.get("/nodes")).json()["items"]
    assert node["gpu_mb"]["free"] == 0
    task = await api.submit(resources={"gpu_mb": GIB})
    told = (await api.get(f"/tasks/{task}/explain")).json()
    assert (told["reason"], "a fan is broken" in told["message"]) == ("GpuClosed", True)
    opened = await olga.post("/gpus/n1/gpu0/reopen", json={"reason": "replaced"})
    assert (opened.status_code, opened.json()["closed"]) == (200, None)
    await gateway.admit(task)
    notes = [(note.actor, note.action, note.reason) for note in gateway.store.audited()]
    assert notes == [("olga", "gpu.close", "a fan is broken"), ("olga", "gpu.reopen", "replaced")]


async def test_a_gpu_that_is_not_there_is_named_with_those_that_are(api: Client) -> None:
    answer = await api.post("/gpus/gpu7/close")
    assert (answer.status_code, answer.json()["code"]) == (404, "not-found")
    assert '"gpu7"; GPUs: n1/gpu0' in answer.json()["detail"]


async def test_closing_a_gpu_needs_the_scope_for_it(gateway: Gateway) -> None:
    reader = await gateway.client("reader", "cluster:read")
    assert (await reader.post("/gpus/gpu0/close")).status_code == 403


async def test_a_fatal_xid_closes_the_gpu_with_an_event(gateway: Gateway, api: Client) -> None:
    now = gateway.clock.now()
    broken = GpuHealth(xid=48, fatal_xid=48)
    await gateway.hear(NodeSample(NodeName("n1"), now, 0.1, Mib(1000), Mib(400), gpus={"gpu0": broken}))
    closed = (await the_gpu(api))["closed"]
    assert (closed["cause"], closed["reason"].startswith("XID 48: ")) == ("xid", True)
    events = (await api.get("/events", params={"limit": 500})).json()["items"]
    assert [e["fields"]["closure"]["cause"] for e in events if e["kind"] == "gpu.closed"] == ["xid"]


async def test_a_closed_gpu_is_found_closed_by_the_next_leader(gateway: Gateway, api: Client) -> None:
    await api.post("/gpus/gpu0/close", json={"reason": "a fan"})
    before = gateway.world.ledgers[key("gpu0")].device
    assert before.is_closed
    assert list((await gateway.store.snapshot()).devices) == [before]
    gone = replace(before, present=False, version=before.version + 1)
    await gateway.commit(Decision("n1", "node_seen", devices=(gone,)))
    assert list((await gateway.store.snapshot()).devices) == [gone], "it stays closed when it comes back"
