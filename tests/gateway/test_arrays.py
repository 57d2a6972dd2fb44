"""Arrays over HTTP."""

import asyncio
import base64
import json
from typing import Any

import cloudpickle
import pytest
from gpubroker.runtime.items import parted
from gpubroker_server.broker.arrays import Arrays, with_pages_stored
from gpubroker_server.core.admission.defaults import Defaults, NamedDefaults
from gpubroker_server.core.domain.decisions import Decision, ItemPage
from gpubroker_server.core.domain.holders import WorkerSeat
from gpubroker_server.core.domain.limits import ServiceLimits
from gpubroker_server.core.domain.orders import Failure, ItemResult, ItemsReported
from gpubroker_server.core.domain.submission import ItemTerms
from gpubroker_server.core.domain.units import Fence, TaskId

from tests.builders import NOW
from tests.gateway.harness import PYTHON, Client, Gateway, fault
from tests.memory_blobs import Blobs
from tests.patience import PATIENCE_SECONDS

RUN = {"entrypoint": "myteam.checks:verify", "args": [3]}


FUNCTION = {
    "function": base64.b64encode(cloudpickle.dumps((len, (), {}))).decode(),
    "python": PYTHON,
    "cloudpickle": cloudpickle.__version__,
}


async def submitted(api: Client, items: Any = (1, 2, 3), **fields: Any) -> dict[str, Any]:
    body = {"run": RUN, "items": list(items) if isinstance(items, tuple) else items, **fields}
    answer = await api.post("/arrays", json=body)
    assert answer.status_code == 202, answer.text
    return dict(answer.json())


async def done(gateway: Gateway, worker: str, *results: ItemResult, number: int = 1) -> None:
    """The worker reports these results, and the leader commits them."""
    task, now = gateway.task(worker), gateway.clock.now()
    await gateway.hear(ItemsReported(task.id, task.fence, now, number, results, (), 1))


def result(number: int, text: bytes = b"1") -> ItemResult:
    return ItemResult(number, 0.5, 1, text, None)


def failure(number: int) -> ItemResult:
    return ItemResult(number, 0.5, 1, None, Failure("exception", "ValueError: no", "trace"))


async def test_an_array_is_a_batch_of_workers_that_get_all_items(gateway: Gateway, api: Client) -> None:
    seen = await submitted(
        api, ({"a": 1}, "two", 3), max_parallel=2, item_retries=1, item_timeout_seconds=9.0,
        name="checks", labels={"team": "x"}, resources={"cpu": 0.1},
    )  # fmt: skip
    assert (seen["state"], seen["total"], seen["done"], seen["fraction"]) == ("pending", 3, 0, 0.0)
    workers = [worker["id"] for worker in seen["workers"]]
    assert workers[0] == seen["id"]
    assert len(workers) == 2
    task, spec = (
        gateway.task(workers[1]),
        (await gateway.store.specs([TaskId(workers[1])]))[TaskId(workers[1])],
    )
    assert (task.holder, task.shareable) == (WorkerSeat(seen["id"]), False)
    assert spec.labels == {"team": "x", "array": seen["id"]}
    assert spec.items == ItemTerms(TaskId(seen["id"]), item_retries=1, item_timeout_seconds=9.0)
    arguments, items = parted(spec.arguments)
    assert json.loads(arguments) == {"args": [3], "kwargs": {}}
    assert json.loads(items) == [{"a": 1}, "two", 3]
    listed = (await api.get("/tasks", params={"label.array": seen["id"]})).json()["items"]
    assert {task["id"] for task in listed} == set(workers)


async def test_each_worker_has_the_profile_that_its_array_names(gateway: Gateway, api: Client) -> None:
    gateway.change(defaults=Defaults(profiles={"scorer": NamedDefaults(cpu=1.0, gpus=0)}))
    seen = await submitted(api, profile="scorer", resources={"memory_mb": 64}, max_parallel=2)
    assert len(seen["workers"]) == 2
    for worker in seen["workers"]:
        demand = gateway.task(worker["id"]).demand
        assert (demand.cpu, demand.gpus, demand.memory_mb) == (1.0, 0, 64)


async def test_there_are_no_more_workers_than_chunks(api: Client) -> None:
    assert len((await submitted(api, (1, 2, 3), max_parallel=9))["workers"]) == 3
    assert len((await submitted(api, (1, 2, 3), max_parallel=9, chunk=2))["workers"]) == 2


async def test_large_items_are_one_object_of_all_workers(gateway: Gateway, api: Client) -> None:
    seen = await submitted(api, ("x" * 200_000,) * 2)
    ids = [TaskId(worker["id"]) for worker in seen["workers"]]
    specs = await gateway.store.specs(ids)
    [digest] = {spec.arguments_digest for spec in specs.values()}
    assert digest in gateway.blobs.objects
    assert gateway.task(ids[1]).queued_bytes < 1000


async def test_items_may_be_pickled_or_in_an_object(gateway: Gateway, api: Client) -> None:
    pickled = cloudpickle.dumps([{1}, {2}])
    given = {"pickled": base64.b64encode(pickled).decode(), "count": 2}
    assert (await submitted(api, given, run=FUNCTION))["total"] == 2
    packed = (await api.post("/objects", content=pickled)).json()["id"]
    stored = {"object": packed, "count": 2}
    assert (await submitted(api, stored, run=FUNCTION))["total"] == 2
    for items in (given, stored):  # to open them runs code, for which an entrypoint needs no scope
        refused = await api.post("/arrays", json={"run": RUN, "items": items})
        assert (refused.status_code, refused.json()["errors"][0]["code"]) == (422, "pickled-items")
    listed = (await api.post("/objects", content=b"[1, 2, 3]")).json()["id"]
    assert (await submitted(api, {"object": listed}))["total"] == 3
    wrong = (await api.post("/objects", content=b"no list")).json()["id"]
    refused = await api.post("/arrays", json={"run": RUN, "items": {"object": wrong}})
    assert (refused.status_code, refused.json()["errors"][0]["code"]) == (422, "not-a-list")
    missing = await api.post("/arrays", json={"run": RUN, "items": {"object": "ab" * 32}})
    assert missing.status_code == 404


@pytest.mark.parametrize(
    ("content", "count", "pickled"),
    [
        (b"\n [1, 2]", None, False),
        (b"\n [1, 2]", 2, False),
        (cloudpickle.dumps([1, 2]), 2, True),
    ],
)
async def test_workers_know_whether_items_are_pickled_also_when_retried(
    gateway: Gateway, api: Client, content: bytes, count: int | None, pickled: bool
) -> None:
    stored = (await api.post("/objects", content=content)).json()["id"]
    seen = await submitted(api, {"object": stored, "count": count}, run=FUNCTION)
    assert seen["total"] == 2
    await gateway.admit(seen["id"])
    for worker in seen["workers"]:
        await gateway.end(worker["id"])
    again = (await api.post(f"/arrays/{seen['id']}/retry")).json()
    ids = [TaskId(seen["id"]), TaskId(again["id"])]
    specs = await gateway.store.specs(ids)
    items = [specs[id].items for id in ids]
    assert [it is not None and it.pickled for it in items] == [pickled] * 2


@pytest.mark.parametrize(
    ("given", "kept"),
    [({}, ["failure", "timeout"]), ({"retry_on": ["timeout"]}, ["timeout"])],
)
async def test_workers_know_what_uses_a_retry_of_an_item_also_when_retried(
    gateway: Gateway, api: Client, given: dict[str, Any], kept: list[str]
) -> None:
    seen = await submitted(api, item_retries=2, **given)
    await gateway.admit(seen["id"])
    for worker in seen["workers"]:
        await gateway.end(worker["id"])
    again = (await api.post(f"/arrays/{seen['id']}/retry")).json()
    assert (seen["retry_on"], again["retry_on"]) == (kept, kept)
    ids = [TaskId(seen["id"]), TaskId(again["id"])]
    specs = await gateway.store.specs(ids)
    assert [it is not None and it.retry_on for it in (specs[id].items for id in ids)] == [tuple(kept)] * 2
    record = await gateway.store.record(ids[0])
    assert record is not None
    assert record.task.retry_on == ("failure", "timeout"), "of the worker itself: it comes back in any case"


@pytest.mark.parametrize(
    ("fields", "pointer"),
    [
        ({"items": []}, "/items"),
        ({"resources": {"bundles": [{"cpu": 1}]}}, "/resources/bundles"),
        ({"max_retries": 3}, "/max_retries"),
        ({"labels": {"array": "x"}}, "/labels/array"),
        ({"max_parallel": 0}, "/max_parallel"),
    ],
)
async def test_what_an_array_cannot_have_is_refused(
    api: Client, fields: dict[str, Any], pointer: str
) -> None:
    refused = await api.post("/arrays", json={"run": RUN, "items": [1], **fields})
    assert (refused.status_code, refused.json()["errors"][0]["pointer"]) == (422, pointer)


async def test_a_repeated_request_with_its_key_gets_the_same_array(api: Client) -> None:
    body = {"run": RUN, "items": [1]}
    first = await api.post("/arrays", json=body, headers={"Idempotency-Key": "k"})
    again = await api.post("/arrays", json=body, headers={"Idempotency-Key": "k"})
    assert first.json()["id"] == again.json()["id"]
    assert again.headers["idempotency-replayed"] == "true"
    other = await api.post("/arrays", json={**body, "items": [2]}, headers={"Idempotency-Key": "k"})
    assert other.json()["code"] == "idempotency-key-reused"


async def test_results_are_paged_filtered_and_lines(gateway: Gateway, api: Client) -> None:
    seen = await submitted(api, tuple(range(6)), max_parallel=1)
    await gateway.admit(seen["id"])
    await done(gateway, seen["id"], result(4), failure(5))
    gateway.clock.advance(2.0)
    await done(gateway, seen["id"], result(0, b'"' + b"x" * 300 + b'"'), result(1), number=2)
    now = (await api.get(f"/arrays/{seen['id']}")).json()
    assert (now["state"], now["done"], now["failed"], now["items_per_second"]) == ("running", 4, 1, 2.0)
    assert now["eta_at"] is not None
    path = f"/arrays/{seen['id']}/items"

    async def page(**params: Any) -> dict[str, Any]:
        return dict((await api.get(path, params=params)).json())

    first = await page(limit=1)
    assert [item["number"] for item in first["items"]] == [0, 1]
    assert (first["next_after"], first["has_more"]) == (1, True)
    rest = await page(after=1)
    assert [item["number"] for item in rest["items"]] == [4, 5]
    assert not rest["has_more"]
    assert rest["items"][0] == {"number": 4, "state": "succeeded", "seconds": 0.5, "tries": 1, "result": 1}
    assert rest["items"][1]["error"] == {
        "kind": "exception",
        "message": "ValueError: no",
        "traceback": "trace",
    }
    assert [item["number"] for item in (await page(after=4))["items"]] == [5], "within a page"
    assert [item["number"] for item in (await page(order="completed"))["items"]] == [4, 5, 0, 1]
    assert [item["number"] for item in (await page(order="completed", after=1))["items"]] == [0, 1]
    assert [item["number"] for item in (await page(state="failed"))["items"]] == [5]
    assert [item["number"] for item in (await page(state="succeeded"))["items"]] == [0, 1, 4]
    lines = await api.get(path, params={"format": "ndjson"})
    assert lines.headers["content-type"] == "application/x-ndjson"
    assert (lines.headers["next-after"], lines.headers["has-more"]) == ("5", "false")
    assert [json.loads(line)["number"] for line in lines.text.splitlines()] == [0, 1, 4, 5]


async def test_an_answer_ends_with_the_page_that_makes_it_large(
    gateway: Gateway, api: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpubroker_server.gateway.arrays.items.MAX_BYTES", 300)
    seen = await submitted(api, tuple(range(3)), max_parallel=1)
    await gateway.admit(seen["id"])
    for number in range(3):
        await done(gateway, seen["id"], result(number, b'"' + b"x" * 200 + b'"'), number=number + 1)
    path = f"/arrays/{seen['id']}/items"
    first = (await api.get(path)).json()
    assert ([item["number"] for item in first["items"]], first["has_more"]) == ([0, 1], True)
    rest = (await api.get(path, params={"after": first["next_after"]})).json()
    assert ([item["number"] for item in rest["items"]], rest["has_more"]) == ([2], False)


async def test_failed_and_missing_items_are_done_again_when_the_array_has_ended(
    gateway: Gateway, api: Client
) -> None:
    seen = await submitted(api, tuple(range(4)), max_parallel=1, labels={"team": "x"})
    await gateway.admit(seen["id"])
    await done(gateway, seen["id"], result(0), failure(1), result(2))
    path = f"/arrays/{seen['id']}"
    early = await api.post(f"{path}/retry")
    assert (early.status_code, early.json()["code"]) == (409, "array-not-finished")
    assert (await api.post(f"{path}/cancel")).status_code == 202
    await gateway.end(seen["id"], failure=Failure("stopped", ""))
    assert (await api.get(path)).json()["state"] == "cancelled"

    again = (await api.post(f"{path}/retry")).json()
    assert (again["total"], again["retry_of"], again["state"]) == (2, seen["id"], "pending")
    await gateway.admit(again["id"])
    await done(gateway, again["id"], result(0), result(1), result(3))
    over = (await api.get(f"/arrays/{again['id']}")).json()
    assert (over["state"], over["done"]) == ("succeeded", 2), "items that it does not have do not count"
    nothing = await api.post(f"/arrays/{again['id']}/retry")
    assert (nothing.status_code, nothing.json()["code"]) == (409, "nothing-to-retry")


async def test_retried_array_needs_the_objects_of_its_arguments_and_items_left(
    gateway: Gateway, api: Client
) -> None:
    """The arguments are those that all items have in common."""
    common, was_done, left = [
        (await api.post("/objects", content=data)).json()["id"] for data in (b"common", b"done", b"left")
    ]
    run = {**RUN, "args": [{"object": common}]}
    seen = await submitted(api, ({"object": was_done}, {"object": left}), max_parallel=1, run=run)
    await gateway.admit(seen["id"])
    await done(gateway, seen["id"], result(0), failure(1))
    await gateway.end(seen["id"])
    await api.delete(f"/objects/{was_done}")
    path = f"/arrays/{seen['id']}/retry"
    assert (await api.post(path)).status_code == 202
    for object_id, where in ((left, "/items/1"), (common, "/run/args/0")):
        await api.delete(f"/objects/{object_id}")
        assert "you have no object" in fault(await api.post(path), where)
        await api.post("/objects", content=b"left")


async def test_retried_function_needs_its_objects_and_those_of_its_json_items(
    gateway: Gateway, api: Client
) -> None:
    """Objects that pickled items name are not looked for."""
    own = (await api.post("/objects", content=b"own")).json()["id"]
    named = {"object": (await api.post("/objects", content=b"named")).json()["id"]}
    pickled = base64.b64encode(json.dumps([named]).encode()).decode()
    in_json, opaque = [
        await submitted(api, items, run=FUNCTION | {"objects": [own]}, max_parallel=1)
        for items in ((1, named), {"pickled": pickled, "count": 1})
    ]
    for seen in (in_json, opaque):
        await api.post(f"/arrays/{seen['id']}/cancel")
    await gateway.turn()
    await api.delete(f"/objects/{named['object']}")
    await api.delete(f"/objects/{own}")
    for where in ("/items/1", "/run/objects/0"):
        assert "you have no object" in fault(await api.post(f"/arrays/{in_json['id']}/retry"), where)
    assert (await api.post(f"/arrays/{opaque['id']}/retry")).status_code == 202


async def test_an_array_fails_with_its_last_worker_or_an_item(gateway: Gateway, api: Client) -> None:
    seen = await submitted(api, (1, 2), max_parallel=1)
    await gateway.admit(seen["id"])
    await done(gateway, seen["id"], failure(0), result(1))
    assert (await api.get(f"/arrays/{seen['id']}")).json()["state"] == "failed"


async def test_other_tenants_see_nothing_and_a_task_is_no_array(gateway: Gateway, api: Client) -> None:
    seen = await submitted(api)
    other = await gateway.client("other", "tasks:read", "tasks:write", tenant="acme")
    for path in (f"/arrays/{seen['id']}", f"/arrays/{seen['id']}/items", f"/arrays/{await api.submit()}"):
        assert (await other.get(path)).status_code == 404
    assert (await other.post(f"/arrays/{seen['id']}/cancel")).status_code == 404
    assert (await api.get(f"/arrays/{await api.submit()}")).status_code == 404
    assert (await api.get("/arrays/nonsense")).status_code == 404


async def test_a_worker_is_not_retried_as_a_task(gateway: Gateway, api: Client) -> None:
    seen = await submitted(api, (1,))
    await gateway.end(seen["id"])
    refused = await api.post(f"/tasks/{seen['id']}/retry")
    assert (refused.status_code, refused.json()["code"]) == (409, "task-not-retryable")


FORGED = (b"NaN", b'1}\r{"number":7', b'1,"state":"failed"', b"[" * 50_000, b"1\n2", b"\xff")


async def test_a_result_that_only_claims_to_be_json_is_returned_as_bytes(
    gateway: Gateway, api: Client
) -> None:
    """It neither breaks the answer nor changes what is done again."""
    seen = await submitted(api, tuple(range(8)), max_parallel=1)
    await gateway.admit(seen["id"])
    forged = [result(number, data) for number, data in enumerate(FORGED)]
    await done(gateway, seen["id"], *forged, result(6, b'{"a": "\\u2028"}'))
    path = f"/arrays/{seen['id']}"
    found = (await api.get(f"{path}/items")).json()["items"]
    assert [(item["number"], item["state"]) for item in found] == [(n, "succeeded") for n in range(7)]
    as_stored = [data.replace(b"\n", b" ") for data in FORGED]
    assert [base64.b64decode(item["data_base64"]) for item in found[:-1]] == as_stored
    assert found[-1]["result"] == {"a": "\u2028"}
    lines = (await api.get(f"{path}/items", params={"format": "ndjson"})).content.split(b"\n")
    assert [json.loads(line) for line in lines[:-1]] == found
    await gateway.end(seen["id"])
    assert (await api.post(f"{path}/retry")).json()["total"] == 1


async def test_large_pages_are_written_at_once() -> None:
    """Each waits for the disk: one after the other, those of many workers would hold the leader up."""
    every = asyncio.Barrier(3)

    class Waits(Blobs):
        async def put(self, data: bytes, *, owner: str) -> str:
            await every.wait()
            return await super().put(data, owner=owner)

    def a_decision(worker: str, *sizes: int) -> Decision:
        pages = (ItemPage(TaskId("a"), n, n, "t", 1, 0, NOW, b"x" * size) for n, size in enumerate(sizes))
        return Decision(worker, "items", items=tuple(pages))

    given = [a_decision("w1", 300, 10), a_decision("w2"), a_decision("w3", 400, 500)]
    async with asyncio.timeout(PATIENCE_SECONDS):
        one, two, three = await with_pages_stored(given, blobs := Waits(), 200)
    assert [page.lines for page in (*one.items, *three.items)] == [b"", b"x" * 10, b"", b""]
    assert [blobs.objects[str(page.digest)] for page in three.items] == [b"x" * 400, b"x" * 500]
    assert two is given[1]


async def test_too_many_items_are_refused(api: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpubroker_server.gateway.arrays.submit.MAX_ITEMS", 2)
    refused = await api.post("/arrays", json={"run": RUN, "items": [1, 2, 3]})
    assert "at most 2 items; there are 3" in fault(refused, "/items")


async def test_damaged_results_are_told(gateway: Gateway, api: Client) -> None:
    seen = await submitted(api, (1,))
    await gateway.admit(seen["id"])
    await done(gateway, seen["id"], result(0, b'"' + b"x" * ServiceLimits().inline_bytes + b'"'))
    gateway.blobs.objects.clear()
    told = await api.get(f"/arrays/{seen['id']}/items")
    assert (told.status_code, told.json()["code"]) == (500, "result-damaged")


@pytest.mark.parametrize("left", [0, 1])
async def test_the_leader_forgets_an_array_whose_workers_have_ended(
    gateway: Gateway, api: Client, left: int
) -> None:
    """Until then, each batch of reports looks at an array without work left: a worker of it may be requeued.
    Items may be left: no worker is left for them."""
    seen = await submitted(api, (1, 2), max_parallel=1)
    await gateway.admit(seen["id"])
    task, arrays = gateway.task(seen["id"]), Arrays(gateway.store, gateway.world)
    results = tuple(map(result, range(2 - left)))
    await arrays.drafts([ItemsReported(task.id, task.fence, gateway.clock.now(), 1, results, (), 1)])
    arrays._drafts[task.id].left = left
    arrays.committed()
    assert list(await arrays.drafts([])) == ([] if left else [task.id])
    assert list(arrays._works) == [task.id]
    await gateway.end(seen["id"])
    arrays.committed()
    assert arrays._works == {}


async def test_a_report_of_a_task_that_is_no_worker_changes_nothing(gateway: Gateway, api: Client) -> None:
    task = await api.submit()
    await gateway.admit(task)
    before = gateway.task(task).version
    await done(gateway, task, result(0))
    assert gateway.task(task).version == before
    unknown = [ItemsReported(TaskId("task_x"), Fence(1), gateway.clock.now(), 1, (), (), 1)]
    assert await Arrays(gateway.store, gateway.world).drafts(unknown) == {}
