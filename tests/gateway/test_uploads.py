"""Tasks that bring a directory, and the files that their runs leave."""

from typing import Any

import pytest
from gpubroker_server.core.domain.units import Fence, TaskId
from gpubroker_server.ports.run_outputs import RunOutput

from tests.gateway.harness import Client, Gateway, a_body, fault, problem
from tests.gateway.test_objects import upload
from tests.gateway.test_task_objects import OTHERS, a_function

COMMAND = {"command": ["python", "train.py"]}


async def test_upload_is_kept_with_the_task_and_all_that_is_made_of_it(gateway: Gateway, api: Client) -> None:
    id = (await upload(api))["id"]
    for run in (COMMAND, a_function(), {"entrypoint": "train:fit"}):
        answer = await api.post("/tasks", json={"run": run, "upload": id, "outputs": ["runs/**"]})
        assert answer.status_code == 202, answer.text
        task = answer.json()
        spec = (await gateway.store.specs([TaskId(task["id"])]))[TaskId(task["id"])]
        assert (spec.upload, spec.objects, spec.outputs) == (id, (id,), ("runs/**",))
        assert (await api.get(f"/tasks/{task['id']}")).json()["upload"] == id
    assert await gateway.store.objects_of_open_tasks() == {("default", id)}
    batch = [{"run": run, "upload": id} for run in (COMMAND, COMMAND, {"entrypoint": "a:b", "args": [1]})]
    answers = (await api.post("/tasks/batch", json={"tasks": batch})).json()["items"]
    assert [one["status"] for one in answers] == [202, 202, 202]
    array = {"run": COMMAND, "items": [1, 2], "upload": id}
    made = (await api.post("/arrays", json=array)).json()
    assert (await api.get(f"/tasks/{made['id']}")).json()["upload"] == id


async def test_task_that_is_done_again_has_the_same_directory(gateway: Gateway, api: Client) -> None:
    id = (await upload(api))["id"]
    task = (await api.post("/tasks", json={"run": COMMAND, "upload": id})).json()["id"]
    await api.post(f"/tasks/{task}/cancel")
    again = await api.post(f"/tasks/{task}/retry")
    assert again.status_code == 202, again.text
    assert again.json()["upload"] == id


@pytest.mark.parametrize(
    ("fields", "pointer", "says"),
    [
        ({"upload": OTHERS}, "/upload", "you have no object"),
        ({"upload": "."}, "/upload", ""),
        ({"outputs": ["runs/**"]}, "", "outputs are files below a directory"),
        ({"outputs": ["/etc/*"], "upload": OTHERS}, "/outputs/0", "below the directory"),
        ({"outputs": ["a/../b"], "upload": OTHERS}, "/outputs/0", "below the directory"),
        ({"outputs": ["x"] * 65, "upload": OTHERS}, "/outputs", ""),
        ({"run": {**COMMAND, "working_directory": "/srv"}, "upload": OTHERS}, "", "one directory"),
    ],
)
async def test_directory_that_cannot_be_is_refused(
    api: Client, fields: dict[str, Any], pointer: str, says: str
) -> None:
    body = {"run": COMMAND, **fields}
    assert says in fault(await api.post("/tasks", json=body), pointer)
    [item] = (await api.post("/tasks/batch", json={"tasks": [body]})).json()["items"]
    assert item["status"] == 422


async def test_archive_larger_than_a_node_unpacks_is_refused() -> None:
    async with Gateway(upload_bytes=99) as gateway:
        api = gateway.admin
        body = {"run": COMMAND, "upload": (await upload(api, b"x" * 100))["id"]}
        said = fault(await api.post("/tasks", json=body), "/upload")
        assert "the archive has 100 bytes, and may have 99" in said


async def test_entrypoint_of_an_upload_needs_the_scope_for_code(gateway: Gateway, api: Client) -> None:
    body = {"run": {"entrypoint": "anything:at_all"}, "upload": (await upload(api))["id"]}
    assert (await api.post("/tasks", json=body)).status_code == 202
    without = await gateway.client("plain", "tasks:read", "tasks:write")
    refused = problem(await without.post("/tasks", json=body), 403, "forbidden")
    assert "tasks:code" in refused["detail"]
    allowed = {"run": {"entrypoint": "myteam.jobs:f"}, "upload": body["upload"]}
    problem(await without.post("/tasks", json=allowed), 403, "forbidden")


@pytest.mark.parametrize("fields", [{"upload": OTHERS}, {"outputs": ["x"]}])
async def test_directory_needs_a_leader_that_knows_it(
    gateway: Gateway, api: Client, fields: dict[str, Any]
) -> None:
    gateway.leader_release = "0.2.9"
    run = COMMAND if "upload" in fields else {**COMMAND, "working_directory": "/srv"}
    problem(await api.post("/tasks", json={"run": run, **fields}), 409, "leader-outdated")


async def test_limits_of_uploads_are_in_the_policy(api: Client) -> None:
    rules = (await api.get("/policy")).json()
    assert (rules["upload_bytes"], rules["upload_files"]) == (512 * 2**20, 20_000)


async def test_outputs_say_of_each_attempt_what_was_collected(gateway: Gateway, api: Client) -> None:
    body = {"run": {**COMMAND, "working_directory": "/srv"}, "outputs": ["runs/**"]}
    id = (await api.post("/tasks", json=body)).json()["id"]
    listed = await api.get(f"/tasks/{id}/outputs")
    assert listed.json() == {"patterns": ["runs/**"], "items": []}
    task = TaskId(id)
    await gateway.admit(task)
    [pending] = (await api.get(f"/tasks/{id}/outputs")).json()["items"]
    assert (pending["attempt"], pending["state"], pending["object"]) == (1, "pending", None)
    now = gateway.clock.now()
    await gateway.store.keep_output(RunOutput(task, Fence(1), 0, now, 2, OTHERS, 4096, "left out: 1"))
    [found] = (await api.get(f"/tasks/{id}/outputs")).json()["items"]
    assert (found["state"], found["object"], found["files"]) == ("collected", OTHERS, 2)
    assert found["message"] == "left out: 1"
    other = await gateway.client("other", "tasks:read", tenant="acme")
    problem(await other.get(f"/tasks/{id}/outputs"), 404, "not-found")
    plain = (await api.post("/tasks", json=a_body())).json()["id"]
    assert (await api.get(f"/tasks/{plain}/outputs")).json() == {"patterns": [], "items": []}
