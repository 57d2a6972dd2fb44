"""Times, filters of lists, and changes of tasks, against recorded answers."""

import time
from datetime import UTC, datetime
from typing import Any

import pytest
from gpubroker import WrongArgument
from gpubroker.tasks.naming import UNFINISHED

from tests.client.command_line import Run
from tests.client.conftest import Do
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


def test_show_has_the_rate_of_progress_and_what_is_left(service: RecordedService, run: Run) -> None:
    at = {"at": "2026-11-21T10:00:00Z", "eta_at": "2026-11-21T10:20:00Z"}
    progress = {"fraction": 0.25, "message": "epoch 3", "rate_per_second": 0.000625, **at}
    service.reply_with(Reply(200, a_task(FULL_ID, state="running", progress=progress)))
    shown = run("show", FULL_ID).out
    assert "25% epoch 3 (3.75% a minute; at 2026-11-21 10:00:00Z 20m were left)" in shown


@pytest.mark.parametrize("list_", ["nodes", "models", "objects", "lease list", "workers list"])
def test_other_lists_are_sorted_by_the_service(service: RecordedService, run: Run, list_: str) -> None:
    service.reply_with(page(), page())
    assert run(f"{list_} --sort=-name -o json").code == 0
    assert dict(service.requests[0].params)["sort"] == "-name"


def test_ps_sorts_by_what_it_is_told(service: RecordedService, run: Run) -> None:
    service.reply_with(page(), page())
    assert run("ps --sort=-priority --limit 7").code == 0
    asked = dict(service.requests[0].params)
    assert (asked["sort"], asked["limit"]) == ("-priority", "8")
    assert "order" not in asked
    assert run("ps --sort finished").code == 0
    assert "state" not in dict(service.requests[1].params), "ended tasks, not those of a plain ps"


def test_retry_sends_one_keyed_request_and_the_new_task_is_the_last(
    service: RecordedService, run: Run
) -> None:
    new = FULL_ID[:-1] + "z"
    service.reply_with(Reply(202, a_task(new, retry_of=FULL_ID)), Reply(200, a_task(new, retry_of=FULL_ID)))
    assert new[-8:] in run("retry", FULL_ID).out
    [sent] = service.requests
    assert (sent.method, sent.path) == ("POST", f"/tasks/{FULL_ID}/retry")
    assert len(sent.headers["idempotency-key"]) > 30
    shown = run("show", "last").out
    assert service.requests[-1].path == f"/tasks/{new}"
    [line] = [line for line in shown.splitlines() if line.startswith("retry of")]
    assert line.split()[-1] == FULL_ID[-8:]


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


def cancelled(**counts: int | bool) -> Reply:
    names = ("matched", "waiting", "started", "cancelled", "stopping", "already_ended", "stored")
    return Reply(200, {**dict.fromkeys(names, 0), "has_more": False, **counts})


def test_cancel_with_filters_is_one_request_that_says_what_became_of_each(
    service: RecordedService, run: Run
) -> None:
    service.reply_with(cancelled(matched=4, cancelled=2, stopping=1, already_ended=1))
    ended = run(
        "cancel --label run=42 --stream night --state pending -s running --yes --reason", "wrong data"
    )
    assert (ended.code, ended.out) == (0, "2 cancelled, 1 stopping, 1 already ended\n")
    [asked] = service.requests
    assert (asked.method, asked.path) == ("POST", "/tasks/cancel")
    assert asked.body == {
        "labels": {"run": "42"}, "stream": "night", "state": ["pending", "running"], "reason": "wrong data"
    }  # fmt: skip


def test_cancelling_many_needs_a_confirmation(service: RecordedService, run: Run) -> None:
    service.reply_with(cancelled(matched=1, waiting=1))
    assert "use --yes" in run("cancel --all").err
    for line in (
        "cancel",
        f"cancel {FULL_ID} --all",
        f"cancel {FULL_ID} --state pending",
        "cancel -a -n fit",
    ):
        ended = run(line)
        assert (ended.code, "name tasks, or select them with" in ended.err) == (2, True)
    assert [request.body for request in service.requests] == [{"all": True, "dry_run": True}]


def test_cancel_all_without_tasks_succeeds(service: RecordedService, run: Run) -> None:
    service.reply_with(cancelled(), cancelled())
    ended = run("cancel --all")
    assert (ended.code, ended.out) == (0, "no task matches\n")


def test_more_tasks_than_one_request_ends_are_cancelled_in_several(
    service: RecordedService, run: Run
) -> None:
    service.reply_with(
        cancelled(matched=10_000, cancelled=10_000, has_more=True), cancelled(matched=5, cancelled=5)
    )
    assert run("cancel --all --yes -o json").json["cancelled"] == 10_005
    assert [request.body for request in service.requests] == [{"all": True}] * 2


def test_what_a_missing_leader_has_yet_to_cancel_is_not_asked_again(
    service: RecordedService, run: Run
) -> None:
    service.reply_with(cancelled(matched=10_000, stored=10_000, has_more=True))
    assert run("cancel --all --yes").out == "10000 stored: the leader will cancel them\n"
    assert len(service.requests) == 1


def test_the_sdk_cancels_everything_only_if_it_is_said(service: RecordedService, do: Do) -> None:
    empty: tuple[dict[str, Any], ...] = ({}, {"labels": {}}, {"everything": True, "stream": "night"})
    for wrong in empty:
        with pytest.raises(WrongArgument, match="everything=True"):
            do("cancel_selected", **wrong)
    service.reply_with(cancelled(matched=1, stopping=1))
    assert do("cancel_selected", stream="night", state="running", grace_seconds=5).stopping == 1
    assert service.requests[-1].body == {"stream": "night", "state": ["running"], "grace_seconds": 5}


def test_ps_writes_a_reason_that_several_tasks_have_once(service: RecordedService, run: Run) -> None:
    ids = [f"{FULL_ID[:-1]}{last}" for last in "abcd"]
    reasons = [("needs 18.0 GiB", 1), ("needs 40.0 GiB", 2), ("needs 18.0 GiB", 3), ("held", None)]
    tasks = [
        a_task(id, pending={"reason": "WaitingForMemory", "message": message, "position": position})
        for id, (message, position) in zip(ids, reasons, strict=True)
    ]
    service.reply_with(Reply(200, {"items": tasks, "next_cursor": None}), *(Reply(200, one) for one in tasks))
    notes = [line.split("  ")[-1].strip() for line in run("ps").out.splitlines()[1:]]
    assert notes == ["1. needs 18.0 GiB", "2. needs 40.0 GiB", "3. as position 1", "held"]


def test_more_than_a_page_of_tasks_is_listed_newest_first(service: RecordedService, run: Run) -> None:
    service.reply_with(page(FULL_ID))
    assert run("ps -o ndjson --limit 2000").code == 0
    assert ("order", "turn") not in service.requests[0].params


def test_a_name_means_the_one_unfinished_task_that_has_it(service: RecordedService, run: Run) -> None:
    ended = FULL_ID[:-1] + "q"
    service.reply_with(page(FULL_ID), Reply(200, a_task(FULL_ID)))
    assert run("show", "fit", "-o", "json").json["id"] == FULL_ID
    assert {value for name, value in service.requests[0].params if name == "state"} == set(UNFINISHED)
    service.reply_with(page(), page(ended), Reply(200, a_task(ended, "failed")))
    assert run("show", "fit", "-o", "json").json["id"] == ended, "if all have ended, the one that has it"


def test_ps_says_why_pending_tasks_wait(service: RecordedService, run: Run) -> None:
    waiting, running = a_task(FULL_ID, name="fit"), a_task("task_2", "running", name="judge")
    pending = {"reason": "WaitingForMemory", "message": "needs 18.0 GiB", "position": 2}
    service.reply_with(
        Reply(200, {"items": [waiting, running], "next_cursor": None}),
        Reply(200, {**waiting, "pending": pending}),
    )
    ended = run("ps")
    [head, first, second] = ended.out.splitlines()
    assert "NOTE" in head
    assert FULL_ID[-8:] in first
    assert "2. needs 18.0 GiB" in first
    assert "judge" in second
    assert {("state", "pending"), ("order", "turn")} <= set(service.requests[0].params)
    assert ("state", "succeeded") not in service.requests[0].params
