"""Waiting on the command line, also through a restart of the service."""

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
