"""Lists of tasks that are sorted by submission, end or priority, page by page."""

import base64
from typing import Any

import pytest

from tests.gateway.harness import Client, Gateway, fault, problem


@pytest.fixture
async def tasks(gateway: Gateway, api: Client) -> list[str]:
    """Five, of priorities 10 30 20 30 10; the fifth, the first and the third have ended in this order, the
    others are held."""
    made = [
        await api.submit(name=f"t{n}", priority=level, held=level == 30)
        for n, level in enumerate((10, 30, 20, 30, 10))
    ]
    for n in (4, 0, 2):
        await gateway.end(made[n])
        gateway.clock.advance(1.0)
    return made


async def paged(api: Client, sort: str, size: int, **params: str) -> list[str]:
    names: list[str] = []
    cursor: dict[str, str] = {}
    while True:
        asked: dict[str, Any] = {"sort": sort, "limit": size, **cursor, **params}
        page = (await api.get("/tasks", params=asked)).json()
        assert len(page["items"]) == size or not page["has_more"]
        names += [task["name"] for task in page["items"]]
        if not page["has_more"]:
            return names
        cursor = {"cursor": page["next_cursor"]}


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(
    ("sort", "names"),
    [
        ("submitted", "t0 t1 t2 t3 t4"),
        ("-submitted", "t4 t3 t2 t1 t0"),
        ("finished", "t4 t0 t2"),
        ("-finished", "t2 t0 t4"),
        ("priority", "t0 t4 t2 t1 t3"),
        ("-priority", "t3 t1 t2 t4 t0"),
    ],
)
async def test_pages_of_any_size_follow_the_order(
    tasks: list[str], api: Client, sort: str, names: str, size: int
) -> None:
    assert await paged(api, sort, size) == names.split()


async def test_filters_hold_in_every_order(tasks: list[str], api: Client) -> None:
    assert await paged(api, "priority", 1, state="pending") == ["t1", "t3"]
    assert await paged(api, "-priority", 1, max_priority="20") == ["t2", "t4", "t0"]
    assert await paged(api, "-finished", 1, state="succeeded,running") == ["t2", "t0", "t4"]


async def test_by_their_ends_only_ended_tasks_can_be_listed(tasks: list[str], api: Client) -> None:
    refused = await api.get("/tasks", params={"sort": "finished", "state": "pending"})
    assert "state=pending asks for others" in fault(refused, "query:sort")


async def test_a_list_by_turn_has_its_own_order(api: Client) -> None:
    refused = await api.get("/tasks", params={"sort": "priority", "order": "turn"})
    assert "its own order" in fault(refused, "query:sort")
    problem(await api.get("/tasks", params={"sort": "name"}), 422, "validation-failed")


async def test_a_cursor_belongs_to_its_order(tasks: list[str], api: Client) -> None:
    page = (await api.get("/tasks", params={"sort": "priority", "limit": 2})).json()
    for sort in ("-priority", "submitted", "finished"):
        answer = await api.get("/tasks", params={"sort": sort, "cursor": page["next_cursor"]})
        assert "other filters" in problem(answer, 400, "cursor-invalid")["detail"]


@pytest.mark.parametrize("place", ["{id}", "nan:{id}", "1e999:{id}", ":{id}", "1:2:{id}", "x"])
async def test_a_forged_cursor_is_refused(tasks: list[str], api: Client, place: str) -> None:
    page = (await api.get("/tasks", params={"sort": "priority", "limit": 2})).json()
    cursor = page["next_cursor"]
    made_for = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))[:12]
    forged = base64.urlsafe_b64encode(made_for + place.format(id=tasks[0]).encode()).decode().rstrip("=")
    answer = await api.get("/tasks", params={"sort": "priority", "cursor": forged})
    problem(answer, 400, "cursor-invalid")
