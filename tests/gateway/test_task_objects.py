"""Arguments of tasks that name objects: the tenant must have them when the task is submitted."""

import base64
import json
from typing import Any

import pytest
from gpubroker_server.core.domain.units import TaskId

from tests.gateway.harness import PYTHON, Client, Gateway, a_body, fault, problem
from tests.gateway.test_objects import DAY, upload

OTHERS = "ab" * 32
RUN = {"entrypoint": "myteam.checks:verify"}


def a_function(*objects: str) -> dict[str, Any]:
    packed = base64.b64encode(b"pickled").decode()
    return {"function": packed, "python": PYTHON, "objects": list(objects)}


@pytest.mark.parametrize("way", ["args", "kwargs", "function"])
async def test_a_task_may_name_the_objects_of_its_tenant_and_no_others(
    gateway: Gateway, api: Client, way: str
) -> None:
    def naming(id: str) -> dict[str, Any]:
        if way == "function":
            return {"run": a_function(id)}
        given = {"args": [1, {"object": id}]} if way == "args" else {"kwargs": {"x": {"object": id}}}
        return {"run": RUN | given}

    where = {"args": "/run/args/1", "kwargs": "/run/kwargs/x", "function": "/run/objects/0"}[way]
    mine = (await upload(api))["id"]
    assert (await api.post("/tasks", json=naming(mine))).status_code == 202
    assert "you have no object" in fault(await api.post("/tasks", json=naming(OTHERS)), where)
    other = await gateway.client("other", tenant="acme")
    assert "you have no object" in fault(await other.post("/tasks", json=naming(mine)), where)


async def test_what_only_resembles_the_name_of_an_object_is_an_ordinary_argument(api: Client) -> None:
    for value in ({"object": "chair"}, {"object": OTHERS, "more": 1}, [{"object": OTHERS}], {"object": 1}):
        assert (await api.post("/tasks", json={"run": RUN | {"args": [value]}})).status_code == 202


async def test_each_task_of_a_batch_is_checked(api: Client) -> None:
    mine = (await upload(api))["id"]
    runs = [RUN | {"args": [{"object": id}]} for id in (mine, OTHERS, mine)] + [RUN | {"args": [1]}] * 2
    runs += [RUN | {"args": [{"object": OTHERS}]}, a_function(mine), a_function(OTHERS)]
    answer = await api.post("/tasks/batch", json={"tasks": [{"run": run} for run in runs]})
    assert [item["status"] for item in answer.json()["items"]] == [202, 422, 202, 202, 202, 422, 202, 422]


async def test_to_name_an_object_is_a_use_of_it(gateway: Gateway, api: Client) -> None:
    mine = (await upload(api))["id"]
    gateway.clock.advance(DAY / 2)
    await api.post("/tasks", json={"run": RUN | {"args": [{"object": mine}]}})
    gateway.clock.advance(DAY * 0.9)
    assert (await api.get(f"/objects/{mine}")).status_code == 200


async def test_items_and_common_arguments_of_an_array_are_checked(api: Client) -> None:
    mine = (await upload(api))["id"]
    common = RUN | {"args": [{"object": mine}]}
    good = {"run": common, "items": [1, {"object": mine}]}
    assert (await api.post("/arrays", json=good)).status_code == 202
    listed = (await upload(api, json.dumps([1, {"object": OTHERS}]).encode()))["id"]
    for bad, where in (
        ({"run": RUN | {"args": [{"object": OTHERS}]}, "items": [1]}, "/run/args/0"),
        ({"run": RUN, "items": [1, {"object": OTHERS}]}, "/items/1"),
        ({"run": RUN, "items": {"object": listed}}, "/items/1"),
    ):
        assert "you have no object" in fault(await api.post("/arrays", json=bad), where)


async def test_many_objects_are_looked_for_page_by_page(api: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpubroker_server.gateway.submission.named_objects._PAGE", 2)
    mine = [(await upload(api, bytes([number])))["id"] for number in range(5)]
    items = [{"object": id} for id in mine]
    assert (await api.post("/arrays", json={"run": RUN, "items": items})).status_code == 202
    fault(await api.post("/arrays", json={"run": RUN, "items": [*items, {"object": OTHERS}]}), "/items/5")


async def test_token_that_submits_tasks_may_have_objects_and_a_reader_may_not(
    gateway: Gateway,
) -> None:
    submits = await gateway.client("submits", "tasks:write")
    mine = (await upload(submits))["id"]
    assert (await submits.post("/tasks", json={"run": RUN | {"args": [{"object": mine}]}})).status_code == 202
    assert (await submits.delete(f"/objects/{mine}")).status_code == 204
    reads = await gateway.client("reads", "tasks:read")
    refused = problem(await reads.post("/objects", content=b"x"), 403, "forbidden")
    assert "models:infer or tasks:write" in refused["detail"]


async def test_each_task_of_a_batch_names_its_own_objects(gateway: Gateway, api: Client) -> None:
    named = [(await api.post("/objects", content=content)).json()["id"] for content in (b"one", b"two")]
    runs: list[dict[str, Any]] = [
        {"entrypoint": "myteam.training:train", "args": [{"object": id}]} for id in named
    ]
    runs.append({"entrypoint": "myteam.training:train", "args": [1]})
    answer = await api.post("/tasks/batch", json={"tasks": [a_body(run) for run in runs]})
    ids = [TaskId(item["id"]) for item in answer.json()["items"]]
    specs = await gateway.store.specs(ids)
    assert [specs[id].objects for id in ids] == [(named[0],), (named[1],), ()]
