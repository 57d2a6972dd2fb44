"""Tasks that run after others, from POST /tasks to their end."""

from typing import Any

import pytest
from gpubroker_server.core.domain.orders import Failure
from gpubroker_server.core.domain.task import TaskState

from tests.gateway.harness import Client, Gateway, a_body, problem

STRANGER = "task_01K000000000000000000000AA"


async def test_a_task_waits_for_its_dependencies_and_says_so(gateway: Gateway, api: Client) -> None:
    first, second = [await api.submit() for _ in range(2)]
    said: list[Any] = [first, {"task": second, "on_failure": "ignore"}]
    last = (await api.post("/tasks", json=a_body(after=said))).json()
    assert last["after"] == [{"task": first, "on_failure": "fail"}, {"task": second, "on_failure": "ignore"}]
    told = (await api.get(f"/tasks/{last['id']}/explain")).json()
    assert told["reason"] == "DependencyPending"
    assert first in told["message"]
    await gateway.end(first)
    await gateway.end(second, failure=Failure("exception", "no luck"))
    told = (await api.get(f"/tasks/{last['id']}")).json()
    assert (told["state"], told["pending"]["reason"]) == ("pending", "PendingEvaluation")


async def test_a_task_names_the_dependent_that_it_inherits_its_priority_from(
    gateway: Gateway, api: Client
) -> None:
    first = await api.submit(priority=20)
    between = await api.submit(priority=30, after=[first])
    last = await api.submit(priority=80, after=[between])
    inherits = {"priority": 80, "task": last}
    task = (await api.get(f"/tasks/{first}")).json()
    assert (task["priority"], task["pending"]["inherits"]) == (20, inherits)
    assert (await api.get(f"/tasks/{first}/explain")).json()["inherits"] == inherits
    await api.patch(f"/tasks/{last}", json={"priority": 25})
    told = (await api.get(f"/tasks/{first}")).json()["pending"]["inherits"]
    assert told == {"priority": 30, "task": between}


async def test_a_failure_is_passed_on_and_the_first_one_is_named(gateway: Gateway, api: Client) -> None:
    first = await api.submit()
    second = await api.submit(after=[first])
    third = await api.submit(after=[second])
    await gateway.end(first, failure=Failure("exception", "no luck"))
    await gateway.turn()
    failed = (await api.get(f"/tasks/{third}")).json()
    assert (failed["state"], failed["failed_by"], failed["error"]["kind"]) == ("failed", first, "dependency")
    assert f"{second}, which could not run because {first} did not succeed" in failed["error"]["message"]


async def test_cancelling_a_dependency_fails_its_dependents(gateway: Gateway, api: Client) -> None:
    first = await api.submit()
    second = await api.submit(after=[first])
    await api.post(f"/tasks/{first}/cancel")
    await gateway.turn()
    failed = (await api.get(f"/tasks/{second}")).json()
    assert (failed["state"], failed["failed_by"]) == ("failed", first)
    assert failed["error"]["message"] == f"it runs after {first}, which was cancelled"


async def test_a_dependency_that_ended_before_the_submit_is_accepted(gateway: Gateway, api: Client) -> None:
    first = await api.submit()
    await gateway.end(first)
    assert first not in gateway.world.tasks
    second = await api.submit(after=[first])
    assert gateway.world.awaited.unknown == {first}
    assert gateway.task(second).state is TaskState.PENDING


@pytest.mark.parametrize("name", ["nonsense", "", STRANGER, "x" * 100])
async def test_an_unknown_dependency_is_refused_by_its_id(api: Client, name: str) -> None:
    refused = problem(await api.post("/tasks", json=a_body(after=[name])), 422, "validation-failed")
    assert refused["errors"][0]["pointer"] == "/after/0/task"
    assert f'there is no task "{name}"' in refused["detail"]


async def test_a_dependency_of_another_tenant_is_refused_as_unknown(gateway: Gateway, api: Client) -> None:
    strangers = await (await gateway.client("other", tenant="other")).submit()
    refused = problem(await api.post("/tasks", json=a_body(after=[strangers])), 422, "validation-failed")
    assert f'there is no task "{strangers}"' in refused["detail"]


async def test_a_dependency_named_twice_is_refused(api: Client) -> None:
    first = await api.submit()
    body = a_body(after=[first, {"task": first, "on_failure": "ignore"}])
    (fault,) = problem(await api.post("/tasks", json=body), 422, "validation-failed")["errors"]
    assert (fault["pointer"], fault["code"]) == ("/after/1/task", "named-twice")


@pytest.mark.parametrize(
    ("after", "pointer"),
    [
        (["a"] * 101, "/after"),
        ([5], "/after/0"),
        ([{"task": "a", "on_failure": "maybe"}], "/after/0/on_failure"),
        ([{"on_failure": "fail"}], "/after/0/task"),
        ([{"task": "a", "when": 1}], "/after/0/when"),
    ],
)
async def test_an_invalid_dependency_is_refused_with_its_pointer(
    api: Client, after: Any, pointer: str
) -> None:
    (fault,) = problem(await api.post("/tasks", json=a_body(after=after)), 422, "validation-failed")["errors"]
    assert fault["pointer"] == pointer
