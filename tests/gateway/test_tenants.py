"""What tenants may do, and what they see of themselves."""

from tests.gateway.harness import Gateway, a_body, problem


async def test_a_tenants_highest_priority_holds_beside_that_of_the_token(gateway: Gateway) -> None:
    modest = await gateway.client("m", tenant="modest")
    document = problem(await modest.post("/tasks", json=a_body(priority=70)), 403, "priority-not-allowed")
    assert 'the cap of tenant "modest"' in document["detail"]
    task = await modest.submit(priority=69)
    problem(await modest.patch(f"/tasks/{task}", json={"priority": 90}), 403, "priority-not-allowed")
    capped = await gateway.client("c", tenant="modest", max_priority=60)
    document = problem(await capped.post("/tasks", json=a_body(priority=65)), 403, "priority-not-allowed")
    assert 'the cap of token "c"' in document["detail"]


async def test_a_task_may_name_one_of_the_operators_streams(gateway: Gateway) -> None:
    task = (await gateway.admin.post("/tasks", json=a_body(stream="nightly"))).json()
    assert task["stream"] == "nightly"
    assert gateway.world.tasks[task["id"]].stream == "nightly"
    document = problem(
        await gateway.admin.post("/tasks", json=a_body(stream="hourly")), 422, "validation-failed"
    )
    assert "configured are: nightly" in document["detail"]
    assert document["errors"][0]["pointer"] == "/stream"
