"""Tasks that run after others of the same batch, named by index or by name; and tasks that are held."""

from typing import Any

from gpubroker_server.core.domain.task import OnFailure, TaskState

from tests.gateway.harness import Client, Gateway, a_body, problem


async def sent(api: Client, *tasks: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    answer = await api.post("/tasks/batch", json={"tasks": [a_body(**task) for task in tasks], **more})
    assert answer.status_code in (202, 207), answer.text
    items: list[dict[str, Any]] = answer.json()["items"]
    return items


async def test_a_task_runs_after_others_of_its_batch_by_index_and_by_name(
    gateway: Gateway, api: Client
) -> None:
    before = await api.submit(name="before")
    items = await sent(
        api,
        {"name": "split"},
        {"name": "left", "after": [0]},
        {"name": "right", "after": ["split", before]},
        {"name": "join", "after": [1, {"task": "right", "on_failure": "ignore"}]},
    )
    split, left, right, join = (item["id"] for item in items)
    after = {
        task: [(it.task, it.on_failure) for it in gateway.task(task).after] for task in (left, right, join)
    }
    fail, ignore = OnFailure.FAIL, OnFailure.IGNORE
    assert after == {
        left: [(split, fail)], right: [(split, fail), (before, fail)], join: [(left, fail), (right, ignore)]
    }  # fmt: skip
    for task in (before, split):
        await gateway.end(task)
    await gateway.turn()
    assert not gateway.task(left).awaits
    assert gateway.task(join).awaits
    for task in (left, right):
        await gateway.end(task)
    await gateway.turn()
    await gateway.end(join)
    assert (await api.get(f"/tasks/{join}")).json()["state"] == "succeeded"


async def test_equal_tasks_may_run_after_different_ones(gateway: Gateway, api: Client) -> None:
    items = await sent(api, {}, {}, *({"after": [at]} for at in (0, 1, 0)))
    ids = [item["id"] for item in items]
    assert [gateway.task(id).after[0].task for id in ids[2:]] == [ids[0], ids[1], ids[0]]


async def test_batch_task_after_an_unknown_or_a_refused_task_is_refused(
    api: Client,
) -> None:
    items = await sent(
        api, {"name": "twice"}, {"name": "twice", "priority": 101}, {"after": [2]}, {"after": [-1]},
        {"after": ["later"]}, {"name": "later"}, {"after": ["twice"]}, {"after": [1]}, {"after": [0, 0]},
        {"after": [True]},
    )  # fmt: skip
    found = [item["problem"]["errors"][0]["detail"] if "problem" in item else "" for item in items]
    assert found[0] == found[5] == ""
    assert found[2] == "2 is not the index of a task before this one, which is task 2 of the batch"
    assert found[3].startswith("-1 is not the index")
    assert found[4] == '"later" is no id, and no task before it has that name'
    assert found[6] == '"twice" is no id, and 2 tasks before this one in the batch have that name'
    assert found[7] == "task 1 of this batch was refused"
    assert "name it once" in found[8]
    assert found[9] == "must be an object; found true"
    pointers = [item["problem"]["errors"][0]["pointer"] for item in items if "problem" in item]
    assert pointers[1] == "/tasks/2/after/0/task"
    whole = {"tasks": [a_body(after=[1]), a_body()], "all_or_nothing": True}
    problem(await api.post("/tasks/batch", json=whole), 422, "batch-refused")


async def test_a_repeated_batch_gets_its_tasks_again(gateway: Gateway, api: Client) -> None:
    key = {"Idempotency-Key": '"k"'}
    body = {"tasks": [a_body(name="a"), a_body(after=["a"])]}
    first = await api.post("/tasks/batch", json=body, headers=key)
    again = await api.post("/tasks/batch", json=body, headers=key)
    assert again.json() == first.json()
    assert len(gateway.world.tasks) == 2


async def test_a_held_task_waits_until_it_is_released(gateway: Gateway, api: Client) -> None:
    answer = (await api.post("/tasks", json=a_body(held=True))).json()
    assert (answer["held"], answer["pending"]["reason"]) == (True, "Held")
    assert gateway.task(answer["id"]).id in gateway.world.queue.held
    released = (await api.patch(f"/tasks/{answer['id']}", json={"held": False})).json()
    assert not released["held"]
    await gateway.end(answer["id"])
    [in_batch] = await sent(api, {"held": True})
    assert gateway.task(in_batch["id"]).state is TaskState.PENDING
    assert gateway.task(in_batch["id"]).held
