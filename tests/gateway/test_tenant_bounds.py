"""What one tenant may have waiting: tasks in the queue, and requests that are held back."""

import asyncio
from typing import Any

from tests.gateway.harness import Gateway, a_body, problem, until
from tests.gateway.test_batch import numbered, send


def a_call(size_bytes: int) -> dict[str, Any]:
    return {"entrypoint": "myteam.training:train", "args": ["x" * size_bytes]}


async def test_a_tenant_may_have_so_many_tasks_waiting_and_no_more() -> None:
    async with Gateway(tenant_pending_tasks=3) as gateway:
        api = await gateway.client("one", tenant="vision")
        assert (await send(api, numbered(2))).status_code == 207
        full = problem(await send(api, numbered(2)), 429, "tenant-queue-full")
        assert '"vision" has 2 tasks that wait, and may have 3' in full["detail"]
        key = {"Idempotency-Key": "a-key"}
        first = (await api.post("/tasks", json=a_body(), headers=key)).json()["id"]
        for path, body in (("/tasks", a_body()), ("/leases", {"holder": "me", "gpu_mb": 1024})):
            problem(await api.post(path, json=body), 429, "tenant-queue-full")
        again = await api.post("/tasks", json=a_body(), headers=key)
        assert (again.status_code, again.json()["id"]) == (202, first)  # it was accepted before
        other = await gateway.client("two", tenant="speech")
        await other.submit()
        await api.post(f"/tasks/{first}/cancel")
        await api.submit()


async def test_waiting_tasks_of_a_tenant_may_keep_only_so_many_bytes() -> None:
    async with Gateway(tenant_pending_bytes=4_900, inline_bytes=1_000) as gateway:
        api = await gateway.client("one", tenant="vision")
        large = a_call(2_000)  # its arguments are in an object
        first = await api.submit(large)
        await api.submit(env={"PADDING": "x" * 1_900})
        for path, body in (
            ("/tasks", a_body(large)),
            ("/tasks", a_body(labels={f"label-{n}": "x" * 60 for n in range(16)})),
            ("/leases", {"holder": "me", "gpu_mb": 1024, "labels": {f"l{n}": "x" * 60 for n in range(16)}}),
        ):
            full = problem(await api.post(path, json=body), 429, "tenant-queue-bytes")
        for said in (
            '"vision" has tasks that wait and keep 3',
            "may have 4900 (limits.tenant_pending_bytes)",
        ):
            assert said in full["detail"]
        problem(await send(api, [a_body(a_call(600)) for _ in range(2)]), 429, "tenant-queue-bytes")
        assert (await send(api, [a_body(a_call(100 * n)) for n in range(1, 3)])).status_code == 207
        await (await gateway.client("two", tenant="speech")).submit(large)
        assert gateway.parts.follower.world.pending_bytes["vision"] > 4_000
        await api.post(f"/tasks/{first}/cancel")
        await api.submit(large)


async def test_a_tenant_may_have_so_many_requests_held_back_and_no_more() -> None:
    async with Gateway(tenant_waits=2) as gateway:
        api = await gateway.client("one", tenant="vision")
        task = await api.submit()
        path = f"/tasks/{task}/wait"
        waiting = [asyncio.create_task(api.get(path)) for _ in range(2)]
        await until(lambda: not gateway.parts.waiters.has_room_for("vision"))
        full = problem(await api.get(path), 429, "tenant-waits")
        assert "has 2 requests that wait here for a task, and may have 2" in full["detail"]
        stored = await api.post("/tasks", json=a_body(), headers={"Prefer": "wait=60"})
        assert (stored.status_code, "Preference-Applied" in stored.headers) == (202, False)
        assert (await api.get(f"/tasks/{task}")).status_code == 200
        other = await gateway.client("two", tenant="speech")
        theirs = await other.submit()
        theirs_ends = asyncio.create_task(other.get(f"/tasks/{theirs}/wait"))
        await gateway.waits(theirs)
        waiting.append(theirs_ends)
        for request in waiting:
            request.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert gateway.parts.waiters.has_room_for("vision")
