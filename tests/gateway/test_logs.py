"""What a gateway logs about tasks and requests, so that both can be followed."""

from structlog.testing import capture_logs

from tests.gateway.harness import Client, Gateway, a_body


async def test_what_is_asked_of_a_task_is_logged_with_its_id(gateway: Gateway, api: Client) -> None:
    with capture_logs() as lines:
        task = await api.submit()
        await api.post(f"/tasks/{task}/cancel")
    assert [(line["event"], line["task"], line["tenant"]) for line in lines] == [
        ("task accepted", task, "default"),
        ("asked", task, "default"),
        ("task cancelled", task, "default"),
    ]
    assert lines[1]["what"] == "cancel"


async def test_tasks_of_a_batch_are_logged_together(gateway: Gateway, api: Client) -> None:
    with capture_logs() as lines:
        answer = await api.post("/tasks/batch", json={"tasks": [a_body() for _ in range(101)]})
    ids = [item["id"] for item in answer.json()["items"]]
    assert [line["tasks"].split() for line in lines] == [ids[:100], ids[100:]]


async def test_answered_requests_are_logged_if_that_is_wanted(gateway: Gateway, api: Client) -> None:
    with capture_logs() as lines:
        await api.get("/stats")
    assert lines == []
    gateway.change(access_log=True)
    stranger = gateway.with_secret("wrong")
    with capture_logs() as lines:
        await api.get("/gpus?history=1m")
        await stranger.get("/tasks")
    assert all(line.pop("seconds") >= 0 for line in lines)
    line = {"event": "answered", "log_level": "info", "method": "GET", "client": "127.0.0.1"}
    assert lines == [
        {**line, "path": "/gpus", "status": 200, "token": "admin", "tenant": "default"},
        {**line, "path": "/tasks", "status": 401, "token": None, "tenant": None},
    ]
