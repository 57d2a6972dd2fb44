"""What a newcomer and an operator met on their first day: words, tables and hints of the command line."""

import os
from typing import Any

import pytest
from gpubroker import CallFailed, TaskFailed, Unreachable
from gpubroker.cli.app import command_of
from gpubroker.transport.connection import Connection
from gpubroker.transport.faults import unreachable

from tests.client.command_line import Run
from tests.client.recorded_service import FULL_ID, RecordedService, Reply, a_task, page
from tests.client.test_quarantine import LISTED, STUCK

ARRAY: dict[str, Any] = {
    "id": FULL_ID, "name": "", "tenant": "default", "state": "running", "total": 1, "done": 0,
    "succeeded": 0, "failed": 0, "running": 0, "max_parallel": 1, "workers": [],
    "created_at": "2026-11-21T10:00:00Z",
}  # fmt: skip
NOTHING = {"pending": 0, "admitted": 0, "running": 0, "stopping": 0}


@pytest.mark.parametrize("line", ["--upload m:C -a large -j 2", "m:C --upload -a large -j 2"])
def test_upload_without_a_directory_leaves_a_set_its_class_and_options(line: str) -> None:
    create = command_of("workers").commands["create"]
    given = create.make_context("create", line.split()).params
    assert (given["target"], given["upload"], given["args"], given["count"]) == ("m:C", ".", ("large",), 2)


def test_an_accepted_task_has_hints_that_fit_80_columns(service: RecordedService, run: Run) -> None:
    service.reply_with(Reply(202, a_task(FULL_ID, name="train")), Reply(202, a_task(FULL_ID, name="")))
    short = FULL_ID[-8:]
    assert run("submit a:b").err == (
        f"accepted train; to follow it: gpubroker logs -f {short}\n"
        f"why it waits, or where it runs: gpubroker explain {short}\n"
    )
    assert run("submit a:b").err.startswith(f"accepted {short}; ")


def test_quarantine_fits_80_columns(
    service: RecordedService, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.reply_with(LISTED)
    listed = run("quarantine").out.splitlines()
    assert f"! train: {STUCK['message']}" in listed, "below the table, where a terminal wraps whole words"
    assert "WAITS FOR" not in listed[0]


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ({"running": 2, "pending": 1}, "3 tasks of other tenants are: gpubroker ps --all-tenants;"),
        ({"stopping": 1}, "1 task of another tenant is: gpubroker ps --all-tenants;"),
        ({}, "no task is pending or running; gpubroker ps --all includes finished tasks"),
    ],
)
def test_ps_without_tasks_of_the_own_tenant_names_those_of_others(
    service: RecordedService, run: Run, counts: dict[str, int], said: str
) -> None:
    service.reply_with(page(), Reply(200, {"tasks": {**NOTHING, **counts}}))
    assert said in run("ps").out


def test_ps_names_the_array_or_the_set_of_a_worker(service: RecordedService, run: Run) -> None:
    whole: dict[str, Any] = {"labels": {"array": FULL_ID}, "state": "running"}
    own = a_task("task_2", state="running", labels={"array": "of-mine"})
    listed = {"items": [a_task(FULL_ID, **whole), own], "next_cursor": None, "has_more": False}
    service.reply_with(Reply(200, listed))
    first, second = run("ps").out.splitlines()[1:]
    assert first.endswith(f"worker of array {FULL_ID[-8:]}")
    assert "worker of" not in second


def test_the_repetition_of_failed_items_is_the_last_submit(service: RecordedService, run: Run) -> None:
    service.reply_with(Reply(202, ARRAY), Reply(200, a_task(FULL_ID)))
    assert run("array", FULL_ID, "--retry").err == f"accepted {FULL_ID}: 1 item again\n"
    assert run("show last").code == 0
    assert service.requests[-1].path == f"/tasks/{FULL_ID}"


def test_outputs_say_why_there_are_none(service: RecordedService, run: Run) -> None:
    patterns: list[list[str]] = [[], ["runs/**", "*.pt"]]
    service.reply_with(*(Reply(200, {"patterns": some, "items": []}) for some in patterns))
    assert "the task collects no files" in run("outputs", FULL_ID).out
    assert "no files of a run that has ended match runs/**, *.pt" in run("outputs", FULL_ID).out


def test_stacks_are_printed_as_they_are(service: RecordedService, run: Run) -> None:
    path = f'  File "{"/long" * 60}/train.py", line 3, in fit'
    service.reply_with(Reply(200, {"task": FULL_ID, "stack": path, "message": "", "format": "text"}))
    assert run("stack", FULL_ID).out == path + "\n"


def test_a_traceback_that_repeats_the_message_is_left_out() -> None:
    fault = TaskFailed(
        "task_1", kind="import_failed", message="ImportError: no x", traceback="ImportError: no x\n"
    )
    assert str(fault) == "task task_1 failed (import_failed): ImportError: no x"
    whole = "Traceback (most recent call last):\n  ...\nImportError: no x\n"
    errors = [{"pointer": "", "detail": whole, "code": "exception"}]
    assert str(CallFailed("f failed: ImportError: no x", errors=errors)).endswith(whole.rstrip())


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("http://127.0.0.1:1", "`gpubroker serve` starts one here"),
        ("http://gpus:1", "is gpus its right name?"),
    ],
)
def test_a_service_elsewhere_is_not_started_here(url: str, remedy: str) -> None:
    fault = unreachable(Connection(url, None, "given"), OSError(os.strerror(2)))
    assert isinstance(fault, Unreachable)
    assert str(fault).endswith(remedy)
