"""What a leader has found of the fleet: targets, idle devices, and work that is not taken now."""

import pytest
from gpubroker_server.core.control.backpressure import Pressure
from gpubroker_server.core.control.disk_guard import DiskLevel, DiskStanding
from gpubroker_server.core.control.fleet import FleetSeen, TargetSeen
from gpubroker_server.core.control.idle import Idle
from gpubroker_server.core.control.node_watch import Overload
from gpubroker_server.core.domain.device import DiskSample, NodeSample
from gpubroker_server.core.domain.units import Instant, Mib, NodeName, Seconds
from gpubroker_server.telemetry.fleet import LOOKED
from msgspec.structs import replace

from tests.builders import NOW, key
from tests.gateway.harness import Client, Gateway, a_body, problem
from tests.gateway.test_batch import send


def a_pressure(name: str = "queue_length", below: int = 40) -> Pressure:
    return Pressure(name, Instant(NOW), 120.0, 100.0, below, Seconds(30.0))


async def test_backpressure_refuses_the_lower_bands_with_a_time_to_try_again(
    gateway: Gateway, api: Client
) -> None:
    gateway.fleet = FleetSeen(pressures=(a_pressure(),))
    lease = {"holder": "me", "gpu_mb": 1024, "priority": 5}
    for path, body in (("/tasks", a_body(priority=39)), ("/leases", lease)):
        response = await api.post(path, json=body)
        refused = problem(response, 429, "backpressure")
        assert response.headers["retry-after"] == "30"
        said = "queue_length is 120, which is too high (100): nothing of a priority below 40 is taken now"
        assert said in refused["detail"]
    problem(await send(api, [a_body(priority=50), a_body(priority=5)]), 429, "backpressure")
    await api.submit(priority=40)
    gateway.has_leader = False  # until the next one is known
    problem(await api.post("/tasks", json=a_body(priority=39)), 429, "backpressure")
    gateway.fleet = FleetSeen()
    await api.submit(priority=5)


async def test_a_tenants_own_backpressure_is_its_own(gateway: Gateway) -> None:
    acme, other = await gateway.client("a", tenant="acme"), await gateway.client("b", tenant="zeta")
    gateway.fleet = FleetSeen(pressures=(a_pressure("queue:acme", below=90),))
    problem(await acme.post("/tasks", json=a_body(priority=89)), 429, "backpressure")
    await acme.submit(priority=90)
    await other.submit(priority=5)
    for tenant, count in (("acme", 1), ("zeta", 0)):
        reader = await gateway.client(f"{tenant}-reader", "cluster:read", tenant=tenant)
        assert len((await reader.get("/targets")).json()["backpressure"]) == count


async def test_targets_say_what_is_measured_and_what_background_work_may_take(
    gateway: Gateway, api: Client
) -> None:
    empty = (await api.get("/targets")).json()
    assert (empty["items"], empty["backpressure"]) == ([], [])
    about = "all", "gpu_utilization", 0.6, 0.8
    gateway.fleet = FleetSeen(
        (TargetSeen(*about, 0.9, is_in=False, since=Instant(NOW), share=0.25),), {"all": 1024},
        pressures=(a_pressure(),),
    )  # fmt: skip
    found = (await api.get("/targets")).json()
    [target], [pressure] = found["items"], found["backpressure"]
    assert (target["value"], target["state"], target["background_share"]) == (0.9, "out", 0.25)
    assert target["background_left_mb"] == 1024
    assert (pressure["measure"], pressure["refused_below"]) == ("queue_length", 40)


@pytest.mark.parametrize(("query", "count"), [("", 1), ("?idle=true", 1), ("?idle=false", 0)])
async def test_idle_gpus_are_listed_with_how_long_they_have_been(
    gateway: Gateway, api: Client, query: str, count: int
) -> None:
    gateway.fleet = FleetSeen(idle=(Idle(key("gpu0"), 0.01, Instant(NOW - 400)), Idle("n1", 0.0, NOW)))
    found = (await api.get(f"/gpus{query}")).json()["items"]
    assert [gpu["idle_seconds"] for gpu in found] == [400.0] * count
    [node] = (await api.get("/nodes")).json()["items"]
    assert node["idle_seconds"] == 0.0


async def test_without_a_look_nothing_is_idle(api: Client) -> None:
    [gpu] = (await api.get("/gpus")).json()["items"]
    assert gpu["idle_seconds"] is None
    assert (await api.get("/gpus?idle=true")).json()["items"] == []


async def test_metrics_show_what_the_leader_has_found(gateway: Gateway, api: Client) -> None:
    await gateway.admit(await api.submit(resources={"gpu_mb": 1024}))
    disks = DiskSample("/data", 1000, 250), DiskSample("/", 1000, 900)
    node = NodeName("n1")
    gateway.world.measure((), [NodeSample(node, Instant(NOW), 0.99, Mib(100), Mib(50), disks=disks)])
    target = TargetSeen("pool:lab", "gpu_utilization", 0.6, 0.8, 0.9, is_in=False, since=NOW, share=0.25)
    unmeasured = TargetSeen("all", "disk", 0.0, 0.7, None, is_in=True, since=NOW)
    gateway.fleet = FleetSeen(
        (target, unmeasured),
        idle=(Idle(key("gpu0"), 0.01, Instant(NOW - 50)), Idle("n1", 0.0, NOW)),
        pressures=(a_pressure(), a_pressure("disk_percent")),
        pressure_values={"queue_length": 120.0, "store_seconds": 0.5},
        overloaded=(Overload(node, "cpu"),),
        full_disks={node: "/data"},
        low_disks=tuple(DiskStanding(node, it, 0.75, DiskLevel.BLOCK, 0.7) for it in ("/data", "/slow")),
        done={"started": 7},
        events={"fleet.NODE_LEFT": 2},
    )
    gateway.clock.advance(400.0)
    closed = await fleet_metrics(api)
    gateway.fleet = replace(gateway.fleet, full_disks={})
    open_node = await fleet_metrics(api)
    assert sorted(line for line in open_node if "disk_level" in line) == [
        'gpubroker_node_disk_level{hostname="n1",path="/"} 0.0',
        'gpubroker_node_disk_level{hostname="n1",path="/data"} 2.0',
        'gpubroker_node_disk_level{hostname="n1",path="/slow"} 2.0',
    ]
    assert closed == {
        'gpubroker_target_ratio{measure="gpu_utilization",scope="pool:lab"} 0.9',
        'gpubroker_target_min_ratio{measure="gpu_utilization",scope="pool:lab"} 0.6',
        'gpubroker_target_max_ratio{measure="gpu_utilization",scope="pool:lab"} 0.8',
        'gpubroker_target_out_seconds{measure="gpu_utilization",scope="pool:lab"} 400.0',
        'gpubroker_target_min_ratio{measure="disk",scope="all"} 0.0',
        'gpubroker_target_max_ratio{measure="disk",scope="all"} 0.7',
        'gpubroker_target_out_seconds{measure="disk",scope="all"} 0.0',
        'gpubroker_background_share_ratio{scope="pool:lab"} 0.25',
        'gpubroker_backpressure_active{measure="queue_length"} 1.0',
        'gpubroker_backpressure_active{measure="store_seconds"} 0.0',
        'gpubroker_backpressure_active{measure="disk_percent"} 1.0',
        'gpubroker_backpressure_value{measure="queue_length"} 120.0',
        'gpubroker_backpressure_value{measure="store_seconds"} 0.5',
        'gpubroker_gpu_idle_seconds{UUID="gpu0",gpu="0",hostname="n1"} 450.0',
        'gpubroker_gpu_held_idle_seconds{UUID="gpu0",gpu="0",hostname="n1"} 400.0',
        'gpubroker_node_idle_seconds{hostname="n1"} 400.0',
        'gpubroker_node_overloaded{hostname="n1",measure="cpu"} 1.0',
        'gpubroker_node_overloaded{hostname="n1",measure="host_memory"} 0.0',
        'gpubroker_node_disk_level{hostname="n1",path="/data"} 3.0',
        'gpubroker_node_disk_level{hostname="n1",path="/slow"} 3.0',
        'gpubroker_node_disk_level{hostname="n1",path="/"} 0.0',
        'gpubroker_items_total{component="started"} 7.0',
        'gpubroker_fleet_events_total{kind="fleet.NODE_LEFT"} 2.0',
    }
    gateway.fleet = None
    assert await fleet_metrics(api) == set()


async def fleet_metrics(api: Client) -> set[str]:
    """Those that a look of the leader is needed for."""
    names = {f"{row.name}_total" if row.is_counter else row.name for row in LOOKED}
    lines = (await api.get("/metrics")).text.splitlines()
    return {line for line in lines if line.partition("{")[0] in names}


async def test_of_tenants_with_backpressure_of_their_own_metrics_show_a_hundred(
    gateway: Gateway, api: Client
) -> None:
    tenants = {f"queue:t{n:03}": 5.0 for n in range(150)}
    gateway.fleet = FleetSeen(pressure_values={**tenants, "disk_percent": 7.0})
    shown = [line for line in await fleet_metrics(api) if line.startswith("gpubroker_backpressure_value")]
    assert len(shown) == 100 + 1
