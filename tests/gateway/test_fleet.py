"""What a leader has found of the fleet: targets, idle devices, and work that is not taken now."""

import pytest
from gpubroker_server.core.control.backpressure import Pressure
from gpubroker_server.core.control.fleet import FleetSeen, TargetSeen
from gpubroker_server.core.control.idle import Idle
from gpubroker_server.core.domain.units import Instant, Seconds

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
    gateway.fleet = FleetSeen()
    await api.submit(priority=5)


async def test_a_tenants_own_backpressure_is_its_own(gateway: Gateway) -> None:
    acme, other = await gateway.client("a", tenant="acme"), await gateway.client("b", tenant="zeta")
    gateway.fleet = FleetSeen(pressures=(a_pressure("queue:acme", below=90),))
    problem(await acme.post("/tasks", json=a_body(priority=89)), 429, "backpressure")
    await acme.submit(priority=90)
    await other.submit(priority=5)


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
