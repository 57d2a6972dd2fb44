"""Profiles: roles with sizes and limits that a task names, and may override."""

from typing import Any

import pytest
from gpubroker_server.bootstrap.compose import defaults_of
from gpubroker_server.core.admission.defaults import Defaults, NamedDefaults
from gpubroker_server.core.domain.units import Mib
from gpubroker_server.settings.loading import load_settings

from tests.gateway.harness import Client, Gateway, a_body, problem

PROFILES = {
    "scorer": NamedDefaults(cpu=1.0, gpus=0, max_concurrency=100),
    "trainer": NamedDefaults(cpu=4.0, gpus=1, priority=20, max_concurrency=1),
}
LLM = NamedDefaults(priority=79, gpu_mb=8192, cpu=2.0, memory_mb=Mib(4096), max_retries=1)


@pytest.fixture(autouse=True)
def _profiles(gateway: Gateway) -> None:
    gateway.change(defaults=Defaults(model_types={"llm": LLM}, profiles=PROFILES))


async def test_a_profile_fills_in_what_a_submit_leaves_out(api: Client) -> None:
    task = (await api.post("/tasks", json=a_body(profile="trainer"))).json()
    asked = task["resources"]
    assert (asked["cpu"], asked["gpus"], asked["gpu_mb"], task["priority"]) == (4.0, 1, None, 20)
    assert (task["profile"], task["max_concurrency"]) == ("trainer", 1)


async def test_a_submit_overrides_each_value_of_its_profile(api: Client) -> None:
    said: dict[str, Any] = {
        "priority": 30,
        "max_concurrency": 3,
        "resources": {"cpu": 0.5, "gpus": 1, "gpu_mb": 1024},
    }
    task = (await api.post("/tasks", json=a_body(profile="trainer", **said))).json()
    asked = task["resources"]
    assert (asked["cpu"], asked["gpus"], asked["gpu_mb"], task["priority"]) == (0.5, 1, 1024, 30)
    assert task["max_concurrency"] == 3
    sized = (await api.post("/tasks", json=a_body(profile="scorer", resources={"gpu_mb": 1024}))).json()
    assert (sized["resources"]["gpus"], sized["resources"]["cpu"]) == (1, 1.0)


async def test_a_profile_goes_before_the_model_type(api: Client) -> None:
    """A profile without GPUs takes no size of one from the model type."""
    both = (await api.post("/tasks", json=a_body(profile="scorer", model_type="llm"))).json()
    asked = both["resources"]
    assert (asked["gpus"], asked["gpu_mb"], asked["cpu"], asked["memory_mb"]) == (0, None, 1.0, 4096)
    assert (both["priority"], both["max_retries"]) == (79, 1)


async def test_a_profile_holds_for_each_rank_of_a_gang(api: Client) -> None:
    bundles = [{"count": 1}, {"cpu": 1, "gpus": 0}]
    task = (await api.post("/tasks", json=a_body(profile="trainer", resources={"bundles": bundles}))).json()
    asked = [(one["count"], one["gpus"], one["cpu"]) for one in task["resources"]["bundles"]]
    assert asked == [(1, 1, 4.0), (1, 0, 1.0)]


async def test_an_unknown_profile_is_refused_with_the_one_that_is_meant(api: Client) -> None:
    fault = problem(await api.post("/tasks", json=a_body(profile="trainr")), 422, "validation-failed")
    assert fault["errors"][0]["pointer"] == "/profile"
    assert 'did you mean "trainer"?' in fault["errors"][0]["detail"]
    planned = {"components": [{"name": "a", "profile": "nobody"}]}
    fault = problem(await api.post("/plan", json=planned), 422, "validation-failed")
    assert fault["errors"][0]["pointer"] == "/components/0/profile"
    assert "there are: scorer, trainer" in fault["errors"][0]["detail"]


async def test_tasks_of_a_batch_and_retries_have_the_profile(gateway: Gateway, api: Client) -> None:
    body = a_body(profile="scorer")
    first, second = (await api.post("/tasks/batch", json={"tasks": [body, body]})).json()["items"]
    await gateway.end(first["id"])
    again = (await api.post(f"/tasks/{first['id']}/retry")).json()
    for task in ((await api.get(second["url"])).json(), again):
        assert (task["profile"], task["max_concurrency"]) == ("scorer", 100)


async def test_the_profiles_are_listed_by_name(api: Client) -> None:
    listed = (await api.get("/profiles")).json()["items"]
    assert [(it["name"], it["cpu"], it["gpus"], it["max_concurrency"]) for it in listed] == [
        ("scorer", 1.0, 0, 100),
        ("trainer", 4.0, 1, 1),
    ]


def test_service_ships_eight_profiles_and_the_operator_changes_each() -> None:
    shipped = defaults_of(load_settings()).profiles
    assert {name: (it.cpu, it.gpus, it.max_concurrency) for name, it in shipped.items()} == {
        "rollout_worker": (1, 0, 100),
        "trainer": (4, 1, 1),
        "trainer_remote": (1, 0, 10),
        "trajectory_pool": (1, 0, 100),
        "data_loader": (1, 0, 10),
        "weight_sync": (1, 0, 10),
        "validator": (1, 0, 10),
        "colocated": (None, None, 10),
    }
    own = {"trainer": {"gpu_mb": 40960}, "validator": None, "judge": {"gpus": 1}}
    profiles = defaults_of(load_settings(profiles=own)).profiles
    assert (profiles["trainer"].cpu, profiles["trainer"].gpu_mb) == (4, 40960)
    assert profiles["judge"].gpus == 1
    assert "validator" not in profiles


async def test_bundles_of_a_gang_may_name_a_profile_each(api: Client) -> None:
    bundles = [{"profile": "trainer"}, {"profile": "scorer", "count": 2}, {"cpu": 2}]
    task = (await api.post("/tasks", json=a_body(resources={"bundles": bundles}))).json()
    asked = [(one["count"], one["gpus"], one["cpu"]) for one in task["resources"]["bundles"]]
    assert asked == [(1, 1, 4.0), (2, 0, 1.0), (1, 0, 2.0)]
    unknown = a_body(resources={"bundles": [{"profile": "traner"}, {"cpu": 1}]})
    refused = problem(await api.post("/tasks", json=unknown), 422, "validation-failed")
    assert refused["errors"][0]["pointer"] == "/resources/bundles"
    assert 'no profile "traner"' in refused["errors"][0]["detail"]
    fleet = {"components": [{"name": "a", "resources": unknown["resources"]}]}
    planned = problem(await api.post("/plan", json=fleet), 422, "validation-failed")
    assert planned["errors"][0]["pointer"] == "/components/0/resources/bundles"
