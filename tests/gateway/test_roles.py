"""Roles that take turns in one task: the task gets the maximum of each size."""

from typing import Any

import pytest

from tests.builders import GIB
from tests.gateway.harness import Client, Gateway, a_body, problem

TRAIN = {"gpu_mb": 40 * GIB, "memory_mb": 2048, "custom": {"fpga": 1.0, "licence": 1.0}}
GENERATE = {"gpu_mb": 20 * GIB, "cpu": 4.0, "custom": {"licence": 2.0}}


async def resources(api: Client, **roles: Any) -> dict[str, Any]:
    response = await api.post("/tasks", json=a_body(resources={"roles": roles}))
    assert response.status_code == 202, response.text
    asked: dict[str, Any] = response.json()["resources"]
    return asked


async def test_a_task_asks_for_the_maximum_of_its_roles_and_not_for_their_sum(api: Client) -> None:
    asked = await resources(api, train=TRAIN, generate=GENERATE)
    assert (asked["gpus"], asked["gpu_mb"], asked["cpu"], asked["memory_mb"]) == (1, 40 * GIB, 4.0, 2048)
    assert asked["custom"] == {"fpga": 1.0, "licence": 2.0}
    assert asked["roles"] == ["generate", "train"]


async def test_a_role_with_whole_gpus_makes_the_task_exclusive(api: Client) -> None:
    asked = await resources(api, train={"gpus": 1}, generate={"gpu_mb": GIB})
    assert (asked["gpus"], asked["gpu_mb"], asked["exclusive"]) == (1, GIB, True)


async def test_roles_without_gpus_get_the_default_cpu(api: Client) -> None:
    asked = await resources(api, a={"memory_mb": 10}, b={"memory_mb": 20})
    assert (asked["gpus"], asked["cpu"], asked["memory_mb"]) == (0, 1.0, 20)


async def test_the_names_of_its_roles_are_kept_with_what_a_task_runs(gateway: Gateway, api: Client) -> None:
    body = a_body(resources={"roles": {"train": {"cpu": 0.5}, "generate": {"cpu": 0.1}}}, env={"A": "b"})
    task_id = (await api.post("/tasks", json=body)).json()["id"]
    record = await gateway.store.record(task_id)
    assert record is not None
    assert (record.spec.env, record.spec.roles) == ({"A": "b"}, ("generate", "train"))
    assert not record.task.shareable, "a shared process has no environment of its own"


@pytest.mark.parametrize(
    "wrong",
    [
        {"roles": {"a": {"cpu": 1}}, "gpu_mb": 1},
        {"roles": {"a": {"cpu": 1}}, "memory_mb": 1},
        {"roles": {"a": {"gpu_mb": 1}, "b": {"gpu_fraction": 0.5}}},
        {"roles": {"a": {"gpus": 0}}, "kinds": ["H100"]},
        {"roles": {"a": {"gpu": 1}}},
        {"roles": {"a,b": {"cpu": 1}}},
    ],
)
async def test_roles_that_contradict_other_fields_are_refused(api: Client, wrong: dict[str, Any]) -> None:
    document = problem(await api.post("/tasks", json=a_body(resources=wrong)), 422, "validation-failed")
    assert document["errors"][0]["pointer"].startswith("/resources")
