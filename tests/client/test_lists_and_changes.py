"""What the command line narrows lists by, and what it changes of tasks, against recorded answers."""

import time
from datetime import UTC, datetime

from tests.client.command_line import Run
from tests.client.recorded_service import FULL_ID, RecordedService, Reply, a_task, page


def test_times_are_changed_and_taken_away(service: RecordedService, run: Run) -> None:
    service.told(Reply(200, a_task(FULL_ID)))
    assert run("change", FULL_ID, "--queue-ttl", "2h", "--deadline", "none").code == 0
    assert service.asked[-1].method == "PATCH"
    assert service.asked[-1].body == {"queue_ttl_seconds": 7200.0, "deadline_at": None}
    refused = run("change", FULL_ID)
    assert refused.code == 2
    assert "say what to change: --priority, --not-before, --queue-ttl or --deadline" in refused.err


def test_a_priority_is_changed_together_with_times(service: RecordedService, run: Run) -> None:
    service.told(Reply(200, a_task(FULL_ID)))
    assert run("change", FULL_ID, "--priority", "0", "--not-before", "none").code == 0
    assert service.asked[-1].body == {"priority": 0, "not_before": None}


def test_what_is_asked_for_while_nobody_leads_is_told_beside_the_task(
    service: RecordedService, run: Run
) -> None:
    waits = {"reason": "BackendUnavailable", "message": "nobody leads; the cancel is kept"}
    service.told(Reply(202, a_task(FULL_ID, pending=waits)))
    assert f"{FULL_ID}: nobody leads; the cancel is kept" in run("cancel", FULL_ID).err


def test_tasks_are_listed_since_a_time_or_for_a_while(service: RecordedService, run: Run) -> None:
    service.told(page(), page())
    assert run("ps --since 2026-11-21T22:00+00:00").code == 0
    assert run("ps --since 2h").code == 0
    at, ago = (datetime.fromisoformat(dict(asked.params)["submitted_from"]) for asked in service.asked)
    assert at == datetime(2026, 11, 21, 22, tzinfo=UTC)
    assert abs(time.time() - 7200 - ago.timestamp()) < 60
    assert "2h for two hours ago" in run("ps --since yesterday").err


def test_who_runs_after_a_task_is_listed(service: RecordedService, run: Run) -> None:
    service.told(page())
    assert run("ps", "--all", "--after", FULL_ID).code == 0
    assert ("after", FULL_ID) in service.asked[-1].params
