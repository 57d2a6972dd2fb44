"""Tasks that the SDK is given by their names, as on the command line."""

from typing import Any

import pytest
from gpubroker import AsyncBroker, Refused, Submission, task
from gpubroker.tasks.submission import MAX_BODY_BYTES

from tests.client.conftest import Do
from tests.client.recorded_service import FULL_ID, RecordedService, Reply, a_task, outcome, page
from tests.client.test_arrays import ID
from tests.client.test_arrays import array as an_array
from tests.client.test_arrays import item as an_item
from tests.client.test_arrays import page as items_page
from tests.client.test_gateway import broker as broker
from tests.client.test_gateway import gateway as gateway
from tests.client.test_worker_sets import SET
from tests.gateway.harness import Gateway

OTHER = FULL_ID[:-4] + "zzzz"
RUNS = Reply(200, a_task(FULL_ID, "running"))
ENDED = Reply(200, a_task(FULL_ID, "succeeded"))


@pytest.mark.parametrize(
    ("name", "replies", "path"),
    [
        ("get", [RUNS], ""),
        ("wait", [ENDED], "/wait"),
        ("result", [ENDED, outcome("succeeded", result=1)], "/result"),
        ("outcome", [outcome("succeeded", result=1)], "/result"),
        ("retry", [RUNS], "/retry"),
        ("change", [RUNS], ""),
        ("explain", [Reply(200, {"id": FULL_ID})], "/explain"),
        ("stack", [Reply(200, {"id": FULL_ID})], "/stack"),
        ("events", [Reply(200, {"items": [], "next_after": 0})], "/events"),
        ("logs", [Reply(200, b""), Reply(200, b"")], "/logs"),
        ("cancel", [RUNS], "/cancel"),
    ],
)
def test_an_operation_on_a_task_takes_its_name(
    service: RecordedService, do: Do, name: str, replies: list[Reply], path: str
) -> None:
    service.reply_with(page(FULL_ID), *replies)
    do(name, "nightly")
    first, *_, last = service.requests
    assert (first.path, dict(first.params)["name"]) == ("/tasks", "nightly")
    assert last.path == f"/tasks/{FULL_ID}{path}"


def test_tasks_to_run_after_are_found_by_their_names(service: RecordedService, do: Do) -> None:
    service.reply_with(page(FULL_ID), page(OTHER), Reply(202, a_task("task_3")))
    do("submit", "a:b", after=["nightly", {"task": "weekly", "on_failure": "ignore"}])
    assert service.requests[-1].body["after"] == [FULL_ID, {"task": OTHER, "on_failure": "ignore"}]


@pytest.mark.parametrize(
    ("name", "replies", "path"),
    [
        ("array", [an_array()], ""),
        ("cancel_array", [an_array()], "/cancel"),
        ("retry_array", [an_array()], "/retry"),
        ("array_items", [items_page(after=0)], "/items"),
        ("array_progress", [an_array(3, state="succeeded")], ""),
    ],
)
def test_an_operation_on_an_array_takes_its_name(
    service: RecordedService, do: Do, name: str, replies: list[Reply], path: str
) -> None:
    service.reply_with(page(FULL_ID), *replies)
    do(name, "sweep")
    first, last = service.requests
    assert (first.path, dict(first.params)["name"]) == ("/tasks", "sweep")
    assert last.path == f"/arrays/{FULL_ID}{path}"


@pytest.mark.parametrize("word", ["solvers", FULL_ID[-8:]])
@pytest.mark.parametrize(
    ("name", "args", "reply", "path"),
    [
        ("worker_set", [], SET, ""),
        ("scale_worker_set", [2], SET, ""),
        ("signal_worker_set", [1.0], SET, "/signal"),
        ("end_worker_set", [], SET, ""),
        ("call_worker", ["solve"], {"worker": "t", "result": 7}, "/call"),
    ],
)
def test_an_operation_on_a_worker_set_takes_its_name(
    service: RecordedService, do: Do, word: str, name: str, args: list[Any], reply: dict[str, Any], path: str
) -> None:
    first_page = {"items": [{**SET, "name": "other"}], "next_cursor": "c"}
    second_page = {"items": [{**SET, "id": FULL_ID}], "next_cursor": None}
    service.reply_with(Reply(200, first_page), Reply(200, second_page), Reply(200, reply))
    do(name, word, *args)
    *lists, last = service.requests
    assert [(each.path, dict(each.params)) for each in lists] == [
        ("/worker-sets", {}),
        ("/worker-sets", {"cursor": "c"}),
    ]
    assert last.path == f"/worker-sets/{FULL_ID}{path}"


def test_a_worker_set_that_no_name_means_is_refused(service: RecordedService, do: Do) -> None:
    service.reply_with(Reply(200, {"items": []}), page(), page(), page(), page())
    with pytest.raises(
        Refused, match="no worker set is named 'solver', and an id needs at least 8"
    ) as refused:
        do("worker_set", "solver")
    assert refused.value.code == "not-found"


@pytest.mark.parametrize(
    ("name", "args", "made"),
    [
        ("submit_array", [[1]], an_array()),
        ("map", [[1]], an_array(1, total=1, state="succeeded")),
        ("create_worker_set", [], Reply(202, SET)),
        ("simulate", [], Reply(200, {})),
    ],
)
def test_arrays_sets_and_forecasts_run_after_tasks_by_name(
    service: RecordedService, do: Do, name: str, args: list[Any], made: Reply
) -> None:
    service.reply_with(page(FULL_ID), made, items_page(an_item(0), after=1))
    do(name, "jobs:f", *args, after=["nightly"])
    assert service.requests[1].body["after"] == [FULL_ID]


def test_a_decorators_dependencies_are_found_by_their_names(service: RecordedService, do: Do) -> None:
    service.reply_with(page(FULL_ID), Reply(202, a_task("task_3")))
    do("submit", task(after=["nightly"])(lambda: None))
    assert service.requests[-1].body["after"] == [FULL_ID]


def test_a_name_in_a_batch_means_its_task_before_an_older_one(service: RecordedService, do: Do) -> None:
    answers = [{"status": 202, "id": f"task_{number}"} for number in range(4)]
    stored = Reply(201, {"id": "a" * 64, "size_bytes": 9})
    service.reply_with(page(FULL_ID), stored, Reply(207, {"items": answers}))
    nightly = {"task": "nightly", "on_failure": "ignore"}
    batch = [
        Submission("a:b", name="split"),
        Submission("a:b", after=["split", "nightly", 0]),
        Submission("a:b", after=[nightly]),
        Submission("a:b", "x" * MAX_BODY_BYTES, after=["nightly"]),
    ]
    do("submit_many", batch)
    search, *_, sent = service.requests
    assert (search.path, dict(search.params)["name"]) == ("/tasks", "nightly")
    assert [each.path for each in service.requests] == ["/tasks", "/objects", "/tasks/batch"]
    assert [each.get("after") for each in sent.body["tasks"]] == [
        None,
        ["split", FULL_ID, 0],
        [{"task": FULL_ID, "on_failure": "ignore"}],
        [FULL_ID],
    ]


def test_arrays_and_worker_sets_show_themselves_in_one_short_line(service: RecordedService, do: Do) -> None:
    service.reply_with(an_array(1, name="sweep", failed=1), Reply(200, SET))
    assert repr(do("array", FULL_ID)) == f"<Array {ID} 'sweep', running, 1/3, 1 failed>"
    assert repr(do("worker_set", FULL_ID)) == "<WorkerSet task_1 'solvers', active, 1/2 running>"


def test_a_name_of_two_tasks_changes_neither(service: RecordedService, do: Do) -> None:
    service.reply_with(page(FULL_ID, OTHER))
    with pytest.raises(Refused, match="'nightly' is ambiguous") as refused:
        do("cancel", "nightly")
    assert (refused.value.code, [one.method for one in service.requests]) == ("ambiguous-name", ["GET"])


async def test_names_and_parts_of_ids_are_found_at_the_gateway(gateway: Gateway, broker: AsyncBroker) -> None:
    old = await broker.submit("myteam.training:fit", name="nightly")
    await gateway.end(old.id, b"7")
    new: Any = await broker.submit("myteam.training:fit", name="nightly")
    assert await broker.task_id("nightly") == new.id
    assert await broker.task_id(old.id[-8:]) == old.id
    assert (await broker.cancel("nightly")).id == new.id
    with pytest.raises(Refused, match="no task is named 'weekly', and an id needs at least 8"):
        await broker.wait("weekly")
