"""What one tenant may have waiting: tasks in the queue, and requests that are held back."""

import asyncio

from tests.gateway.harness import Gateway, a_body, problem, until
from tests.gateway.test_batch import numbered, send


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
