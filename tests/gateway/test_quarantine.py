"""Memory in quarantine over HTTP: where it is shown, and an operator's statement."""

from typing import Any

from gpubroker_server.core.domain.device import DeviceSample
from gpubroker_server.core.domain.lease import LeaseState, Proof
from gpubroker_server.core.domain.limits import ServiceLimits
from gpubroker_server.core.domain.orders import Gone, NodeLost
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Mib, Seconds, TaskId

from tests.builders import GIB, a_sample
from tests.gateway.harness import Client, Gateway

REASON = {"reason": "powered n1 off"}


async def a_lost_task(gateway: Gateway, api: Client, **fields: Any) -> str:
    """Its node no longer answers, so its process is not confirmed to be gone."""
    task = await api.submit(resources={"gpu_mb": 8 * GIB}, name="train", **fields)
    await gateway.admit(task)
    node = next(iter(gateway.world.nodes.values()))
    await gateway.hear(NodeLost(node.name, node.incarnation, gateway.clock.now(), "no beat"))
    return task


def in_use(gateway: Gateway, task: str, mb: int) -> DeviceSample:
    holder = f"{task}:{gateway.task(task).fence}"
    return a_sample("gpu0", gateway.clock.now(), used_mb=Mib(mb), by_holder={holder: Mib(mb)})


async def test_quarantined_memory_is_shown_at_task_device_and_in_explanations(
    gateway: Gateway, api: Client
) -> None:
    """It is also listed on its own."""
    task = await a_lost_task(gateway, api)
    [listed] = (await api.get("/quarantine")).json()["items"]
    assert (listed["id"], listed["name"], listed["attempt"], listed["rank"]) == (task, "train", 1, 0)
    assert (listed["node"], listed["node_ready"], listed["gpu_mb"]) == ("n1", False, 8 * GIB)
    assert listed["devices"] == [{"uuid": "gpu0", "index": 0, "gpu_mb": 8 * GIB, "measured_mb": 0}]
    assert listed["awaits"][0] == "agent_restarted"
    assert listed["awaits"][-1] == "statement"
    assert "n1 does not answer" in listed["message"]
    awaited = {name: listed[name] for name in ("quarantined_at", "awaits", "message")}

    assert (await api.get(f"/tasks/{task}")).json()["quarantine"] == [listed]
    [gpu] = (await api.get("/gpus")).json()["items"]
    assert [holder["quarantine"] for holder in gpu["holders"]] == [awaited]
    waiting = await api.submit(resources={"gpu_mb": 78 * GIB})
    [verdict] = (await api.get(f"/tasks/{waiting}/explain")).json()["devices"]
    assert [holder["quarantine"] for holder in verdict["holders"]] == [awaited]


async def test_an_earlier_attempt_stays_in_view_while_the_next_one_runs(
    gateway: Gateway, api: Client
) -> None:
    task = await a_lost_task(gateway, api)
    await gateway.reopen()
    await gateway.admit(task)
    shown = (await api.get(f"/tasks/{task}")).json()
    assert [share["state"] for share in shown["devices"]] == ["held"]
    assert [(one["attempt"], one["awaits"][0]) for one in shown["quarantine"]] == [(1, "process_absent")]
    released = await api.post(f"/quarantine/{task}/release", json=REASON)
    assert released.status_code == 200
    assert gateway.task(task).state is TaskState.RUNNING, "the running attempt is not affected"
    assert [share["state"] for share in (await api.get(f"/tasks/{task}")).json()["devices"]] == ["held"]


async def test_an_operators_statement_releases_memory_and_is_recorded(gateway: Gateway, api: Client) -> None:
    task = await a_lost_task(gateway, api)
    olga = await gateway.client("olga", "cluster:write", "cluster:read", tenant="ops")
    released = await olga.post(f"/quarantine/{task}/release", json=REASON)
    assert released.status_code == 200
    assert released.json() == {"id": task, "gpu_mb": 8 * GIB, "devices": ["gpu0"], "quarantine": []}
    assert (await api.get("/quarantine")).json()["items"] == []
    [note] = gateway.store.audited()
    assert (note.actor, note.action, note.reason) == ("olga", "quarantine.release", "powered n1 off")
    assert (note.tenant, note.at) == ("default", gateway.clock.now())
    log = (await api.get(f"/tasks/{task}/events")).json()["items"]
    [freed] = [event for event in log if event["kind"] == "lease.released"]
    assert freed["fields"]["proof"] == "statement"
    [asked] = [event for event in log if event["kind"] == "request.made"]
    said = asked["fields"]["fields"]
    assert (said["by"], said["reason"]) == ("olga", "powered n1 off")


async def test_released_memory_is_free_with_the_next_measurement(gateway: Gateway, api: Client) -> None:
    task = await a_lost_task(gateway, api)
    await gateway.reopen()
    await api.post(f"/tasks/{task}/cancel")
    await api.post(f"/quarantine/{task}/release", json=REASON)
    big = await api.submit(resources={"gpu_mb": 78 * GIB})
    [gpu] = (await api.get("/gpus")).json()["items"]
    assert (gpu["stale"], gpu["used_mb"], gpu["leased_mb"]) == (True, None, 0)
    gateway.clock.advance(1.0)
    gateway.world.measure([a_sample("gpu0", gateway.clock.now())])
    await gateway.admit(big)


async def test_a_statement_about_a_measured_process_is_refused(gateway: Gateway, api: Client) -> None:
    task = await a_lost_task(gateway, api)
    gateway.world.measure([in_use(gateway, task, 900)])
    refused = await api.post(f"/quarantine/{task}/release", json=REASON)
    assert (refused.status_code, refused.json()["code"]) == (409, "still-in-use")
    assert "900 MiB of n1/gpu0" in refused.json()["detail"]
    assert gateway.store.audited() == []


async def test_a_statement_about_memory_outside_quarantine_is_refused(gateway: Gateway, api: Client) -> None:
    task = await api.submit(resources={"gpu_mb": 8 * GIB})
    await gateway.admit(task)
    for holder in (task, "task_0"):
        refused = await api.post(f"/quarantine/{holder}/release", json=REASON)
        assert (refused.status_code, refused.json()["code"]) == (409, "nothing-quarantined")
    [lease] = gateway.world.leases_of(gateway.task(task))
    assert lease.state is LeaseState.HELD


async def test_a_statement_may_name_attempts_ranks_and_devices(gateway: Gateway, api: Client) -> None:
    task = await a_lost_task(gateway, api)
    for other in ({"attempts": [2]}, {"ranks": [1]}, {"devices": ["gpu9"]}):
        refused = await api.post(f"/quarantine/{task}/release", json={**REASON, **other})
        assert (refused.status_code, refused.json()["code"]) == (409, "nothing-quarantined")
        assert "other attempts, ranks or devices" in refused.json()["detail"]
    this = {"attempts": [1], "ranks": [0], "devices": ["gpu0"]}
    assert (await api.post(f"/quarantine/{task}/release", json={**REASON, **this})).status_code == 200


async def test_a_statement_needs_a_reason(api: Client) -> None:
    for body in ({}, {"reason": ""}, {"reason": "  "}, {"reason": "a\nb"}, {"reason": "x" * 501}):
        assert (await api.post("/quarantine/task_1/release", json=body)).status_code == 422


async def test_only_an_operator_may_release_and_sees_the_names_of_other_tenants(
    gateway: Gateway, api: Client
) -> None:
    task = await a_lost_task(gateway, api)
    viewer = await gateway.client("viewer", "cluster:read", "tasks:write", tenant="vision")
    [seen] = (await viewer.get("/quarantine")).json()["items"]
    assert (seen["id"], seen["name"], seen["tenant"]) == (None, None, "default")
    refused = await viewer.post(f"/quarantine/{task}/release", json=REASON)
    assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")


async def test_without_a_leader_the_request_is_stored(gateway: Gateway, api: Client) -> None:
    task = await a_lost_task(gateway, api)
    gateway.leads = False
    gateway.change(limits=ServiceLimits(settle_seconds=Seconds(0.01)))
    client = await gateway.client("olga")
    asked = await client.post(f"/quarantine/{task}/release", json=REASON)
    assert asked.status_code == 202
    assert [one["id"] for one in asked.json()["quarantine"]] == [task]


async def test_a_proof_ends_a_quarantine_too(gateway: Gateway, api: Client) -> None:
    task = await a_lost_task(gateway, api)
    await gateway.hear(
        Gone(TaskId(task), gateway.task(task).fence, gateway.clock.now(), Proof.PROCESS_ABSENT)
    )
    assert (await api.get("/quarantine")).json()["items"] == []


async def test_a_late_release_by_the_holder_is_recorded(gateway: Gateway, api: Client) -> None:
    lease = (await api.post("/leases", json={"holder": "vllm", "gpu_mb": GIB, "ttl_seconds": 30})).json()[
        "id"
    ]
    await gateway.plan(lease)
    await gateway.pass_time(91.0)
    [one] = (await api.get("/quarantine")).json()["items"]
    assert (one["id"], one["kind"], one["awaits"][0]) == (lease, "external", "released")
    await api.delete(f"/leases/{lease}")
    assert [(note.actor, note.action) for note in gateway.store.audited()] == [("admin", "lease.release")]
