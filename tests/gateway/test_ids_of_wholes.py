"""The id of an array or a worker set, under the routes of tasks: it means all of it."""

import asyncio
from typing import Any

from gpubroker_server.core.domain.decisions import Decision, write_move
from gpubroker_server.core.domain.orders import Failure
from gpubroker_server.core.domain.task import Move, TaskState
from gpubroker_server.core.domain.units import TaskId

from tests.gateway.harness import Client, Gateway, before, fault, problem, until
from tests.gateway.test_arrays import done, failure, result, submitted
from tests.gateway.test_run_logs import say
from tests.gateway.test_stack import answer as stack_told
from tests.gateway.worker_stage import formed
from tests.patience import PATIENCE_SECONDS


def states(gateway: Gateway, seen: dict[str, Any]) -> set[TaskState]:
    rows = (gateway.world.tasks.get(TaskId(worker["id"])) for worker in seen["workers"])
    return {row.state for row in rows if row is not None}


async def an_array(api: Client, workers: int = 2, **fields: Any) -> tuple[dict[str, Any], str, str]:
    """The array, its first worker and its last."""
    seen = await submitted(api, tuple(range(workers)), max_parallel=workers, **fields)
    return seen, seen["workers"][0]["id"], seen["workers"][-1]["id"]


async def test_a_cancel_of_an_array_or_a_set_cancels_all_its_workers(gateway: Gateway, api: Client) -> None:
    for seen in (await submitted(api, (1, 2, 3)), await formed(gateway, api, count=2)):
        gateway.leads = True
        answer = await api.post(f"/tasks/{seen['id']}/cancel", json={"grace_seconds": 1.0})
        assert (answer.status_code, answer.json()["state"]) == (202, "cancelled"), answer.text
        assert states(gateway, seen) == set()
        again = await api.post(f"/tasks/{seen['id']}/cancel")
        assert (again.status_code, again.json()["state"]) == (200, "cancelled")


async def test_an_array_that_has_ended_is_not_cancelled(gateway: Gateway, api: Client) -> None:
    _, first, last = await an_array(api)
    await gateway.admit(last)
    await gateway.admit(first)
    await done(gateway, first, result(0), result(1))
    await gateway.end(first)
    assert (await api.get(f"/tasks/{first}")).json()["state"] == "running", "a worker is left"
    await gateway.end(last)
    refused = problem(await api.post(f"/tasks/{first}/cancel"), 409, "task-already-finished")
    assert "succeeded" in refused["detail"]


async def test_a_wait_for_an_array_ends_with_its_last_worker(gateway: Gateway, api: Client) -> None:
    _, first, last = await an_array(api)
    await gateway.admit(last)
    await gateway.admit(first)
    await done(gateway, first, result(0), failure(1))
    await gateway.end(first)
    early = await api.get(f"/tasks/{first}/wait", params={"timeout_seconds": 0})
    assert (early.status_code, early.json()["state"]) == (202, "running")
    problem(await api.get(f"/tasks/{first}/result"), 409, "task-not-finished")
    waits = asyncio.create_task(api.get(f"/tasks/{first}/wait", params={"timeout_seconds": PATIENCE_SECONDS}))
    await until(lambda: bool(len(gateway.parts.waiters)))
    await gateway.end(last)
    over = await waits
    assert (over.status_code, over.json()["state"], over.json()["result"]) == (200, "failed", None)
    error = over.json()["error"]
    assert (error["kind"], error["message"]) == (
        "items", f"1 of its 2 items failed; GET /arrays/{first}/items has their errors"
    )  # fmt: skip
    left = (await api.get(f"/tasks/{first}/result")).json()
    assert (left["state"], left["error"]["kind"]) == ("failed", "items")
    other = (await api.get(f"/tasks/{last}/wait")).json()
    assert (other["state"], other["error"]) == ("succeeded", None), "a worker that is not the first is itself"


async def test_an_array_without_a_worker_left_says_how_many_items_have_no_result(
    gateway: Gateway, api: Client
) -> None:
    _, first, last = await an_array(api)
    for worker in (first, last):
        await gateway.end(worker, failure=Failure("array_import_failed", "no such module", ""))
    seen = (await api.get(f"/tasks/{first}")).json()
    assert (seen["state"], seen["error"]["message"][:26]) == ("failed", "2 have no result; GET /arr")


async def test_a_change_of_an_array_changes_all_its_workers(gateway: Gateway, api: Client) -> None:
    gateway.leads = True
    seen, first, last = await an_array(api, 3)
    answer = await api.patch(f"/tasks/{first}", json={"priority": 33, "held": True})
    assert answer.status_code == 200, answer.text
    assert {gateway.task(one["id"]).priority for one in seen["workers"]} == {33}
    assert all(gateway.task(one["id"]).held for one in seen["workers"])
    await api.patch(f"/tasks/{first}", json={"held": False})
    assert not any(gateway.task(one["id"]).held for one in seen["workers"])
    await gateway.admit(last)
    refused = problem(await api.patch(f"/tasks/{first}", json={"held": True}), 409, "task-not-pending")
    assert "held" in refused["detail"]
    gateway.leads = False
    stored = await api.patch(f"/tasks/{first}", json={"priority": 44})
    assert (stored.status_code, gateway.task(first).priority) == (202, 33)
    for one in seen["workers"]:
        await gateway.end(one["id"])
    problem(await api.patch(f"/tasks/{first}", json={"priority": 55}), 409, "task-already-finished")


async def test_a_worker_set_is_scaled_and_not_held(gateway: Gateway, api: Client) -> None:
    seen = await formed(gateway, api, count=1, max_count=2)
    gateway.leads = True
    answer = await api.patch(f"/tasks/{seen['id']}", json={"held": False})
    assert "PATCH /worker-sets/{id} scales it" in fault(answer, "/held")
    assert (await api.patch(f"/tasks/{seen['id']}", json={"priority": 12})).status_code == 200
    assert {row.priority for row in gateway.world.tasks.values()} == {12}


async def test_a_task_runs_after_the_whole_array_and_only_if_all_items_succeeded(
    gateway: Gateway, api: Client
) -> None:
    for last_result, end in ((result(1), TaskState.PENDING), (failure(1), TaskState.FAILED)):
        _, first, last = await an_array(api)
        after = await api.submit(after=[first])
        anyway = await api.submit(after=[{"task": first, "on_failure": "ignore"}])
        for worker in (first, last):
            await gateway.admit(worker)
        await done(gateway, first, result(0))
        await gateway.end(first)
        await gateway.turn()
        assert gateway.task(after).awaits, "the last worker is still at work"
        late = await api.submit(after=[first])
        await done(gateway, last, last_result)
        await gateway.end(last)
        later = await api.submit(after=[first])
        await gateway.turn()
        for dependent in (after, late, later):
            seen = (await api.get(f"/tasks/{dependent}")).json()
            assert seen["state"] == end, seen
        assert not gateway.task(anyway).awaits
        if end is TaskState.FAILED:
            assert seen["error"]["message"] == f"it runs after {first}, which has failed"
            assert seen["failed_by"] == first


def a_cancel(gateway: Gateway, worker: str) -> Decision:
    """One worker alone, which has failed too often, has ended."""
    row = gateway.task(worker)
    return Decision(row.id, "test", tasks=(write_move(row, Move.CANCELLED, finished_at=gateway.clock.now()),))


async def test_a_task_after_a_set_runs_when_the_set_is_over(gateway: Gateway, api: Client) -> None:
    seen = await formed(gateway, api, count=2)
    after = await api.submit(after=[{"task": seen["id"], "on_failure": "ignore"}])
    first, second = (worker["id"] for worker in seen["workers"])
    gateway.leads = True
    await gateway.commit(a_cancel(gateway, first))
    await gateway.turn()
    assert gateway.task(after).awaits
    assert (await api.get(f"/tasks/{first}")).json()["state"] == "pending"
    await api.delete(f"/worker-sets/{seen['id']}")
    await gateway.turn()
    await gateway.turn()
    assert not gateway.task(after).awaits
    assert (await api.get(f"/tasks/{second}")).json()["state"] == "cancelled"


async def test_explanation_of_an_array_counts_its_workers_and_says_why_one_waits(
    gateway: Gateway, api: Client
) -> None:
    _, first, last = await an_array(api, resources={"gpus": 1})
    waits = (await api.get(f"/tasks/{first}/explain")).json()
    assert (waits["id"], waits["state"], waits["worker"]) == (first, "pending", first)
    assert waits["message"].startswith(f"workers: 2 pending; {first}: ")
    await gateway.admit(first)
    waits = (await api.get(f"/tasks/{first}/explain")).json()
    assert (waits["id"], waits["state"], waits["worker"]) == (first, "running", last)
    assert waits["reason"] == "WaitingForMemory"
    assert waits["message"].startswith(f"workers: 1 running, 1 pending; {last}: ")
    assert waits["position"] == 1
    alone = (await api.get(f"/tasks/{last}/explain")).json()
    assert (alone["id"], alone["worker"]) == (last, None)
    assert waits["message"].endswith(alone["message"])
    gateway.leads = True
    await api.post(f"/tasks/{last}/cancel")
    runs = (await api.get(f"/tasks/{first}/explain")).json()
    assert (runs["state"], runs["reason"], runs["worker"]) == ("running", None, None)
    assert runs["message"] == "workers: 1 running, 1 cancelled"


async def test_the_explanation_of_an_array_that_failed_says_how_many_items_did(
    gateway: Gateway, api: Client
) -> None:
    _, first, last = await an_array(api)
    for worker in (first, last):
        await gateway.admit(worker)
    await done(gateway, first, result(0), failure(1))
    for worker in (first, last):
        await gateway.end(worker)
    found = (await api.get(f"/tasks/{first}/explain")).json()
    assert (found["state"], found["worker"]) == ("failed", None)
    assert found["message"] == (
        f"workers: 2 succeeded; 1 of its 2 items failed; GET /arrays/{first}/items has their errors"
    )


async def test_explanation_of_a_set_does_not_ask_to_release_unwanted_workers(
    gateway: Gateway, api: Client
) -> None:
    seen = await formed(gateway, api, count=1, max_count=2)
    first, spare = (worker["id"] for worker in seen["workers"])
    await gateway.admit(first)
    runs = (await api.get(f"/tasks/{first}/explain")).json()
    assert (runs["id"], runs["state"], runs["reason"]) == (first, "running", None)
    assert runs["message"] == "workers: 1 running, 1 not wanted"
    assert (runs["remedies"], runs["blockers"]) == ([], [])
    await api.patch(f"/worker-sets/{first}", json={"count": 2})
    await gateway.turn()
    waits = (await api.get(f"/tasks/{first}/explain")).json()
    assert (waits["worker"], waits["state"]) == (spare, "running")


async def test_the_explanation_of_a_set_that_wants_no_worker_says_so(gateway: Gateway, api: Client) -> None:
    seen = await formed(gateway, api, count=0, min_count=0, max_count=2)
    found = (await api.get(f"/tasks/{seen['id']}/explain")).json()
    assert found["message"] == "workers: 2 not wanted"
    assert (found["reason"], found["remedies"], found["blockers"]) == (None, [], [])


async def test_a_retry_of_an_array_as_a_task_names_its_own_route(gateway: Gateway, api: Client) -> None:
    seen = await submitted(api, (1,))
    await gateway.end(seen["id"])
    refused = problem(await api.post(f"/tasks/{seen['id']}/retry"), 409, "task-not-retryable")
    assert f"POST /arrays/{seen['id']}/retry" in refused["detail"]
    of_two = (await submitted(api, (1, 2), max_parallel=2))["id"]
    early = problem(await api.post(f"/tasks/{of_two}/retry"), 409, "task-not-retryable")
    assert f"POST /arrays/{of_two}/retry" in early["detail"], "also while it runs"


async def test_a_retry_of_a_worker_set_says_that_its_workers_are_restarted(
    gateway: Gateway, api: Client
) -> None:
    seen = await formed(gateway, api, count=2)
    for worker in seen["workers"]:
        refused = problem(await api.post(f"/tasks/{worker['id']}/retry"), 409, "task-not-retryable")
        assert "worker of a set" in refused["detail"]


async def events_of(api: Client, task: str, **params: Any) -> list[dict[str, Any]]:
    return list((await api.get(f"/tasks/{task}/events", params=params)).json()["items"])


async def test_the_events_of_an_array_or_a_set_are_those_of_all_its_workers(
    gateway: Gateway, api: Client
) -> None:
    for seen in (await submitted(api, (1, 2), max_parallel=2), await formed(gateway, api, count=2)):
        first, last = (worker["id"] for worker in seen["workers"])
        await gateway.admit(last)
        await gateway.admit(first)
        of_all = await events_of(api, first)
        assert [event["key"] for event in of_all if event["kind"] == "task.started"] == [last, first]
        positions = [event["position"] for event in of_all]
        assert positions == sorted(positions), "in the order of the log"
        alone = await events_of(api, last)
        assert {event["key"] for event in alone if event["kind"].startswith("task.")} == {last}
        assert [event for event in of_all if event["key"] == last] == [
            event for event in alone if event["key"] == last
        ]
        by_page: list[int] = []
        while page := await events_of(api, first, after=by_page[-1] if by_page else 0, limit=2):
            by_page += [event["position"] for event in page]
        assert by_page == positions
        assert await events_of(api, first, last=3) == of_all[-3:]


async def test_the_log_of_an_array_or_a_set_is_asked_for_by_worker(gateway: Gateway, api: Client) -> None:
    for seen in (await submitted(api, (1, 2), max_parallel=2), await formed(gateway, api, count=2)):
        first, last = (worker["id"] for worker in seen["workers"])
        for worker in (first, last):
            await gateway.end(worker)
            await say(gateway, worker, (0, worker.encode()))
        refused = fault(await api.get(f"/tasks/{first}/logs"), "query:worker")
        assert f"has 2 workers: {first}, {last}; choose one of them, as in ?worker={first}" in refused
        assert (await api.get(f"/tasks/{first}/logs", params={"worker": first})).text == first
        assert (await api.get(f"/tasks/{first}/logs", params={"worker": last})).text == last
        assert (await api.get(f"/tasks/{last}/logs")).text == last, "a worker that is not the first is itself"
        assert (await api.get(f"/tasks/{last}/logs", params={"worker": last})).text == last
        other = fault(await api.get(f"/tasks/{last}/logs", params={"worker": first}), "query:worker")
        assert "is neither an array nor a worker set" in other
        nobody = fault(await api.get(f"/tasks/{first}/logs", params={"worker": "nobody"}), "query:worker")
        assert f"is no worker of {first}" in nobody


async def test_one_worker_alone_is_the_whole_array(gateway: Gateway, api: Client) -> None:
    seen = await submitted(api, (1,))
    await gateway.end(seen["id"])
    await say(gateway, seen["id"], (0, b"one\n"))
    assert (await api.get(f"/tasks/{seen['id']}/logs")).text == "one\n"


async def test_a_worker_is_shown_without_its_array(gateway: Gateway, api: Client) -> None:
    _, first, last = await an_array(api)
    await gateway.end(first)
    assert (await api.get(f"/tasks/{first}")).json()["state"] == "running"
    assert (await api.get(f"/tasks/{first}", params={"worker": first})).json()["state"] == "succeeded"
    assert (await api.get(f"/tasks/{first}", params={"worker": last})).json()["id"] == last


async def test_the_result_of_an_array_has_no_log_of_one_of_its_workers(gateway: Gateway, api: Client) -> None:
    _, first, last = await an_array(api)
    alone = await submitted(api, (1,))
    for worker in (first, last, alone["id"]):
        await gateway.end(worker, log_tail=b"printed\n")
    assert (await api.get(f"/tasks/{first}/result")).json()["log_tail"] == ""
    assert (await api.get(f"/tasks/{last}/result")).json()["log_tail"] == "printed\n"
    assert (await api.get(f"/tasks/{alone['id']}/result")).json()["log_tail"] == "printed\n"


async def test_stack_of_an_array_is_that_of_the_named_or_the_only_running_worker(
    gateway: Gateway, api: Client
) -> None:
    _, first, last = await an_array(api, 3)
    waits = problem(await api.get(f"/tasks/{first}/stack"), 409, "task-not-running")
    assert f"{first} is pending" in waits["detail"]
    await gateway.admit(last)
    asking = asyncio.create_task(api.get(f"/tasks/{first}/stack"))
    await stack_told(gateway, last, "Thread 1", "")
    assert (await asking).json()["id"] == last
    await gateway.admit(first)
    refused = fault(await api.get(f"/tasks/{first}/stack"), "query:worker")
    assert f"2 of the 3 workers of {first} run: {first}, {last}; choose one" in refused
    asking = asyncio.create_task(api.get(f"/tasks/{first}/stack", params={"worker": first}))
    await stack_told(gateway, first, "Thread 1", "")
    assert (await asking).json()["id"] == first


async def test_an_array_or_a_set_has_no_outputs_of_a_model(gateway: Gateway, api: Client) -> None:
    seen = await submitted(api, (1,))
    answer = await before(PATIENCE_SECONDS, api.get(f"/inferences/{seen['id']}/outputs?timeout_seconds=600"))
    assert "is no inference" in problem(answer, 404, "not-found")["detail"]
