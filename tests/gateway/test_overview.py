"""Devices, nodes, totals, metrics: what the World shows of the cluster."""

import re

from gpubroker_server.core.domain.lease import Proof
from gpubroker_server.core.domain.orders import Gone
from gpubroker_server.core.domain.units import Instant, NodeName
from msgspec.structs import replace

from tests.builders import GIB, a_device, a_sample
from tests.gateway.harness import Client, Gateway, problem


async def test_a_device_shows_what_is_leased_used_foreign_and_unaccounted_for(
    gateway: Gateway, api: Client
) -> None:
    task_id = await api.submit(name="train", resources={"gpu_mb": 40 * GIB}, priority=72)
    await gateway.admit(task_id)
    sample = a_sample(
        "gpu0", used_mb=50 * GIB, foreign_mb=4 * GIB, by_holder={f"{task_id}:1": 41 * GIB}, utilization=0.5
    )
    gateway.world.measure([sample])
    gpu = (await api.get("/gpus")).json()["items"][0]
    assert {
        name: gpu[name]
        for name in ("uuid", "node", "kind", "physical_mb", "leased_mb", "used_mb", "foreign_mb")
    } == {
        "uuid": "gpu0",
        "node": "n1",
        "kind": "H100",
        "physical_mb": 80 * GIB,
        "leased_mb": 40 * GIB,
        "used_mb": 50 * GIB,
        "foreign_mb": 4 * GIB,
    }
    assert (gpu["unaccounted_mb"], gpu["free_mb"], gpu["utilization"]) == (5 * GIB, 30 * GIB, 0.5)
    holder = gpu["holders"][0]
    assert (holder["id"], holder["name"], holder["band"]) == (task_id, "train", "interactive")
    assert (holder["gpu_mb"], holder["measured_mb"], holder["state"]) == (40 * GIB, 41 * GIB, "held")
    assert holder["stopping"] is False


async def test_a_holder_under_notice_is_shown_as_stopping(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit(resources={"gpu_mb": 60 * GIB}, priority=10)
    await gateway.admit(task_id)
    gateway.clock.advance(1)
    await gateway.plan(await api.submit(resources={"gpu_mb": 60 * GIB}, priority=90))
    assert (await api.get("/gpus")).json()["items"][0]["holders"][0]["stopping"] is True


async def test_pledged_memory_is_shown_with_what_has_arrived(gateway: Gateway, api: Client) -> None:
    victim = await api.submit(resources={"gpu_mb": 70 * GIB}, priority=10)
    await gateway.admit(victim)
    task_id = await api.submit(resources={"gpu_mb": 20 * GIB}, priority=90)
    gateway.clock.advance(1)
    await gateway.plan(task_id)
    before = (await api.get("/gpus")).json()["items"][0]
    await gateway.end(victim)
    after = (await api.get("/gpus")).json()["items"][0]
    for gpu, arrived_mb, free_mb in ((before, 0, 10 * GIB), (after, 20 * GIB, 60 * GIB)):
        assert (gpu["pledged_mb"], gpu["pledges"][0]["task"]) == (20 * GIB, task_id)
        assert (gpu["pledges"][0]["arrived_mb"], gpu["free_mb"]) == (arrived_mb, free_mb)


async def test_other_tenants_holders_have_no_name(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit(name="secret-plan", resources={"gpu_mb": 1024})
    await gateway.admit(task_id)
    viewer = await gateway.client("viewer", "cluster:read", tenant="vision")
    answer = await viewer.get("/gpus")
    holder = answer.json()["items"][0]["holders"][0]
    assert (holder["id"], holder["name"], holder["tenant"]) == (None, None, "default")
    assert "secret-plan" not in answer.text
    assert task_id not in answer.text


async def test_a_device_without_a_recent_sample_is_stale(gateway: Gateway, api: Client) -> None:
    assert (await api.get("/gpus")).json()["items"][0]["stale"] is False
    gateway.clock.advance(7)
    assert (await api.get("/gpus")).json()["items"][0]["stale"] is True


async def test_a_node_shows_what_its_runs_use(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit(resources={"cpu": 4, "memory_mb": 2048})
    await gateway.admit(task_id)
    node = (await api.get("/nodes")).json()["items"][0]
    assert (node["name"], node["ready"], node["gpus"]) == ("n1", True, 1)
    assert node["cpu"] == {"total": 64.0, "used": 4.0, "free": 60.0}
    assert node["memory_mb"] == {"total": 256 * GIB, "used": 2048, "free": 256 * GIB - 2048}
    assert node["runs"] == {"limit": 64, "used": 1}


async def test_a_node_shows_the_release_of_its_agent_and_what_to_do(gateway: Gateway, api: Client) -> None:
    assert (await api.get("/nodes")).json()["items"][0]["agent"] is None
    old = {"release": "0.0.1", "protocol": 6, "outdated": True, "message": "upgrade it"}
    gateway.executor = {**gateway.executor, "agents": {"n1": old, "elsewhere": old}}
    assert [node["agent"] for node in (await api.get("/nodes")).json()["items"]] == [old]


async def test_a_gpu_that_cannot_be_used_is_shown_with_the_reason(gateway: Gateway, api: Client) -> None:
    [gpu] = (await api.get("/gpus")).json()["items"]
    assert gpu["fault"] is None
    agent = {"release": "0.1.0", "protocol": 7, "outdated": False, "message": None}
    agent["gpu_faults"] = {gpu["uuid"]: "the driver does not answer", "GPU 3": "GPU is lost"}
    gateway.executor = {**gateway.executor, "agents": {"n1": agent}}
    [gpu] = (await api.get("/gpus")).json()["items"]
    assert gpu["fault"] == "the driver does not answer"
    [node] = (await api.get("/nodes")).json()["items"]
    assert node["agent"]["gpu_faults"]["GPU 3"] == "GPU is lost"


async def test_a_gpu_of_a_node_that_shows_none_has_the_reason(gateway: Gateway, api: Client) -> None:
    agent = {"release": "0.1.0", "protocol": 7, "outdated": False, "message": None, "gpu_faults": {}}
    agent["gpu_absence"] = "the NVIDIA driver is not loaded"
    gateway.executor = {**gateway.executor, "agents": {"n1": agent}}
    [gpu] = (await api.get("/gpus")).json()["items"]
    assert gpu["fault"] == "the NVIDIA driver is not loaded"
    [node] = (await api.get("/nodes")).json()["items"]
    assert node["agent"]["gpu_absence"] == "the NVIDIA driver is not loaded"


async def test_a_node_shows_since_when_its_agent_is_silent(gateway: Gateway, api: Client) -> None:
    assert (await api.get("/nodes")).json()["items"][0]["silent_since"] is None
    gateway.silent = {NodeName("n1"): Instant(0.0), NodeName("elsewhere"): Instant(1.0)}
    [node] = (await api.get("/nodes")).json()["items"]
    assert node["silent_since"] == "1970-01-01T00:00:00.000Z"


async def test_the_totals_count_every_task_once(gateway: Gateway, api: Client) -> None:
    running = await api.submit(resources={"gpu_mb": 10 * GIB})
    await gateway.admit(running)
    await gateway.end(await api.submit())
    await api.post(f"/tasks/{await api.submit()}/cancel")
    await api.submit()
    stats = (await api.get("/stats")).json()
    assert stats["tasks"] == {
        "pending": 1,
        "admitted": 0,
        "running": 1,
        "stopping": 0,
        "completed": 1,
        "succeeded": 1,
        "failed": 0,
        "cancelled": 1,
        "expired": 0,
    }
    assert (stats["gpu"]["total_mb"], stats["gpu"]["leased_mb"]) == (80 * GIB, 10 * GIB)
    assert set(stats["models"].values()) == {0}
    assert stats["executor"] == {"state": "connected", "address": "here", "message": ""}
    assert stats["leader"] == {"term": 1, "holder": "here:1"}


async def test_utilization_is_the_used_share_of_memory_and_compute_has_its_own(
    gateway: Gateway, api: Client
) -> None:
    sample = a_sample("gpu0", gateway.clock.now(), used_mb=20 * GIB)
    gateway.world.measure([replace(sample, utilization=0.9)])
    gpu = (await api.get("/stats")).json()["gpu"]
    assert (gpu["utilization"], gpu["compute_utilization"]) == (0.25, 0.9)
    gateway.world.ledgers[sample.device].sample = None
    gpu = (await api.get("/stats")).json()["gpu"]
    assert (gpu["utilization"], gpu["compute_utilization"]) == (None, None)


async def test_overviews_say_how_old_they_are(gateway: Gateway, api: Client) -> None:
    gateway.age = 1.5
    for path in ("/gpus", "/nodes", "/stats"):
        view = (await api.get(path)).json()
        assert (view["age_seconds"], view["position"]) == (1.5, gateway.world.position)
        assert view["as_of"] == "1970-01-12T13:46:40.000Z"


async def test_an_overview_that_is_too_old_is_refused(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit()
    gateway.age = 31
    for path in ("/gpus", "/nodes", "/stats"):
        response = await api.get(path)
        assert problem(response, 503, "follower-stale")["retryable"] is True
        assert response.headers["retry-after"] == "1"
    assert (await api.get(f"/tasks/{task_id}")).status_code == 200


async def test_metrics_show_tasks_devices_and_requests(gateway: Gateway, api: Client) -> None:
    running = await api.submit(resources={"gpu_mb": 10 * GIB})
    await gateway.admit(running)
    await gateway.end(await api.submit())
    await api.submit(priority=95)
    held = await api.submit(priority=5)
    await api.patch(f"/tasks/{held}", json={"held": True})
    gateway.world.measure([a_sample("gpu0", used_mb=11 * GIB, utilization=0.25)])
    text = (await api.get("/metrics")).text
    gpu = 'UUID="gpu0",gpu="0",hostname="n1"'
    requests = "gpubroker_http_request_duration_seconds_count"
    for line in (
        'gpubroker_tasks{band="critical",state="pending"} 1.0',
        'gpubroker_tasks{band="idle",state="pending"} 1.0',
        'gpubroker_tasks{band="batch",state="running"} 1.0',
        'gpubroker_pending_tasks{reason="Held"} 1.0',
        'gpubroker_pending_tasks{reason="Queued"} 1.0',
        'gpubroker_tasks_finished_total{state="succeeded"} 1.0',
        f"gpubroker_gpu_memory_capacity_bytes{{{gpu}}} {80 * GIB * 2**20:.12g}",
        f"gpubroker_gpu_utilization_ratio{{{gpu}}} 0.25",
        f'gpubroker_gpu_info{{{gpu},kind="H100"}} 1.0',
        'gpubroker_node_ready{hostname="n1"} 1.0',
        f"gpubroker_event_log_position {float(gateway.world.position)}",
        "gpubroker_leader_known 1.0",
        "gpubroker_leader_term 1.0",
        "gpubroker_leader_lease_seconds 2.0",
        f'{requests}{{method="POST",route="/tasks",status="202"}} 4.0',
        f'{requests}{{method="PATCH",route="/tasks/{{task_id}}",status="200"}} 1.0',
    ):
        assert _normal(line) in {_normal(found) for found in text.splitlines()}, line


async def test_metrics_show_the_oldest_wait_and_the_number_of_preemptions(
    gateway: Gateway, api: Client
) -> None:
    victim = await api.submit(resources={"gpu_mb": 60 * GIB}, priority=10)
    await gateway.admit(victim)
    gateway.clock.advance(30)
    urgent = await api.submit(resources={"gpu_mb": 60 * GIB}, priority=95)
    gateway.clock.advance(20)
    await api.submit(resources={"gpu_mb": 60 * GIB}, priority=91)
    metrics = (await api.get("/metrics")).text
    assert 'gpubroker_pending_oldest_seconds{band="critical"} 20.0' in metrics
    assert 'gpubroker_pending_oldest_seconds{band="background"}' not in metrics, "it runs"
    assert 'gpubroker_preemptions_total{holder="task"} 0.0' in metrics
    gateway.world.measure([a_sample("gpu0", gateway.clock.now())])
    await gateway.plan(urgent)
    row = gateway.task(victim)
    await gateway.hear(Gone(row.id, row.fence, gateway.clock.now(), Proof.PROCESS_ABSENT))
    metrics = (await api.get("/metrics")).text
    assert 'gpubroker_preemptions_total{holder="task"} 1.0' in metrics
    assert 'gpubroker_preemptions_total{holder="model"} 0.0' in metrics
    assert 'gpubroker_pending_oldest_seconds{band="background"} 50.0' in metrics, "since its submit"


async def test_no_task_is_a_label(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit(name="nightly", resources={"gpu_mb": 1024})
    await gateway.admit(task_id)
    await api.get(f"/tasks/{task_id}")
    await api.get(f"/nowhere/{task_id}")
    text = (await api.get("/metrics")).text
    assert "task_0" not in text
    assert "nightly" not in text
    assert 'route="unmatched",status="404"' in text


def _normal(line: str) -> str:
    """Numbers as floats, so that 8.589934592e+010 and 85899345920 are equal."""
    name, _, value = line.rpartition(" ")
    return (
        line if line.startswith("#") or not re.fullmatch(r"[-+.0-9e]+", value) else f"{name} {float(value)}"
    )


async def test_a_run_above_its_lease_is_shown(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit(name="train", resources={"gpu_mb": 10 * GIB})
    await gateway.admit(task_id)
    used = a_sample("gpu0", used_mb=12 * GIB, by_holder={f"{task_id}:1": 12 * GIB})
    gateway.world.measure([used])
    [holder] = (await api.get("/gpus")).json()["items"][0]["holders"]
    assert holder["overused_mb"] is None
    await gateway.turn()
    [holder] = (await api.get("/gpus")).json()["items"][0]["holders"]
    assert (holder["gpu_mb"], holder["measured_mb"], holder["overused_mb"]) == (10 * GIB, 12 * GIB, 12 * GIB)
    [device] = (await api.get(f"/tasks/{task_id}")).json()["devices"]
    assert device["overused_mb"] == 12 * GIB
    assert "used 12.0 GiB of n1/gpu0" in (await api.get(f"/tasks/{task_id}/explain")).json()["message"]
    metrics = (await api.get("/metrics")).text
    over = re.search(r"^gpubroker_gpu_memory_overused_bytes{.*} (.*)$", metrics, re.MULTILINE)
    assert over is not None
    assert float(over[1]) == 2 * 2**30


async def test_free_memory_that_the_usual_demands_cannot_use_is_shown(gateway: Gateway, api: Client) -> None:
    await gateway.admit(await api.submit(resources={"gpu_mb": 50 * GIB}))
    assert (await api.get("/stats")).json()["fragmentation"]["share"] == 1.0, "50 GiB are usual, 30 are left"
    await api.submit(resources={"gpu_mb": 30 * GIB})
    told = (await api.get("/stats")).json()["fragmentation"]
    half = {"free_mb": 30 * GIB, "stranded_mb": 15 * GIB, "share": 0.5}
    assert told == {**half, "kinds": [{"kind": "H100", **half}], "scattered": None}
    [gpu] = (await api.get("/gpus")).json()["items"]
    assert (gpu["free_mb"], gpu["stranded_mb"]) == (30 * GIB, 15 * GIB)
    metrics = (await api.get("/metrics")).text
    stranded = re.search(r"^gpubroker_gpu_memory_stranded_bytes{.*} (.*)$", metrics, re.MULTILINE)
    assert stranded is not None
    assert float(stranded[1]) == 15 * 2**30
    assert "gpubroker_gpu_memory_scattered 0.0" in metrics


async def test_memory_that_is_free_only_in_pieces_raises_an_alert(gateway: Gateway, api: Client) -> None:
    await gateway.join(a_device(), a_device("gpu1"))
    gateway.world.measure([a_sample("gpu1")])
    for _ in range(2):
        await gateway.admit(await api.submit(resources={"gpu_mb": 50 * GIB}))
    for _ in range(2):
        await api.submit(resources={"gpu_mb": 40 * GIB})
    told = (await api.get("/stats")).json()["fragmentation"]["scattered"]
    assert told == {
        "gpus": 1,
        "gpu_mb": 40 * GIB,
        "waiting": 2,
        "free_mb": 60 * GIB,
        "largest_mb": 30 * GIB,
    }
    assert "gpubroker_gpu_memory_scattered 2.0" in (await api.get("/metrics")).text
