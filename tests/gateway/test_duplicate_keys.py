"""A key that stands twice in one JSON object is refused: which one counts differs from parser to parser."""

import json

import pytest

from tests.gateway.harness import Client, Gateway, fault, problem

RUN = '"run": {"entrypoint": "myteam.a:b"}'
TWICE = {
    "at the top": (f'{{{RUN}, "priority": 10, "priority": 100}}', "priority"),
    "the same value": (f'{{{RUN}, "priority": 10, "priority": 10}}', "priority"),
    "spelled with an escape": (f'{{{RUN}, "name": "a", "n\\u0061me": "b"}}', "name"),
    "the run": (f"{{{RUN}, {RUN}}}", "run"),
    "in the run": ('{"run": {"entrypoint": "myteam.a:b", "entrypoint": "other:c"}}', "entrypoint"),
    "in arguments": ('{"run": {"entrypoint": "myteam.a:b", "kwargs": {"x": [{"y": 1, "y": 2}]}}}', "y"),
    "a label": (f'{{{RUN}, "labels": {{"team": "a", "team": "b"}}}}', "team"),
}


@pytest.mark.parametrize("where", TWICE)
async def test_a_key_that_stands_twice_is_named(gateway: Gateway, api: Client, where: str) -> None:
    text, key = TWICE[where]
    response = await api.post("/tasks", content=text)
    assert f'duplicate key "{key}"' in fault(response, "")
    batch = f'{{"tasks": [{{{RUN}}}, {{{RUN}}}, {text}, {{{RUN}}}]}}'
    items = (await api.post("/tasks/batch", content=batch)).json()["items"]
    assert [item["status"] for item in items] == [202, 202, 422, 202]
    assert f'duplicate key "{key}"' in items[2]["problem"]["detail"]
    assert len(gateway.world.tasks) == 3


@pytest.mark.parametrize(
    "text",
    [
        f'{{"tasks": [{{{RUN}}}], "tasks": [{{{RUN}, "priority": 1}}]}}',
        f'{{"all_or_nothing": true, "tasks": [{{{RUN}}}], "all_or_nothing": false}}',
        f'{{"tasks": 1, "tasks": [{{{RUN}}}]}}',
    ],
)
async def test_a_key_of_a_batch_that_stands_twice_is_named(gateway: Gateway, api: Client, text: str) -> None:
    assert "duplicate key" in fault(await api.post("/tasks/batch", content=text), "")
    assert not gateway.world.tasks


async def test_other_bodies_are_read_alike(api: Client) -> None:
    for method, path in (
        ("POST", "/tokens"),
        ("POST", "/leases"),
        ("POST", "/tasks/simulate"),
        ("PATCH", f"/tasks/{await api.submit()}"),
    ):
        response = await api.request(method, path, content='{"name": "a", "name": "b"}')
        assert 'duplicate key "name"' in fault(response, ""), path


async def test_what_follows_the_json_of_an_inference_is_not_read(api: Client) -> None:
    text = b'{"model": "m", "inputs": [], "inputs": []}'
    for after in (b"", b'{"a": 1, "a": 2}'):
        headers = {"Inference-Header-Content-Length": str(len(text))} if after else {}
        response = await api.post("/inferences", content=text + after, headers=headers)
        assert 'duplicate key "inputs"' in fault(response, "")


async def test_equal_keys_of_different_objects_are_no_duplicates(api: Client) -> None:
    run = {"entrypoint": "myteam.a:b", "kwargs": {"a": {"a": [{"a": 1}, {"a": 2}]}, "b": {"a": 1}}}
    assert (
        await api.post("/tasks", content=json.dumps({"run": run, "labels": {"run": "a"}}))
    ).status_code == 202
    problem(await api.post("/tasks", content=b'{"a": 1, "a": '), 400, "malformed-json")
