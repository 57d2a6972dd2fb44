"""One task, followed by its id through the logs of all processes."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.service_process import ServiceProcess, until
from tests.patience import PATIENCE_SECONDS


def lines_of(*logs: Path) -> list[dict[str, Any]]:
    """In the order in which they were written. Raises ValueError for a line that is no JSON."""
    lines = [json.loads(line) for log in logs for line in log.read_text(encoding="utf-8").splitlines()]
    return sorted(lines, key=lambda line: str(line["timestamp"]))


def test_a_task_is_followed_by_its_id_through_the_logs_of_all_processes(tmp_path: Path) -> None:
    logs: dict[str, Any] = {"log_format": "json", "access_log": True}
    with ServiceProcess(tmp_path / "data", ray={"spares": 1, "warm_runners": 0}, **logs) as service:
        bearer = {"Authorization": f"Bearer {service.token}"}
        wish = {"run": {"entrypoint": "tests.e2e.work:add", "args": [1, 2]}, "resources": {"gpu_mb": 1024}}
        accepted = httpx.post(f"{service.url}/tasks", json=wish, headers=bearer)
        task, request = accepted.json()["id"], accepted.headers["request-id"]
        assert service.broker.result(task, timeout_seconds=PATIENCE_SECONDS) == 3
        tomorrow = service.broker.get(task).submitted_at + timedelta(days=1)
        later = service.broker.submit("tests.e2e.work:add", 1, 2, not_before=tomorrow)
        service.broker.cancel(later)
        service_log, agent_log = tmp_path / "data.log", tmp_path / "data/runs/local/agent.log"
        until(lambda: '"event":"run gone"' in agent_log.read_text(), "the agent has told the end of it")
        told = [line for line in lines_of(service_log, agent_log) if line.get("task") == task]
        moves = [line for line in lines_of(service_log) if line.get("task") == later.id]
        driver_log = (tmp_path / "data/ray-driver.log").read_text()

    events = [line["event"] for line in told]
    assert events[:3] == ["task accepted", "task admitted", "run ordered"]
    assert [event for event in events if event.startswith("run ")] == [
        "run ordered", "run started", "run ended", "run gone",
    ]  # fmt: skip
    # The end of a short run may reach the leader together with its start.
    assert [event for event in events[2:] if event.startswith("task ")] in (
        ["task started", "task succeeded"],
        ["task succeeded"],
    )
    assert (told[0]["request"], told[0]["tenant"]) == (request, "default")
    assert {(line["attempt"], line["node"]) for line in told[1:]} == {(1, "local")}
    assert [line["event"] for line in moves] == ["task accepted", "asked", "task cancelled"]
    assert "cancel" in moves[1]["what"]
    assert moves[1]["request"].startswith("req_")

    every = lines_of(service_log)
    answered = [line for line in every if line["event"] == "answered" and line["request"] == request]
    [line] = answered
    assert (line["method"], line["path"], line["status"], line["token"]) == ("POST", "/tasks", 202, "admin")
    assert "gpubroker listens on" in every[0]["event"] + every[1]["event"] + every[2]["event"]
    assert every[-1]["event"].startswith("gpubroker stopped")
    for said in driver_log.splitlines():
        assert json.loads(said)["event"], "what Ray prints is elsewhere"
