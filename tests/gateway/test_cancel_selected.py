"""`POST /tasks/cancel`: all tasks that match a filter, in one request."""

from typing import Any

import pytest
from gpubroker_server.core.domain.model_orders import ModelState
from gpubroker_server.core.domain.models import ModelKey
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Mib, Seconds
from gpubroker_server.gateway.tasks import cancel_selected
from gpubroker_server.inference.holders import Adoption

from tests.builders import GIB
from tests.gateway.harness import Client, Gateway, fault, problem
from tests.gateway.inference_stage import Heard
from tests.gateway.resident_models import resident_models
from tests.simulated_host import SimulatedModel


async def counts(api: Client, status: int = 200, **body: Any) -> dict[str, int]:
    """Those that are not 0."""
    answer = await api.post("/tasks/cancel", json=body)
    assert answer.status_code == status, answer.text
    return {name: count for name, count in answer.json().items() if count}


async def test_waiting_and_running_tasks_end_and_ended_ones_are_counted(
    gateway: Gateway, api: Client
) -> None:
    running = await api.submit(labels={"batch": "42"})
    await gateway.admit(running)
    await gateway.end(await api.submit(labels={"batch": "42"}))
    waiting, other = await api.submit(labels={"batch": "42"}), await api.submit(labels={"batch": "43"})
    found = await counts(api, labels={"batch": "42"}, state=["pending", "running", "succeeded"])
    assert found == {
        "matched": 3, "waiting": 1, "started": 1, "cancelled": 1, "stopping": 1, "already_ended": 1
    }  # fmt: skip
    assert gateway.task(running).state is TaskState.STOPPING
    assert (await api.get(f"/tasks/{waiting}")).json()["state"] == "cancelled"
    assert gateway.task(other).state is TaskState.PENDING


async def test_task_that_ends_before_a_bulk_cancel_is_counted_as_already_ended(
    gateway: Gateway, api: Client
) -> None:
    """It keeps no other task running."""
    first = await api.submit()
    await gateway.admit(first)
    second = await api.submit()
    kept = gateway.store.request

    async def after_its_end(*requests: Any) -> None:
        await gateway.end(first)
        await kept(*requests)

    gateway.store.request = after_its_end  # type: ignore[method-assign]  # its end comes in between
    assert await counts(api, all=True) == {
        "matched": 2, "waiting": 1, "started": 1, "cancelled": 1, "already_ended": 1
    }  # fmt: skip
    assert (await api.get(f"/tasks/{second}")).json()["state"] == "cancelled"


async def test_waiting_tasks_are_asked_to_end_before_running_ones(gateway: Gateway, api: Client) -> None:
    tasks = [await api.submit(resources={"gpu_mb": GIB})]
    await gateway.admit(tasks[0])
    tasks += [await api.submit(resources={"gpu_mb": 80 * GIB}) for _ in range(2)]
    tasks.append(await api.submit(resources={"gpu_mb": GIB}, priority=90))
    await gateway.admit(tasks[3])
    gateway.leads = False
    assert await counts(api, 202, all=True) == {"matched": 4, "waiting": 2, "started": 2, "stored": 4}
    asked = [request.task for request in gateway.world.requests.values()]
    assert [set(asked[:2]), set(asked[2:])] == [{tasks[1], tasks[2]}, {tasks[0], tasks[3]}]


async def test_grace_and_reason_go_to_every_task_and_stay_in_its_events(
    gateway: Gateway, api: Client
) -> None:
    tasks = [await api.submit() for _ in range(2)]
    await gateway.admit(tasks[0])
    await counts(api, all=True, grace_seconds=5, reason="wrong data")
    assert gateway.task(tasks[0]).stop_deadline_at == gateway.clock.now() + 5
    for task in tasks:
        events = (await api.get(f"/tasks/{task}/events")).json()["items"]
        [made] = [event for event in events if event["kind"] == "request.made"]
        assert made["fields"]["fields"] == {"grace_seconds": 5.0, "reason": "wrong data", "by": "admin"}


async def test_counting_changes_nothing(gateway: Gateway, api: Client) -> None:
    task = await api.submit(name="fit")
    assert await counts(api, name="fit", dry_run=True) == {"matched": 1, "waiting": 1}
    assert gateway.task(task).state is TaskState.PENDING


async def test_other_tenants_keep_their_tasks(gateway: Gateway, api: Client) -> None:
    other = await gateway.client("other", tenant="acme")
    task = await other.submit()
    assert await counts(api, all=True) == {}
    assert gateway.task(task).state is TaskState.PENDING
    reader = await gateway.client("reader", "tasks:read")
    problem(await reader.post("/tasks/cancel", json={"all": True}), 403, "forbidden")


@pytest.mark.parametrize("body", [{}, {"dry_run": True}, {"all": True, "name": "fit"}, {"labels": {}}])
async def test_a_cancel_without_a_filter_says_what_to_give(api: Client, body: dict[str, Any]) -> None:
    assert '"all": true' in fault(await api.post("/tasks/cancel", json=body), "")


@pytest.mark.parametrize(("field", "value"), [("state", ["done"]), ("limit", 5), ("label.run", "42")])
async def test_an_unknown_filter_is_refused(api: Client, field: str, value: Any) -> None:
    problem(await api.post("/tasks/cancel", json={field: value, "name": "x"}), 422, "validation-failed")


async def test_more_than_one_request_may_end_are_told(
    gateway: Gateway, api: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancel_selected, "MAX_SELECTED", 2)
    for _ in range(3):
        await api.submit()
    assert await counts(api, all=True) == {"matched": 2, "waiting": 2, "cancelled": 2, "has_more": True}
    assert await counts(api, all=True) == {"matched": 1, "waiting": 1, "cancelled": 1}
    assert await counts(api, all=True) == {}


async def test_no_filter_selects_the_memory_of_a_model() -> None:
    async with resident_models(Heard(), SimulatedModel("any"), base_mb=Mib(500)) as there:
        gateway = there.gateway
        assert gateway.residencies is not None
        await there.host.load("any", (), Seconds(1.0))
        adoption = Adoption(gateway.residencies)
        for _ in range(2):
            await adoption.check()
            await there.index(any=ModelState.READY)
        holder = gateway.world.models.of(ModelKey("main", "any"))
        assert holder is not None
        api = await gateway.client("writer", "tasks:read", "tasks:write", tenant=holder.tenant)
        assert len((await api.get("/tasks", params={"kind": "model"})).json()["items"]) == 2
        for body in ({"all": True}, {"kind": "model"}, {"name": holder.name}):
            assert await counts(api, **body) == {}
        assert gateway.world.models.of(ModelKey("main", "any")) == holder
