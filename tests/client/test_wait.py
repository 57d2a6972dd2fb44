"""Waiting on the command line, also through a restart of the service."""

import pytest
from gpubroker.cli.tasks import results

from tests.client.command_line import Run
from tests.client.recorded_service import FULL_ID, RecordedService, Reply, a_task, failed, outcome


def test_wait_survives_a_restart_of_the_service(service: RecordedService, run: Run) -> None:
    restarting = Reply(503, {"detail": "starting"}, {"Retry-After": "3.1"})
    service.reply_with(Reply(202, a_task(FULL_ID)), restarting)
    service.reply_with(Reply(200, a_task(FULL_ID, "succeeded")), outcome("succeeded", result=7))
    assert run("submit a:b --wait").json == 7


def test_a_lost_service_is_reported_with_how_to_wait_again(service: RecordedService, run: Run) -> None:
    service.reply_with(Reply(202, a_task(FULL_ID)), Reply(503, {"detail": "gone"}, {"Retry-After": "100"}))
    ended = run("submit a:b --wait")
    assert ended.code == 7
    assert f"the task continues; wait again: gpubroker wait {FULL_ID}" in ended.err


def test_wait_exits_as_the_task_ended(service: RecordedService, run: Run) -> None:
    shown = Reply(200, a_task(FULL_ID, "failed"))
    service.reply_with(shown, shown, failed())
    ended = run("wait", FULL_ID, "-o", "json")
    assert (ended.code, ended.json["state"]) == (3, "failed")


def test_a_long_wait_says_why_the_task_waits(
    service: RecordedService, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "SILENT_SECONDS", 0.0)
    why = {"reason": "WaitingForMemory", "message": "needs 18.0 GiB on one GPU", "position": 4}
    waiting, done = Reply(202, a_task(FULL_ID)), Reply(200, a_task(FULL_ID, "succeeded"))
    told = f"position 4, WaitingForMemory: needs 18.0 GiB on one GPU; more: gpubroker explain {FULL_ID[-8:]}"
    service.reply_with(waiting, waiting, Reply(200, a_task(FULL_ID, pending=why)), done, outcome("succeeded"))
    assert run("submit a:b --wait").err.splitlines() == [f"accepted {FULL_ID}", told]
    service.reply_with(waiting, Reply(200, a_task(FULL_ID, "running")), done, done, outcome("succeeded"))
    assert run("wait", FULL_ID, "--timeout", "60s").err == "", "a running task does not wait"
    service.reply_with(waiting)
    assert run("wait", FULL_ID, "--timeout", "0").code == 5
