"""Asking where a running task is."""

import asyncio

from gpubroker_server.core.domain.orders import Stacked, StackOrder
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.core.lifecycle.change_requests import STACK_SECONDS

from tests.builders import GIB
from tests.gateway.harness import Client, Gateway, fault, problem, until


async def answer(gateway: Gateway, task_id: str, stack: str, message: str = "") -> None:
    """The agent tells."""
    order = await asked(gateway)
    at = gateway.clock.now()
    await gateway.hear(Stacked(TaskId(task_id), order.fence, at, order.request, stack, message))


async def asked(gateway: Gateway) -> StackOrder:
    """What the agent is asked."""
    await until(lambda: any(isinstance(order, StackOrder) for order in gateway.agents.sent))
    [order] = [order for order in gateway.agents.sent if isinstance(order, StackOrder)]
    gateway.agents.sent.clear()
    return order


async def test_a_running_task_shows_its_threads_or_why_it_has_none(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit(resources={"gpu_mb": 8 * GIB})
    await gateway.admit(task_id)
    for stack, message in (("Thread 1", ""), ("", "it is a command")):
        asking = asyncio.create_task(api.get(f"/tasks/{task_id}/stack"))
        await answer(gateway, task_id, stack, message)
        seen = (await asking).json()
        assert (seen["stack"], seen["message"]) == (stack or None, message)
        assert (seen["id"], seen["attempt"], seen["rank"], seen["node"]) == (task_id, 1, 0, "n1")


async def test_a_stack_that_the_leader_gives_up_can_be_asked_for_again(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit(resources={"gpu_mb": 8 * GIB})
    await gateway.admit(task_id)
    asking = asyncio.create_task(api.get(f"/tasks/{task_id}/stack"))
    await asked(gateway)
    await gateway.pass_time(STACK_SECONDS + 1.0)
    assert "n1" in problem(await asking, 503, "stack-unavailable")["detail"]


async def test_a_task_without_a_process_has_no_stack(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit(resources={"gpu_mb": 8 * GIB})
    assert "pending" in problem(await api.get(f"/tasks/{task_id}/stack"), 409, "task-not-running")["detail"]
    await gateway.admit(task_id)
    fault(await api.get(f"/tasks/{task_id}/stack?rank=1"), "query:rank")
    await gateway.end(task_id)
    problem(await api.get(f"/tasks/{task_id}/stack"), 409, "task-not-running")
    problem(await api.get("/tasks/nobody/stack"), 404, "not-found")
