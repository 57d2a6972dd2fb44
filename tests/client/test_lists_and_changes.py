"""Times that people type, what lists are narrowed by, and what is changed, against recorded answers."""

import time
from datetime import UTC, datetime

from tests.client.command_line import Run
from tests.client.recorded_service import FULL_ID, RecordedService, Reply, a_task, page


def test_submit_reads_times_as_instants_or_as_durations_from_now(service: RecordedService, run: Run) -> None:
    service.told(Reply(202, a_task(FULL_ID)), Reply(202, a_task(FULL_ID)))
    line = "submit a:b --not-before 2026-11-21T22:00Z --deadline 2h --queue-ttl 30m --expected 90"
    assert run(line).code == 0
    sent = service.asked[0].body
    assert datetime.fromisoformat(sent["not_before"]) == datetime(2026, 11, 21, 22, tzinfo=UTC)
    assert sent["deadline_seconds"] == 7200, "by the clock of the service"
    assert run("submit a:b --deadline 2026-11-21T22:00Z").code == 0
    assert service.asked[1].body["deadline_at"] == sent["not_before"]
    assert (sent["queue_ttl_seconds"], sent["expected_seconds"]) == (1800, 90)


def test_times_are_changed_and_taken_away(service: RecordedService, run: Run) -> None:
    service.told(Reply(200, a_task(FULL_ID)))
    assert run("change", FULL_ID, "--queue-ttl", "2h", "--deadline", "none").code == 0
    assert service.asked[-1].method == "PATCH"
    assert service.asked[-1].body == {"queue_ttl_seconds": 7200.0, "deadline_at": None}
    refused = run("change", FULL_ID)
    assert refused.code == 2
    assert "give at least one of --priority, --not-before, --queue-ttl, --deadline" in refused.err


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


def test_all_of_a_sort_are_cancelled_those_that_wait_first(service: RecordedService, run: Run) -> None:
    waits = FULL_ID[:-1] + "q"
    found = {"items": [a_task(FULL_ID, "running"), a_task(waits)], "next_cursor": None, "has_more": False}
    service.told(Reply(200, found), Reply(200, a_task(waits, "cancelled")), Reply(200, a_task(FULL_ID)))
    ended = run("cancel --label run=42 --stream night --yes --reason", "wrong data")
    assert ended.code == 0
    assert {("label.run", "42"), ("stream", "night"), ("state", "running")} <= set(service.asked[0].params)
    assert [asked.path for asked in service.asked[1:]] == [f"/tasks/{id}/cancel" for id in (waits, FULL_ID)]
    assert service.asked[1].body == {"reason": "wrong data"}


def test_nobody_cancels_many_by_mistake(service: RecordedService, run: Run) -> None:
    service.told(page(FULL_ID))
    assert "use --yes" in run("cancel --all").err
    for line in ("cancel", f"cancel {FULL_ID} --all", f"cancel {FULL_ID} --state pending"):
        ended = run(line)
        assert (ended.code, "name tasks, or select them with" in ended.err) == (2, True)
    assert [asked.method for asked in service.asked] == ["GET"]


def test_where_none_is_left_none_is_cancelled(service: RecordedService, run: Run) -> None:
    service.told(page())
    assert run("cancel --all").code == 0
