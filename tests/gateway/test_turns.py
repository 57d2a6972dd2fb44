"""`GET /tasks?order=turn`: what runs, what waits in the order of the queue, what ended last."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from gpubroker_server.core.domain.orders import Failure
from sqlalchemy import Engine, event

from tests.gateway.harness import Client, Gateway, problem


async def listed(api: Client, **params: Any) -> list[str]:
    answer = await api.get("/tasks", params={"order": "turn", **params})
    assert answer.status_code == 200, answer.text
    return [task["name"] for task in answer.json()["items"]]


async def submitted(gateway: Gateway, api: Client, **tasks: Any) -> dict[str, str]:
    """Ids by name, a second apart."""
    ids = {}
    for name, fields in tasks.items():
        gateway.clock.advance(1.0)
        ids[name] = await api.submit(name=name, **fields)
    return ids


async def test_what_runs_comes_before_the_queue_in_its_order_and_what_ended_last(
    gateway: Gateway, api: Client
) -> None:
    small = {"resources": {"cpu": 0.5}}
    ids = await submitted(gateway, api, early=small, late=small)
    for name in ("late", "early"):
        await gateway.end(ids[name])
        gateway.clock.advance(1.0)
    ids |= await submitted(gateway, api, runs=small)
    await gateway.admit(ids["runs"])
    ids |= await submitted(gateway, api, runs_too=small)
    await gateway.admit(ids["runs_too"])
    ids |= await submitted(
        gateway, api, low={"priority": 41}, high={"priority": 69}, held={}, middle={}, urgent={"priority": 95}
    )
    await api.patch(f"/tasks/{ids['held']}", json={"held": True})
    in_order = ["runs", "runs_too", "urgent", "high", "middle", "low", "held", "early", "late"]
    assert await listed(api) == in_order
    assert await listed(api, limit=5) == in_order[:5]
    assert await listed(api, state="pending") == ["urgent", "high", "middle", "low", "held"]
    assert await listed(api, state="succeeded", limit=1) == ["early"]
    positions = [
        (await api.get(f"/tasks/{ids[name]}")).json()["pending"]["position"]
        for name in ("urgent", "high", "middle", "low")
    ]
    assert positions == [1, 2, 3, 4]


async def test_filters_hold_in_the_queue_too(gateway: Gateway, api: Client) -> None:
    await submitted(
        gateway, api, one={"labels": {"set": "a"}}, two={"priority": 60}, three={"labels": {"set": "a"}},
        four={"labels": {"set": "a"}, "priority": 60},
    )  # fmt: skip
    assert await listed(api, **{"label.set": "a"}) == ["four", "one", "three"]
    assert await listed(api, max_priority=54) == ["one", "three"]
    assert await listed(api, **{"label.set": "b"}) == []


async def test_a_list_by_turn_is_one_page_of_the_own_tenant(gateway: Gateway, api: Client) -> None:
    other = await gateway.client("other", tenant="acme")
    await other.submit(name="theirs")
    await submitted(gateway, api, one={}, two={})
    answer = (await api.get("/tasks", params={"order": "turn", "limit": 1})).json()
    assert (len(answer["items"]), answer["has_more"], answer["next_cursor"]) == (1, True, None)
    first = (await api.get("/tasks", params={"limit": 1})).json()["next_cursor"]
    problem(await api.get("/tasks", params={"order": "turn", "cursor": first}), 400, "cursor-invalid")
    assert await listed(other) == ["theirs"]


@contextmanager
def after_statement(number: int, act: Callable[[], Coroutine[Any, Any, None]]) -> Iterator[list[str]]:
    """Run `act` on the event loop after the reading of tasks of this number, while its reader waits.
    Yields the readings."""
    loop, seen = asyncio.get_running_loop(), list[str]()

    def listen(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "AS chosen" in statement and len(seen) < number:
            seen.append(statement)
            if len(seen) == number:
                asyncio.run_coroutine_threadsafe(act(), loop).result()

    event.listen(Engine, "after_cursor_execute", listen)
    try:
        yield seen
    finally:
        event.remove(Engine, "after_cursor_execute", listen)


@pytest.mark.parametrize("statement", [1, 2, 3])
async def test_task_that_starts_during_the_read_is_listed_once(
    gateway: Gateway, api: Client, statement: int
) -> None:
    ids = await submitted(gateway, api, starts={"resources": {"cpu": 0.5}}, held={"held": True})
    with after_statement(statement, lambda: gateway.admit(ids["starts"])) as seen:
        assert await listed(api) == ["starts", "held"]
    assert len(seen) == statement, "the task started during the read"


@pytest.mark.parametrize("statement", [1, 2, 3])
async def test_task_that_loses_its_run_during_the_read_is_listed_once(
    gateway: Gateway, api: Client, statement: int
) -> None:
    ids = await submitted(
        gateway, api, lost={"max_retries": 1, "resources": {"cpu": 0.5}}, held={"held": True}
    )
    await gateway.admit(ids["lost"])

    async def lose() -> None:
        await gateway.end(ids["lost"], failure=Failure("killed", "it was killed"))

    with after_statement(statement, lose) as seen:
        assert await listed(api) == ["lost", "held"]
    assert len(seen) == statement, "the run was lost during the read"
