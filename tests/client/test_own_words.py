"""Messages of the service in the words of the command line."""

import re
from pathlib import Path

import pytest
from gpubroker.cli.own_words import with_commands
from gpubroker.cli.refusals import in_own_words

from tests.client.command_line import Run
from tests.client.recorded_service import FULL_ID, RecordedService, Reply, a_task

SERVICE = Path(__file__).resolve().parents[2] / "service" / "gpubroker_server"


@pytest.mark.parametrize(
    ("said", "command"),
    [
        ('there is no token "zz"; GET /tokens lists them', "`gpubroker token list` lists them"),
        ("GET /arrays/task_1/items has their errors", "`gpubroker array task_1 --items` has their errors"),
        ("2 more (GET /worker-sets/task_1)", "(`gpubroker workers show task_1`)"),
        ("GET /tasks/task_1/wait answers when it ends", "`gpubroker wait task_1` answers when it ends"),
        ("GET /metrics is for Prometheus", "GET /metrics is for Prometheus"),
    ],
)
def test_a_route_in_a_message_becomes_its_command(said: str, command: str) -> None:
    assert in_own_words(said, ()).endswith(command)
    assert ("task_1" in said) == (with_commands(said) != said), "a task may print the other routes"


def test_every_route_that_a_message_of_the_service_names_has_a_command() -> None:
    named = re.compile(r"GET /([a-z-]+)[a-z{}._/-]*\b (?:lists|has|answers)")
    for path in SERVICE.rglob("*.py"):
        for found in named.finditer(path.read_text(encoding="utf-8")):
            example = re.sub(r"\{[^}]*\}", "task_1", found[0])
            assert in_own_words(example, ()) != example, f"{path.name}: {found[0]}"


@pytest.mark.parametrize(
    ("line", "said", "shown"),
    [
        ("submit --retries -1 -- ls", "/max_retries: must be at least 0", "--retries: must be at least 0"),
        ("submit -p 105 -- ls", "/priority: must be at most 100", "-p: must be at most 100"),
        ("submit --gpus=x a:b", "/resources/gpus: must be", "--gpus: must be"),
        ("priority last 105", "/priority: must be at most 100", "/priority: must be at most 100"),
        ("submit -- tool --retries", "/max_retries: is wrong", "/max_retries: is wrong"),
        ("token create a -s x", "/scopes/0: must be", "/scopes/0: must be"),
        ("logs last", "query:worker: task_1 has 2 workers", "task_1 has 2 workers"),
    ],
)
def test_a_pointer_becomes_the_option_that_was_written(line: str, said: str, shown: str) -> None:
    assert in_own_words(said, line.split()) == shown


def test_a_refusal_names_the_option_and_the_command(service: RecordedService, run: Run) -> None:
    fault = "/max_retries: must be at least 0; found -1"
    service.reply_with(Reply(422, {"code": "validation-failed", "detail": fault}))
    refused = run("submit --retries -1 a:b")
    assert (refused.code, refused.err) == (6, "gpubroker: --retries: must be at least 0; found -1\n")
    message = f"1 of its 4 items failed; GET /arrays/{FULL_ID}/items has their errors"
    failed = a_task(FULL_ID, state="failed", error={"kind": "items", "message": message, "traceback": ""})
    service.reply_with(Reply(200, failed), Reply(200, {"items": [], "next_after": 9}))
    assert f"gpubroker array {FULL_ID[-8:]} --items" in run("show", FULL_ID).out
