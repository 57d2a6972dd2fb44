"""Times, filters of lists, and changes of tasks, against recorded answers."""

import time
from datetime import UTC, datetime

from tests.client.command_line import Run
from tests.client.recorded_service import FULL_ID, RecordedService, Reply, a_task, page


def test_submit_takes_times_as_instants_or_durations(service: RecordedService, run: Run) -> None:
    service.reply_with(Reply(202, a_task(FULL_ID)), Reply(202, a_task(FULL_ID)))
    line = "submit a:b --not-before 2026-11-21T22:00Z --deadline 2h --queue-ttl 30m --expected 90"
    assert run(line).code == 0
    sent = service.requests[0].body
    assert datetime.fromisoformat(sent["not_before"]) == datetime(2026, 11, 21, 22, tzinfo=UTC)
    assert sent["deadline_seconds"] == 7200, "by the clock of the service"
    assert run("submit a:b --deadline 2026-11-21T22:00Z").code == 0
    assert service.requests[1].body["deadline_at"] == sent["not_before"]
    assert (sent["queue_ttl_seconds"], sent["expected_seconds"]) == (1800, 90)


def test_change_sets_and_removes_times(service: RecordedService, run: Run) -> None:
    service.reply_with(Reply(200, a_task(FULL_ID)))
    assert run("change", FULL_ID, "--queue-ttl", "2h", "--deadline", "none").code == 0
    assert service.requests[-1].method == "PATCH"
    assert service.requests[-1].body == {"queue_ttl_seconds": 7200.0, "deadline_at": None}
    refused = run("change", FULL_ID)
    assert refused.code == 2
    assert "give at least one of --priority, --not-before, --queue-ttl, --deadline" in refused.err


def test_change_sets_the_priority_together_with_times(service: RecordedService, run: Run) -> None:
    service.reply_with(Reply(200, a_task(FULL_ID)))
    assert run("change", FULL_ID, "--priority", "0", "--not-before", "none").code == 0
    assert service.requests[-1].body == {"priority": 0, "not_before": None}


def test_a_change_without_a_leader_prints_the_services_message(service: RecordedService, run: Run) -> None:
    waits = {"reason": "BackendUnavailable", "message": "no leader; the cancel is kept"}
    service.reply_with(Reply(202, a_task(FULL_ID, pending=waits)))
    assert f"{FULL_ID}: no leader; the cancel is kept" in run("cancel", FULL_ID).err


def test_ps_lists_tasks_since_a_time_or_for_a_duration(service: RecordedService, run: Run) -> None:
    service.reply_with(page(), page())
    assert run("ps --since 2026-11-21T22:00+00:00").code == 0
    assert run("ps --since 2h").code == 0
    at, ago = (datetime.fromisoformat(dict(request.params)["submitted_from"]) for request in service.requests)
    assert at == datetime(2026, 11, 21, 22, tzinfo=UTC)
    assert abs(time.time() - 7200 - ago.timestamp()) < 60
    assert "2h for two hours ago" in run("ps --since yesterday").err


def test_ps_lists_the_tasks_that_run_after_a_task(service: RecordedService, run: Run) -> None:
    service.reply_with(page())
    assert run("ps", "--all", "--after", FULL_ID).code == 0
    assert ("after", FULL_ID) in service.requests[-1].params


def test_cancel_with_filters_cancels_pending_tasks_first(service: RecordedService, run: Run) -> None:
    waits = FULL_ID[:-1] + "q"
    found = {"items": [a_task(FULL_ID, "running"), a_task(waits)], "next_cursor": None, "has_more": False}
    service.reply_with(Reply(200, found), Reply(200, a_task(waits, "cancelled")), Reply(200, a_task(FULL_ID)))
    ended = run("cancel --label run=42 --stream night --yes --reason", "wrong data")
    assert ended.code == 0
    assert {("label.run", "42"), ("stream", "night"), ("state", "running")} <= set(service.requests[0].params)
    assert [request.path for request in service.requests[1:]] == [
        f"/tasks/{id}/cancel" for id in (waits, FULL_ID)
    ]
    assert service.requests[1].body == {"reason": "wrong data"}


def test_cancelling_many_needs_a_confirmation(service: RecordedService, run: Run) -> None:
    service.reply_with(page(FULL_ID))
    assert "use --yes" in run("cancel --all").err
    for line in ("cancel", f"cancel {FULL_ID} --all", f"cancel {FULL_ID} --state pending"):
        ended = run(line)
        assert (ended.code, "name tasks, or select them with" in ended.err) == (2, True)
    assert [request.method for request in service.requests] == ["GET"]


def test_cancel_all_without_tasks_succeeds(service: RecordedService, run: Run) -> None:
    service.reply_with(page())
    assert run("cancel --all").code == 0
