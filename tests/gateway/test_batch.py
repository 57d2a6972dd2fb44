"""Batches: each task as if it were sent alone, and all of them in one commit."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.gateway.hot.batch import MAX_TASKS
from gpubroker_server.http.ids import Ids, is_task_id
from gpubroker_server.http.times import rfc3339
from msgspec.structs import replace

from tests.builders import NOW
from tests.gateway.harness import PYTHON, Client, Gateway, ManualClock, a_body, fault, problem

GIB = 1024


def numbered(count: int, **fields: Any) -> list[dict[str, Any]]:
    """Tasks that differ in their arguments."""
    run = {"entrypoint": "myteam.training:train"}
    return [a_body({**run, "kwargs": {"n": n}}, **fields) for n in range(count)]


async def send(api: httpx.AsyncClient, tasks: list[Any], *, key: str = "", **options: Any) -> httpx.Response:
    headers = {"Idempotency-Key": key} if key else {}
    return await api.post("/tasks/batch", json={"tasks": tasks, **options}, headers=headers)


async def test_each_task_has_its_answer_in_the_order_in_which_they_were_sent(api: Client) -> None:
    answer = await send(api, numbered(3))
    assert answer.status_code == 207
    assert (answer.json()["accepted"], answer.json()["refused"]) == (3, 0)
    for n, item in enumerate(answer.json()["items"]):
        assert item == {"status": 202, "id": item["id"], "url": f"/tasks/{item['id']}"}
        assert (await api.get(item["url"])).json()["id"] == item["id"]
        assert is_task_id(item["id"])
        assert n == 0 or item["id"] > answer.json()["items"][n - 1]["id"]


async def test_a_task_of_a_batch_is_the_same_as_one_sent_alone(gateway: Gateway, api: Client) -> None:
    said = {
        "name": "train",
        "priority": "interactive",
        "resources": {"gpu_mb": 4 * GIB, "custom": {"licence": 1}},
        "labels": {"team": "vision"},
        "env": {"MODE": "fast"},
        "max_retries": 2,
        "queue_ttl_seconds": 60.0,
    }
    runs: list[dict[str, Any]] = [
        {"entrypoint": "myteam.training:train", "args": [1, "NaN", 1.5e300, None], "kwargs": {"é": "ü"}},
        {"entrypoint": "myteam.training:train"},
        {"entrypoint": "myteam.other:train"},
        {"command": ["true"], "working_directory": "/srv"},
        {"command": ["false"]},
        {"function": "aGVsbG8=", "python": PYTHON},
    ]
    batched = (await send(api, [a_body(run, **said) for run in runs])).json()["items"]
    for run, item in zip(runs, batched, strict=True):
        alone = (await api.get(f"/tasks/{await api.submit(run, **said)}")).json()
        mine = (await api.get(item["url"])).json()
        assert {**mine, "id": "", "urls": {}, "pending": {}} == {**alone, "id": "", "urls": {}, "pending": {}}
        specs = await gateway.store.specs([mine["id"], alone["id"]])
        assert specs[mine["id"]] == specs[alone["id"]]


@pytest.mark.parametrize(
    ("bad", "pointer", "status"),
    [
        ({"nmae": "x"}, "/tasks/1/nmae", 422),
        ({"resources": {"gpu_mb": 10**7}}, "/tasks/1/resources/gpu_mb", 422),
        ({"run": {"entrypoint": "os:system"}}, "/tasks/1/run/entrypoint", 422),
        ({"run": {"entrypoint": "myteam.training:train", "args": [1e999]}}, "/tasks/1/run", 422),
        ({"after": ["task_01arz3ndektsv4rrffq69g5fav"]}, "/tasks/1/after/0/task", 422),
        ({"run": None}, "/tasks/1/run", 422),
        ({"stream": "none"}, "/tasks/1/stream", 422),
    ],
)
async def test_a_refused_task_has_its_pointer_and_the_others_are_stored(
    gateway: Gateway, api: Client, bad: dict[str, Any], pointer: str, status: int
) -> None:
    text = json.dumps({"tasks": [a_body(), a_body() | bad, a_body()]}).replace("Infinity", "1e999")
    answer = await api.post("/tasks/batch", content=text)
    items = answer.json()["items"]
    assert [item["status"] for item in items] == [202, status, 202]
    assert [found["pointer"] for found in items[1]["problem"]["errors"]] == [pointer]
    assert items[1]["problem"]["status"] == status
    assert len(gateway.world.tasks) == 2


async def test_an_item_that_is_not_an_object_is_refused_with_its_pointer(api: Client) -> None:
    items = (await send(api, [a_body(), 7, None])).json()["items"]
    assert [item["status"] for item in items] == [202, 422, 422]
    assert items[1]["problem"]["errors"][0]["pointer"] == "/tasks/1"


async def test_each_task_needs_the_scopes_of_its_own_run(gateway: Gateway) -> None:
    modest = await gateway.client("modest", "tasks:write", max_priority=60)
    runs: list[dict[str, Any]] = [{"entrypoint": "myteam.training:train"}, {"command": ["true"]}]
    tasks = [a_body(runs[0]), a_body(runs[1]), a_body(runs[0], priority=61)]
    items = (await send(modest, tasks)).json()["items"]
    assert [item["status"] for item in items] == [202, 403, 403]
    assert [item["problem"]["code"] for item in items[1:]] == ["forbidden", "priority-not-allowed"]
    assert items[1]["problem"]["errors"][0]["pointer"] == "/tasks/1"


async def test_a_task_with_another_kind_of_run_needs_its_scope_too(gateway: Gateway) -> None:
    modest = await gateway.client("modest", "tasks:write")
    bodies = [a_body({"command": ["true"]}), a_body({"command": ["false"]})]
    items = (await send(modest, bodies)).json()["items"]
    assert [item["status"] for item in items] == [403, 403]


async def test_all_or_nothing_answers_202_when_all_are_accepted(gateway: Gateway, api: Client) -> None:
    answer = await send(api, numbered(3), all_or_nothing=True)
    assert (answer.status_code, answer.json()["accepted"]) == (202, 3)
    assert len(gateway.world.tasks) == 3


async def test_all_or_nothing_names_all_refused_tasks_and_stores_none(gateway: Gateway, api: Client) -> None:
    tasks = [a_body(), a_body(nmae="x"), a_body(), a_body(resources={"gpu_mb": 10**7})]
    refused = problem(await send(api, tasks, all_or_nothing=True), 422, "batch-refused")
    assert [found["pointer"] for found in refused["errors"]] == [
        "/tasks/1/nmae",
        "/tasks/3/resources/gpu_mb",
    ]
    assert "2 of 4" in refused["detail"]
    assert len(gateway.world.tasks) == 0


async def test_a_batch_is_one_commit(gateway: Gateway, api: Client) -> None:
    heard: list[int] = []
    gateway.store.listen(lambda events: heard.append(len(events)))
    await send(api, numbered(5))
    assert sum(heard) == 5


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({}, "/tasks"),
        ({"tasks": []}, "/tasks"),
        ({"tasks": {}}, "/tasks"),
        ({"tasks": [{}] * (MAX_TASKS + 1)}, "/tasks"),
        ({"tasks": [a_body()], "all_or_none": True}, "/all_or_none"),
        ({"tasks": [a_body()], "all_or_nothing": "yes"}, "/all_or_nothing"),
        ([], ""),
    ],
)
async def test_a_body_that_is_not_a_batch_is_refused(api: Client, body: Any, pointer: str) -> None:
    fault(await api.post("/tasks/batch", json=body), pointer)


@pytest.mark.parametrize("text", [b"", b'{"tasks": [', b'{"tasks": [{"run": nope}]}', b'{"tasks": "\xff"}'])
async def test_a_batch_that_is_not_json_is_refused(api: Client, text: bytes) -> None:
    problem(await api.post("/tasks/batch", content=text), 400, "malformed-json")


async def test_a_batch_has_a_body_limit_of_its_own() -> None:
    async with Gateway(body_bytes=1000, batch_body_bytes=1500) as gateway:
        tasks = numbered(15)
        assert 1000 < len(json.dumps({"tasks": tasks})) < 1500
        assert (await send(gateway.admin, tasks)).status_code == 207
        refused = problem(await send(gateway.admin, numbered(40)), 413, "payload-too-large")
        assert "limits.batch_body_bytes" in refused["detail"]


async def test_the_same_key_and_batch_get_the_same_answer(gateway: Gateway, api: Client) -> None:
    tasks = [*numbered(2), a_body(nmae="x")]
    first = await send(api, tasks, key='"k"')
    again = await send(api, tasks, key="k")
    assert (again.status_code, again.content) == (first.status_code, first.content)
    assert again.headers["idempotency-replayed"] == "true"
    assert "idempotency-replayed" not in first.headers
    assert len(gateway.world.tasks) == 2


async def test_a_replayed_batch_gets_its_answer_although_its_deadline_has_passed(
    gateway: Gateway, api: Client
) -> None:
    tasks = [a_body(deadline_at=rfc3339(Instant(NOW + 60)))]
    first = await send(api, tasks, key="k")
    assert first.json()["accepted"] == 1
    gateway.clock.advance(120)
    assert (await send(api, tasks, key="k")).content == first.content
    assert (await send(api, tasks)).json()["refused"] == 1


@pytest.mark.parametrize("changed", [{"all_or_nothing": True}, {"tasks": numbered(3)}])
async def test_the_same_key_with_another_batch_stores_nothing(
    gateway: Gateway, api: Client, changed: dict[str, Any]
) -> None:
    body = {"tasks": numbered(2)}
    await api.post("/tasks/batch", json=body, headers={"Idempotency-Key": "k"})
    other = await api.post("/tasks/batch", json=body | changed, headers={"Idempotency-Key": "k"})
    assert "new key for a new batch" in problem(other, 422, "idempotency-key-reused")["detail"]
    assert len(gateway.world.tasks) == 2


async def test_a_key_of_a_task_is_not_a_key_of_a_batch(api: Client) -> None:
    await api.post("/tasks", json=a_body(), headers={"Idempotency-Key": "one"})
    problem(await send(api, [a_body()], key="one"), 422, "idempotency-key-reused")
    await send(api, [a_body()], key="many")
    alone = await api.post("/tasks", json=a_body(), headers={"Idempotency-Key": "many"})
    problem(alone, 422, "idempotency-key-reused")


async def test_two_requests_with_the_same_batch_at_once_get_one_answer(gateway: Gateway, api: Client) -> None:
    answers = await asyncio.gather(*(send(api, numbered(4), key="k") for _ in range(3)))
    assert len({answer.content for answer in answers}) == 1
    assert len(gateway.world.tasks) == 4


async def test_large_arguments_are_stored_before_the_rows_that_name_them() -> None:
    async with Gateway(inline_bytes=100) as gateway:
        bodies = [a_body({"entrypoint": "myteam.training:train", "args": ["x" * size]}) for size in (1, 200)]
        items = (await send(gateway.admin, bodies)).json()["items"]
        specs = await gateway.store.specs([item["id"] for item in items])
        digests = [specs[item["id"]].arguments_digest for item in items]
        assert digests[0] is None
        assert json.loads(gateway.blobs.objects[str(digests[1])])["args"] == ["x" * 200]


async def test_dependents_of_one_batch_are_looked_up_together(
    gateway: Gateway, api: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    parents = [await api.submit() for _ in range(3)]
    asked: list[int] = []
    stands = gateway.store.states

    async def counted(tasks: Any) -> Any:
        asked.append(len(tasks))
        return await stands(tasks)

    monkeypatch.setattr(gateway.store, "states", counted)
    items = (await send(api, [a_body(after=[parent]) for parent in parents])).json()["items"]
    assert [item["status"] for item in items] == [202] * 3
    assert asked == [3]
    for parent, item in zip(parents, items, strict=True):
        assert [it.task for it in gateway.task(item["id"]).after] == [parent]


async def test_other_requests_are_answered_while_a_large_batch_is_read(gateway: Gateway) -> None:
    transport = httpx.ASGITransport(gateway.app)
    plain = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=gateway.admin.headers)
    async with plain:
        sending = asyncio.ensure_future(send(plain, numbered(4000)))
        answered = 0
        while not sending.done():
            assert (await plain.get("/stats")).status_code == 200
            await asyncio.sleep(0)
            answered += not sending.done()
        assert (await sending).json()["accepted"] == 4000
    assert answered >= 3


async def test_ids_of_one_batch_are_in_order_and_never_repeat() -> None:
    ids = Ids()
    some = [*ids.tasks(NOW, MAX_TASKS), ids.task(NOW), *ids.tasks(NOW, 3)]
    assert len(set(some)) == len(some)
    assert all(map(is_task_id, some))
    assert some == sorted(some)


async def test_replayed_task_is_answered_although_a_new_one_would_be_refused(
    gateway: Gateway, api: Client
) -> None:
    body = a_body(deadline_seconds=60.0, resources={"gpu_mb": 1024})
    first = await api.post("/tasks", json=body, headers={"Idempotency-Key": "k"})
    permissions = replace(gateway.parts.rules.permissions, entrypoints=())
    gateway.change(permissions=permissions)
    again = await api.post("/tasks", json=body, headers={"Idempotency-Key": "k"})
    assert (again.status_code, again.json()["id"]) == (202, first.json()["id"])
    problem(await api.post("/tasks", json=body), 422, "entrypoint-not-allowed")


async def test_a_bare_list_is_refused_with_the_field_it_belongs_in(api: Client) -> None:
    found = problem(await api.post("/tasks/batch", json=[a_body()]), 422, "validation-failed")
    assert found["detail"] == 'must be an object, such as {"tasks": [...]}'


class TickingClock(ManualClock):
    def now(self) -> Instant:
        self.advance(1.0)
        return self.at


async def test_tasks_of_a_batch_share_one_submission_time_and_keep_their_order() -> None:
    gateway = Gateway()
    gateway.clock = TickingClock()
    async with gateway:
        bodies = [a_body(name="a"), a_body(name="b"), a_body(name="a")]
        answer = await gateway.admin.post("/tasks/batch", json={"tasks": bodies})
        ids = [item["id"] for item in answer.json()["items"]]
        times = {gateway.task(id).submitted_at for id in ids}
    assert (len(times), ids) == (1, sorted(ids))
