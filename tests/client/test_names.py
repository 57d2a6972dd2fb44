"""Tasks that the SDK is given by their names, as on the command line."""

from typing import Any

import pytest
from gpubroker import AsyncBroker, Refused

from tests.client.conftest import Do
from tests.client.recorded_service import FULL_ID, RecordedService, Reply, a_task, outcome, page
from tests.client.test_gateway import broker as broker
from tests.client.test_gateway import gateway as gateway
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
        ("events", [Reply(200, {"items": []})], "/events"),
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
