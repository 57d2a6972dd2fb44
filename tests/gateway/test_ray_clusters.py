"""Tasks that ask for a Ray cluster, by HTTP."""

from typing import Any

from tests.gateway.harness import Client, a_body, problem

COMMAND: dict[str, Any] = {"run": {"command": ["python", "train.py"]}}


async def test_the_cluster_of_a_task_is_kept_and_shown(api: Client) -> None:
    body = {**COMMAND, "ray": "private", "ray_dashboard": True, "resources": {"gpu_mb": 1024}}
    made = (await api.post("/tasks", json=body)).json()
    shown = (await api.get(f"/tasks/{made['id']}")).json()
    assert (shown["ray"], shown["ray_dashboard"], shown["resources"]["cpu"]) == ("private", True, 1.0)
    plain = (await api.post("/tasks", json=COMMAND)).json()
    assert (plain["ray"], plain["ray_dashboard"]) == ("", False)


async def test_a_repeated_task_has_the_cluster_of_the_first(api: Client) -> None:
    made = (await api.post("/tasks", json={**COMMAND, "ray": "private"})).json()
    await api.post(f"/tasks/{made['id']}/cancel")
    again = await api.post(f"/tasks/{made['id']}/retry")
    assert again.json()["ray"] == "private", again.text


async def test_a_cluster_that_cannot_be_is_refused_at_its_field(api: Client) -> None:
    for body, pointer in (
        ({**COMMAND, "ray": "private", "resources": {"cpu": 1.5}}, "/resources/cpu"),
        ({**COMMAND, "ray": "private", "resources": {"memory_mb": 512}}, "/resources/memory_mb"),
        ({**COMMAND, "ray": "shared"}, "/ray"),
        (a_body(ray="private"), "/ray"),
        ({**COMMAND, "ray": "public"}, "/ray"),
    ):
        refused = problem(await api.post("/tasks", json=body), 422, "validation-failed")
        assert refused["errors"][0]["pointer"] == pointer
