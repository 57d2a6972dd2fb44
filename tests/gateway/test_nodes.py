"""What nodes and their devices hold, what is measured of them now, and what was in the last hour."""

from typing import Any

import pytest
from gpubroker_server.core.control.fleet import FleetSeen
from gpubroker_server.core.control.history import POINTS, STEP_SECONDS, step_of
from gpubroker_server.core.control.idle import Idle
from gpubroker_server.core.domain.device import DiskSample, GpuHealth, NodeSample, StoreSample
from gpubroker_server.core.domain.units import Instant, Mib, NodeName
from gpubroker_server.gateway.cluster.history import PAGE_POINTS
from msgspec.structs import asdict

from tests.builders import GIB, a_device, a_node, a_sample
from tests.gateway.harness import Client, Gateway, fault, problem

HEALTH = GpuHealth(412.5, 61.0, 1980, 2619, 3, 79)


def measure(gateway: Gateway, cpu: float = 0.25, **fields: Any) -> None:
    now = gateway.clock.now()
    disks = (DiskSample("/", 1000 * 2**20, 250 * 2**20),)
    about: dict[str, Any] = {"memory_pressure": 0.5, "disks": disks, "received_bytes": 7, "sent_bytes": 8}
    about |= {"store": StoreSample(64, 3), "store_used_mb": 16, "gpus": {"gpu0": HEALTH}, **fields}
    sample = NodeSample(NodeName("n1"), now, cpu, Mib(1000), Mib(400), **about)
    gateway.world.measure([a_sample("gpu0", now, utilization=cpu, used_mb=2 * GIB)], [sample])
    for _ in gateway.parts.history.follow(gateway.world):
        pass


async def test_a_node_shows_what_is_held_and_what_is_measured(gateway: Gateway, api: Client) -> None:
    gpu_task = await api.submit(name="gpu", resources={"gpu_mb": 10 * GIB})
    cpu_task = await api.submit(name="cpu", resources={"cpu": 4})
    for task in (gpu_task, cpu_task):
        await gateway.admit(task)
    measure(gateway)
    gateway.world.full_disks[NodeName("n1")] = "/ (75% used, 70% allowed)"
    [node] = (await api.get("/nodes")).json()["items"]
    assert node["disk_full"] == "/ (75% used, 70% allowed)"
    assert node["gpu_mb"] == {"total": 80 * GIB, "used": 10 * GIB, "free": 68 * GIB}, (
        "2 GiB are in use unasked"
    )
    about = {"kind": "run", "tenant": "default"}
    assert node["holders"] == [
        {"id": gpu_task, "name": "gpu", "gpus": 1, "gpu_mb": 10 * GIB, **about},
        {"id": cpu_task, "name": "cpu", "gpus": 0, "gpu_mb": 0, **about},
    ]
    assert node["measured"] == {
        "sampled_at": node["measured"]["sampled_at"],
        "stale": False,
        "cpu": 0.25,
        "memory_total_mb": 1000,
        "memory_available_mb": 400,
        "memory_pressure": 0.5,
        "disks": [{"path": "/", "total_mb": 1000, "free_mb": 250}],
        "received_bytes": 7,
        "sent_bytes": 8,
        "object_store": {"total_mb": 64, "spilled_mb": 3, "used_mb": 16},
    }
    gateway.clock.advance(3 * gateway.policy.sample_period_seconds + 1)
    [node] = (await api.get("/nodes")).json()["items"]
    assert node["measured"]["stale"] is True


async def test_holders_of_other_tenants_have_no_names(gateway: Gateway, api: Client) -> None:
    await gateway.admit(await api.submit(name="secret", resources={"gpu_mb": GIB}))
    other = await gateway.client("other", "cluster:read", tenant="acme")
    for path in ("/nodes", "/gpus"):
        [item] = (await other.get(path)).json()["items"]
        assert [(one["id"], one["name"], one["tenant"]) for one in item["holders"]] == [
            (None, None, "default")
        ]


@pytest.mark.parametrize(
    ("sort", "names"),
    [
        ("name", "n1 n2 n3"),
        ("-name", "n3 n2 n1"),
        ("cpu", "n3 n1 n2"),
        ("-cpu", "n1 n2 n3"),
        ("-memory_mb", "n2 n1 n3"),
        ("gpu_mb", "n2 n3 n1"),
        ("-runs", "n3 n1 n2"),
        ("idle_seconds", "n2 n1 n3"),
        ("-idle_seconds", "n1 n2 n3"),
    ],
)
async def test_nodes_are_sorted_as_asked(gateway: Gateway, api: Client, sort: str, names: str) -> None:
    usual = a_node()
    for other in (a_node("n2", memory_mb=2 * usual.memory_mb), a_node("n3")):
        await gateway.join(node=other)
    resources = {"gpus": 0, "cpu": 4, "nodes": {"node": ["n3"]}}
    await gateway.admit(await api.submit(resources=resources))
    now = gateway.clock.now()
    idle = tuple(Idle(name, 0.0, Instant(now - ago)) for name, ago in (("n1", 9.0), ("n2", 5.0)))
    gateway.fleet = FleetSeen(idle=idle)
    listed = (await api.get("/nodes", params={"sort": sort})).json()["items"]
    assert [node["name"] for node in listed] == names.split()


async def test_nodes_are_not_sorted_by_what_they_do_not_have(api: Client) -> None:
    fault(await api.get("/nodes?sort=price"), "query:sort")


async def test_one_node_is_shown_with_its_devices(gateway: Gateway, api: Client) -> None:
    measure(gateway)
    node = (await api.get("/nodes/n1")).json()
    [listed] = (await api.get("/nodes")).json()["items"]
    assert {name: value for name, value in node.items() if name != "devices"} == listed
    assert node["devices"] == (await api.get("/gpus")).json()["items"]
    assert "nodes: n1" in problem(await api.get("/nodes/n7"), 404, "not-found")["detail"]


async def test_a_gpu_shows_its_health_while_its_driver_answers(gateway: Gateway, api: Client) -> None:
    [gpu] = (await api.get("/gpus")).json()["items"]
    assert gpu["health"] is None
    measure(gateway)
    [gpu] = (await api.get("/gpus")).json()["items"]
    assert gpu["health"] == asdict(HEALTH)
    measure(gateway, gpus={})
    [gpu] = (await api.get("/gpus")).json()["items"]
    assert gpu["health"] is None


async def test_a_node_that_was_never_measured_says_so(api: Client) -> None:
    [node] = (await api.get("/nodes")).json()["items"]
    assert (node["measured"], node["holders"], node["history"]["values"]) == (None, [], {})


@pytest.mark.parametrize(
    ("query", "points"), [("", 30), ("?history=0", 0), ("?history=1h", 360), ("?history=90s", 9)]
)
async def test_the_history_is_as_long_as_asked_for(
    gateway: Gateway, api: Client, query: str, points: int
) -> None:
    measure(gateway, 0.25)
    gateway.clock.advance(2 * STEP_SECONDS)
    measure(gateway, 0.5)
    [node] = (await api.get(f"/nodes{query}")).json()["items"]
    [gpu] = (await api.get(f"/gpus{query}")).json()["items"]
    assert (await api.get(f"/nodes/n1{query}")).json()["history"] == node["history"]
    assert node["history"]["step_seconds"] == STEP_SECONDS
    for name, of in (("cpu", node), ("utilization", gpu)):
        values = of["history"]["values"][name]
        assert len(values) == points
        assert [value for value in values if value is not None] == [0.25, 0.5][: 2 if points else 0]
        assert values[-1:] == [0.5][:points]
    assert sorted(gpu["history"]["values"]) == [
        "power_watts",
        "temperature_celsius",
        "used_mb",
        "utilization",
    ]
    assert sorted(node["history"]["values"]) == ["cpu", "disk", "memory_used_mb"]


async def test_a_history_begins_with_a_step(gateway: Gateway, api: Client) -> None:
    measure(gateway)
    [gpu] = (await api.get("/gpus?history=10s")).json()["items"]
    at = Instant(step_of(gateway.clock.now()) * STEP_SECONDS)
    assert gpu["history"]["since"].endswith("Z")
    assert at <= gateway.clock.now()
    assert gpu["history"]["values"]["used_mb"] == [2 * GIB]


@pytest.mark.parametrize("path", ["/gpus?history=1h", "/nodes?history=1h", "/nodes?history=1h&sort=-cpu"])
async def test_a_list_with_a_long_history_comes_in_pages(gateway: Gateway, api: Client, path: str) -> None:
    for number in range(2, PAGE_POINTS // POINTS + 3):
        node = f"n{number}"
        gateway.world.add_node(a_node(node, cpu=float(number)))
        gateway.world.add_device(a_device(f"gpu{number}", node))
    first = (await api.get(path)).json()
    second = (await api.get(f"{path}&cursor={first['next_cursor']}")).json()
    assert (len(first["items"]), first["has_more"]) == (PAGE_POINTS // POINTS, True)
    assert (len(second["items"]), second["has_more"], second["next_cursor"]) == (2, False, None)
    seen = {item.get("uuid") or item["name"] for item in (*first["items"], *second["items"])}
    assert len(seen) == len(gateway.world.nodes)
    whole = (await api.get(path.replace("1h", "5m"))).json()
    assert (len(whole["items"]), whole["has_more"]) == (len(seen), False), "as it was"
    few = (await api.get(f"{path}&limit=3")).json()
    assert few["items"] == first["items"][:3]


async def test_a_cursor_of_another_list_is_refused(gateway: Gateway, api: Client) -> None:
    gateway.world.add_device(a_device("gpu2"))
    cursor = (await api.get("/gpus?limit=1")).json()["next_cursor"]
    for path in (f"/nodes?cursor={cursor}", f"/gpus?idle=true&cursor={cursor}", "/gpus?cursor=x"):
        problem(await api.get(path), 400, "cursor-invalid")


@pytest.mark.parametrize(("text", "said"), [("2h", "1h or less"), ("soon", "write 90s, 15m or 1h30m")])
@pytest.mark.parametrize("path", ["/nodes", "/nodes/n1", "/gpus"])
async def test_a_history_that_is_not_kept_is_refused(api: Client, path: str, text: str, said: str) -> None:
    refused = problem(await api.get(f"{path}?history={text}"), 422, "validation-failed")
    assert said in refused["errors"][0]["detail"]


async def test_metrics_show_what_was_measured_lately(gateway: Gateway, api: Client) -> None:
    measure(gateway)
    found = set((await api.get("/metrics")).text.splitlines())
    gpu = 'UUID="gpu0",gpu="0",hostname="n1"'
    for line in (
        'gpubroker_node_cpu_utilization_ratio{hostname="n1"} 0.25',
        'gpubroker_node_memory_capacity_bytes{hostname="n1"} 1.048576e+09',
        'gpubroker_node_memory_available_bytes{hostname="n1"} 4.194304e+08',
        'gpubroker_node_memory_pressure_ratio{hostname="n1"} 0.5',
        'gpubroker_node_disk_capacity_bytes{hostname="n1",path="/"} 1.048576e+09',
        'gpubroker_node_disk_free_bytes{hostname="n1",path="/"} 2.62144e+08',
        'gpubroker_node_network_received_bytes_total{hostname="n1"} 7.0',
        'gpubroker_node_network_sent_bytes_total{hostname="n1"} 8.0',
        'gpubroker_node_object_store_capacity_bytes{hostname="n1"} 6.7108864e+07',
        'gpubroker_node_object_store_used_bytes{hostname="n1"} 1.6777216e+07',
        'gpubroker_node_object_store_spilled_bytes{hostname="n1"} 3.145728e+06',
        f"gpubroker_gpu_power_watts{{{gpu}}} 412.5",
        f"gpubroker_gpu_temperature_celsius{{{gpu}}} 61.0",
        f"gpubroker_gpu_sm_clock_hertz{{{gpu}}} 1.98e+09",
        f"gpubroker_gpu_memory_clock_hertz{{{gpu}}} 2.619e+09",
        f"gpubroker_gpu_ecc_errors_total{{{gpu}}} 3.0",
        f"gpubroker_gpu_xid{{{gpu}}} 79.0",
    ):
        assert line in found
    measure(gateway, memory_pressure=None, store=None, gpus={"gpu0": GpuHealth()})
    text = (await api.get("/metrics")).text
    for name in ("pressure_ratio{", "spilled_bytes{", "object_store_capacity_bytes{", "gpu_xid{", "hertz{"):
        assert name not in text
    gateway.clock.advance(60.0)
    assert "gpubroker_node_cpu_utilization_ratio{" not in (await api.get("/metrics")).text


async def test_nodes_are_found_by_the_boot_id_of_their_machine(gateway: Gateway, api: Client) -> None:
    node = gateway.world.nodes[NodeName("n1")]
    found = (await api.get("/nodes", params={"boot_id": node.boot_id})).json()["items"]
    assert [one["name"] for one in found] == ["n1"]
    assert found[0]["task_user"] == ""
    assert (await api.get("/nodes", params={"boot_id": "of-another"})).json()["items"] == []
