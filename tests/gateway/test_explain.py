"""GET /tasks/{id}/explain: why it waits, device by device."""

from typing import Any

from gpubroker_server.core.domain.orders import Failure
from gpubroker_server.core.planning.forecasts.forecasts import make_forecasts

from tests.builders import GIB
from tests.gateway.harness import Client, Gateway, problem


async def test_a_waiting_task_is_explained_down_to_the_device(gateway: Gateway, api: Client) -> None:
    holder = await api.submit(resources={"gpu_mb": 60 * GIB}, priority=80)
    await gateway.admit(holder)
    gateway.clock.advance(1.0)
    task_id = await api.submit(resources={"gpu_mb": 40 * GIB})
    found = (await api.get(f"/tasks/{task_id}/explain")).json()
    assert (found["reason"], found["position"], found["queue_length"]) == ("WaitingForMemory", 1, 1)
    assert found["blockers"][0]["reason"] == "WaitingForMemory"
    device = found["devices"][0]
    assert (device["verdict"], device["need_mb"], device["free_mb"]) == ("no_room", 40 * GIB, 20 * GIB)
    [held] = device["holders"]
    assert (held["id"], held["priority"], held["band"]) == (holder, 80, "interactive")
    assert (held["gpu_mb"], held["stopping"], held["ends"]) == (60 * GIB, False, None)
    assert device["free_in"] is None
    assert found["preemption"]["why"] == "all_shielded"
    assert [remedy["change"] for remedy in found["remedies"]] == [{"gpu_mb": 20 * GIB}, {"priority": 81}]
    assert found["remedies"][1]["victims"][0]["id"] == holder
    pending = (await api.get(f"/tasks/{task_id}")).json()["pending"]
    assert pending == {
        "reason": found["reason"],
        "message": found["message"],
        "position": 1,
        "inherits": None,
        "start": None,
    }


async def test_another_tenants_holder_is_not_named(gateway: Gateway, api: Client) -> None:
    holder = await api.submit(resources={"gpu_mb": 60 * GIB})
    await gateway.admit(holder)
    other = await gateway.client("other", "tasks:read", "tasks:write", tenant="vision")
    task_id = await other.submit(resources={"gpu_mb": 40 * GIB})
    found = await other.get(f"/tasks/{task_id}/explain")
    assert found.json()["devices"][0]["holders"][0]["id"] is None
    assert found.json()["devices"][0]["holders"][0]["name"] is None
    assert holder not in found.text


async def test_a_held_task_says_that_a_person_holds_it(api: Client) -> None:
    task_id = await api.submit()
    await api.patch(f"/tasks/{task_id}", json={"held": True})
    found = (await api.get(f"/tasks/{task_id}/explain")).json()
    assert (found["reason"], found["position"]) == ("Held", None)


async def test_a_task_that_does_not_wait_says_what_it_does(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit()
    await gateway.admit(task_id)
    running = (await api.get(f"/tasks/{task_id}/explain")).json()
    assert (running["state"], running["reason"]) == ("running", None)
    await gateway.end(task_id)
    ended = (await api.get(f"/tasks/{task_id}/explain")).json()
    assert (ended["state"], ended["reason"], ended["blockers"]) == ("succeeded", None, [])


async def test_an_ended_task_says_how_and_when_it_ended(gateway: Gateway, api: Client) -> None:
    names = ("done", "failed", "stopped")
    tasks = {name: await api.submit(name=name, resources={"cpu": 1}) for name in names}
    for name in names:
        await gateway.admit(tasks[name])
    tasks["unstarted"] = await api.submit(name="unstarted", resources={"cpu": 1})
    gateway.clock.advance(60.0)
    await gateway.end(tasks["done"])
    await gateway.end(tasks["failed"], failure=Failure("exception", "no luck\nat all", "traceback"))
    for name in ("stopped", "unstarted"):
        await api.post(f"/tasks/{tasks[name]}/cancel")
    await gateway.end(tasks["stopped"], failure=Failure("stopped", "asked to"))
    at = "1970-01-12T13:47:40.000Z"
    for name, message in {
        "done": f"succeeded at {at}, after 60 s on n1",
        "failed": f"failed at {at}, after 60 s on n1: no luck",
        "stopped": f"cancelled at {at}, after 60 s on n1",
        "unstarted": f"cancelled at {at}, before it started",
    }.items():
        explained = (await api.get(f"/tasks/{tasks[name]}/explain")).json()
        assert (explained["name"], explained["message"].partition(": asked")[0]) == (name, message)


async def test_a_task_that_has_ended_and_still_holds_memory_does_not_wait(
    gateway: Gateway, api: Client
) -> None:
    task_id = await api.submit(resources={"gpu_mb": 1024})
    await gateway.end(task_id, is_gone=False)
    found = (await api.get(f"/tasks/{task_id}/explain")).json()
    assert (found["state"], found["reason"], found["blockers"]) == ("succeeded", None, [])


async def test_a_task_that_the_world_does_not_have_yet_waits_for_evaluation(
    gateway: Gateway, api: Client
) -> None:
    gateway.hears = False
    task_id = await api.submit()
    found = (await api.get(f"/tasks/{task_id}/explain")).json()
    assert (found["state"], found["reason"]) == ("pending", "PendingEvaluation")
    assert found["message"] == found["blockers"][0]["message"]
    assert "no longer" not in found["message"]


async def test_an_explanation_from_a_stale_world_is_refused(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit()
    gateway.age = 31
    problem(await api.get(f"/tasks/{task_id}/explain"), 503, "follower-stale")


async def test_equal_tasks_share_an_explanation_for_a_second_but_not_a_position(
    gateway: Gateway, api: Client
) -> None:
    holder = await api.submit(resources={"gpu_mb": 60 * GIB})
    await gateway.admit(holder)
    first, second = [await api.submit(resources={"gpu_mb": 40 * GIB}) for _ in range(2)]
    assert (await pending(api, first))["reason"] == "WaitingForMemory"
    await gateway.end(holder)
    remembered = await pending(api, second)
    assert (remembered["reason"], remembered["position"]) == ("WaitingForMemory", 2)
    gateway.clock.advance(1.5)
    assert (await pending(api, second))["reason"] == "PendingEvaluation"


async def test_a_task_that_memory_is_freed_for_has_a_reason_of_its_own(gateway: Gateway, api: Client) -> None:
    holder = await api.submit(resources={"gpu_mb": 60 * GIB}, priority=10)
    await gateway.admit(holder)
    preemptor, other = [await api.submit(resources={"gpu_mb": 40 * GIB}, priority=80) for _ in range(2)]
    assert (await pending(api, other))["reason"] == "WaitingForMemory"
    gateway.clock.advance(1)
    await gateway.plan(preemptor)
    assert (await pending(api, preemptor))["reason"] == "WaitingForPreemption"
    assert (await pending(api, other))["reason"] == "WaitingForMemory"


async def test_a_reason_of_one_task_alone_is_not_shared_with_equal_tasks(
    gateway: Gateway, api: Client
) -> None:
    holder = await api.submit(resources={"gpu_mb": 60 * GIB}, expected_seconds=600)
    await gateway.admit(holder)
    after, plain = [await api.submit(resources={"gpu_mb": 40 * GIB}, after=it) for it in ([holder], [])]
    for _ in range(2):
        assert (await pending(api, after))["reason"] == "DependencyPending"
        assert (await pending(api, plain))["reason"] == "WaitingForMemory"


async def test_tasks_of_different_length_do_not_share_a_reason(gateway: Gateway, api: Client) -> None:
    holder = await api.submit(resources={"gpu_mb": 60 * GIB}, priority=80, expected_seconds=600)
    await gateway.admit(holder)
    await api.submit(resources={"gpu_mb": 80 * GIB})
    gateway.clock.advance(1.0)
    *_, gateway.forecast_starts = make_forecasts(gateway.world, gateway.policy, gateway.clock.now())
    longer, shorter = [
        await api.submit(resources={"gpu_mb": 20 * GIB}, expected_seconds=seconds) for seconds in (3600, 60)
    ]
    assert (await pending(api, longer))["reason"] == "BehindHigherPriority"
    assert (await pending(api, shorter))["reason"] == "PendingEvaluation"


async def test_no_remedy_exceeds_the_priority_of_the_tenant(gateway: Gateway, api: Client) -> None:
    holder = await api.submit(resources={"gpu_mb": 60 * GIB}, priority=80)
    await gateway.admit(holder)
    gateway.clock.advance(1.0)
    modest = await gateway.client("m", tenant="modest")
    task_id = await modest.submit(resources={"gpu_mb": 40 * GIB})
    for found in (
        await modest.get(f"/tasks/{task_id}/explain"),
        await modest.post("/tasks/simulate", json={"resources": {"gpu_mb": 40 * GIB}}),
    ):
        assert [remedy["change"] for remedy in found.json()["remedies"]] == [{"gpu_mb": 20 * GIB}]


async def pending(api: Client, task_id: str) -> dict[str, Any]:
    found: dict[str, Any] = (await api.get(f"/tasks/{task_id}")).json()["pending"]
    return found


async def test_waiting_external_lease_is_explained_and_a_held_one_is_named(
    gateway: Gateway, api: Client
) -> None:
    body = {"holder": "vllm", "gpu_mb": 60 * GIB, "priority": 80}
    held = (await api.post("/leases", json=body)).json()["id"]
    await gateway.plan(held)
    gateway.clock.advance(1.0)
    waiting = (await api.post("/leases", json=body)).json()["id"]
    found = (await api.get(f"/tasks/{waiting}/explain")).json()
    assert (found["reason"], found["preemption"]["why"]) == ("WaitingForMemory", "all_shielded")
    [holder] = found["devices"][0]["holders"]
    assert (holder["id"], holder["gpu_mb"]) == (held, 60 * GIB)
    assert {"gpu_mb": 20 * GIB} in [remedy["change"] for remedy in found["remedies"]]


async def test_without_a_leader_a_task_has_that_reason_and_no_start() -> None:
    async with Gateway(settle_seconds=0) as gateway:
        api = gateway.admin
        task_id, held = await api.submit(), await api.submit()
        await api.patch(f"/tasks/{held}", json={"held": True})
        gateway.forecast_starts = list(make_forecasts(gateway.world, gateway.policy, gateway.clock.now()))[-1]
        gateway.leads = False
        gateway.has_leader = False
        found = (await api.get(f"/tasks/{task_id}/explain")).json()
        assert (found["reason"], found["start"], found["remedies"]) == ("BackendUnavailable", None, [])
        assert found["message"].startswith("there is no leader")
        assert [blocker["reason"] for blocker in found["blockers"]] == ["BackendUnavailable"]
        pending = (await api.get(f"/tasks/{task_id}")).json()["pending"]
        assert (pending["reason"], pending["message"], pending["start"]) == (
            "BackendUnavailable",
            found["message"],
            None,
        )
        pending = (await api.get(f"/tasks/{held}")).json()["pending"]
        assert (pending["reason"], "held in the queue" in pending["message"]) == ("Held", True)
        assert "there is no leader" in pending["message"]


async def test_without_a_leader_a_pending_cancel_is_part_of_the_reason() -> None:
    async with Gateway(settle_seconds=0) as gateway:
        task_id = await gateway.admin.submit()
        gateway.leads = False
        gateway.has_leader = False
        for answer in (
            await gateway.admin.post(f"/tasks/{task_id}/cancel"),
            await gateway.admin.get(f"/tasks/{task_id}"),
        ):
            assert "cancel request is stored" in answer.json()["pending"]["message"]
