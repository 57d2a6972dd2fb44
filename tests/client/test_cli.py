"""The command line against recorded answers: its requests, its output and its exit codes."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from tests.client.command_line import Run
from tests.client.recorded_service import (
    FULL_ID,
    RecordedService,
    Reply,
    a_problem,
    a_task,
    failed,
    outcome,
    page,
)


def test_submit_only_prints_the_id_to_standard_output(service: RecordedService, run: Run) -> None:
    service.reply_with(Reply(202, a_task(FULL_ID)))
    ended = run("submit team.work:fit --arg 5 --arg s3://x -i epochs=3 -i name=resnet")
    assert (ended.code, ended.out) == (0, f"{FULL_ID}\n")
    assert f"gpubroker explain {FULL_ID[-8:]}" in ended.err
    assert service.requests[0].body["run"] == {
        "entrypoint": "team.work:fit",
        "args": [5, "s3://x"],
        "kwargs": {"epochs": 3, "name": "resnet"},
    }


def test_submit_reads_sizes_durations_and_pairs(service: RecordedService, run: Run) -> None:
    service.reply_with(Reply(202, a_task(FULL_ID)))
    words = "submit a:b --gpu-memory 18GiB --gpus 2 --memory 4g --cpu 0 --priority critical --name n"
    more = (
        "--label run=x --label user=me --env SEED=1 --timeout 1h30m --grace 0 --retries 0 --custom licence=2 "
        "--retry-on failure,timeout"
    )
    kinds = "--kind H100 --kind A100 --prefer-kind H100 --min-power 600 --min-device-memory 40GiB"
    where = f"{kinds} --pool lab --on zone=a,b --prefer-on node=n1"
    assert run(f"{words} --exclusive {more} {where}").code == 0
    sent = service.requests[0].body
    del sent["run"]
    assert sent == {
        "name": "n",
        "priority": "critical",
        "resources": {
            "gpu_mb": 18432,
            "gpus": 2,
            "exclusive": True,
            "cpu": 0,
            "memory_mb": 4096,
            "custom": {"licence": 2},
            "kinds": ["H100", "A100"],
            "min_power": 600,
            "min_device_mb": 40960,
            "nodes": {"zone": ["a", "b"]},
            "prefer_kinds": ["H100"],
            "prefer_nodes": {"node": ["n1"]},
            "pool": "lab",
        },
        "labels": {"run": "x", "user": "me"},
        "env": {"SEED": "1"},
        "timeout_seconds": 5400,
        "grace_seconds": 0,
        "max_retries": 0,
        "retry_on": ["failure", "timeout"],
    }


def test_submit_reads_the_sizes_of_roles(service: RecordedService, run: Run) -> None:
    service.reply_with(Reply(202, a_task(FULL_ID)))
    assert run("submit a:b --role train:gpu_mb=40GiB,gpus=2 --role generate:gpu_mb=20480,cpu=0.5").code == 0
    assert service.requests[0].body["resources"] == {
        "roles": {"train": {"gpu_mb": 40960, "gpus": 2}, "generate": {"gpu_mb": 20480, "cpu": 0.5}}
    }
    wrong = run("submit a:b --role train=40GiB")
    assert wrong.code == 2
    assert "write NAME:FIELD=VALUE" in wrong.err


def test_words_after_two_dashes_are_a_command_with_its_own_options(
    service: RecordedService, run: Run
) -> None:
    service.reply_with(page(), Reply(202, a_task(FULL_ID)))
    assert run("submit --gpus 1 --priority 7 -- python train.py --gpus 9").code == 0
    nodes, submit = service.requests
    assert nodes.path == "/nodes"
    sent = submit.body
    assert sent["run"] == {"command": ["python", "train.py", "--gpus", "9"]}
    assert (sent["resources"], sent["priority"]) == ({"gpus": 1}, 7)


def test_the_tasks_of_after_are_found_by_id_or_part_of_an_id(service: RecordedService, run: Run) -> None:
    other = FULL_ID[:-4] + "zzzz"
    service.reply_with(page(), page(other), Reply(202, a_task(FULL_ID)))
    assert run(f"submit a:b --after {FULL_ID} --after-end {other[-8:]}").code == 0
    assert service.requests[2].body["after"] == [FULL_ID, {"task": other, "on_failure": "ignore"}]


@pytest.mark.parametrize(
    "words",
    [
        ["submit"],
        ["submit", "a:b", "--", "ls"],
        ["submit", "a:b", "--gpu-memory", "much"],
        ["submit", "a:b", "--timeout", "soon"],
        ["submit", "a:b", "--deadline", "tomorrow"],
        ["submit", "a:b", "-i", "epochs"],
        ["submit", "a:b", "--custom", "licence=two"],
        ["submit", "a:b", "--nonsense"],
        ["nonsense"],
    ],
)
def test_invalid_arguments_are_usage_errors_and_send_nothing(
    service: RecordedService, run: Run, words: list[str]
) -> None:
    ended = run(*words)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err
    assert not service.requests


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("submit train.py", "gpubroker submit -- python train.py"),
        ("submit team.training.fit", "write module:function"),
        ("submit echo hi 'a b'", "gpubroker submit -- echo hi 'a b'"),
        ("submit a:b epochs=3", "unexpected word 'epochs=3'"),
        ("submit a:b -C /srv", "working_directory is only for commands"),
        ("submit a:b --cpu nan", "cannot be written as JSON"),
    ],
)
def test_mistakes_of_new_users_are_answered_with_the_right_command(
    service: RecordedService, run: Run, line: str, expected: str
) -> None:
    ended = run(line)
    assert (ended.code, ended.out) == (2, "")
    # A box on a terminal would cut the line: what counts is the words.
    assert expected in " ".join(ended.err.replace("│", " ").split())
    assert "Traceback" not in ended.err
    assert not service.requests


@pytest.mark.parametrize(
    ("words", "ray"), [("--ray", "private"), ("--ray --gpus 2", "private"), ("--ray shared", "shared")]
)
def test_submit_asks_for_a_private_ray_cluster_unless_told_otherwise(
    service: RecordedService, run: Run, words: str, ray: str
) -> None:
    service.reply_with(page(), Reply(202, a_task(FULL_ID)))
    assert run(f"submit {words} --ray-dashboard -- python train.py").code == 0
    body = service.requests[-1].body
    assert (body["ray"], body["ray_dashboard"], body["run"]["command"]) == (ray, True, ["python", "train.py"])


def test_submit_and_wait_prints_the_result(service: RecordedService, run: Run) -> None:
    service.reply_with(
        Reply(202, a_task(FULL_ID)),
        Reply(200, a_task(FULL_ID, "succeeded")),
        outcome("succeeded", result={"accuracy": 0.9}, log_tail="epoch 3\n"),
    )
    ended = run("submit a:b --wait")
    assert (ended.code, ended.json) == (0, {"accuracy": 0.9})
    assert "epoch 3" in ended.err
    assert ended.err.startswith(f"accepted {FULL_ID}\n")


@pytest.mark.parametrize(
    ("replies", "code", "expected"),
    [
        ([Reply(200, a_task(FULL_ID, "failed")), failed()], 3, "ValueError: no luck"),
        (
            [Reply(200, a_task(FULL_ID, "expired")), failed("expired")],
            3,
            f"{FULL_ID} expired (exception): no",
        ),
        ([Reply(200, a_task(FULL_ID, "cancelled")), outcome("cancelled")], 4, "was cancelled"),
        ([Reply(202, a_task(FULL_ID, "running"))], 5, "it continues"),
        ([a_problem(404, "not-found", "no such task")], 6, "no such task"),
        ([a_problem(500, "internal-error", "our mistake")], 1, "our mistake"),
    ],
)
def test_the_exit_code_says_how_it_ended(
    service: RecordedService, run: Run, replies: list[Reply], code: int, expected: str
) -> None:
    service.reply_with(*replies)
    ended = run("result", FULL_ID, "--wait", "--timeout", "0")
    assert (ended.code, ended.out) == (code, "")
    assert expected in ended.err


def test_without_a_service_the_exit_code_is_7(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpubroker.cli.lookup._RETRY_SECONDS", 0)
    assert run("--url http://127.0.0.1:1 stats").code == 7
    monkeypatch.delenv("GPUBROKER_URL")
    ended = run("stats")
    assert ended.code == 7
    assert "gpubroker serve" in ended.err


def test_a_pickled_result_is_saved_but_never_unpickled(
    service: RecordedService, run: Run, tmp_path: Path
) -> None:
    boom = b"cos\nabort\n(tR."
    pickled = outcome("succeeded", format="cloudpickle", data_base64=base64.b64encode(boom).decode())
    service.reply_with(pickled, pickled)
    ended = run("result", FULL_ID)
    assert (ended.code, ended.out) == (0, "")
    assert "--save" in ended.err
    assert run("result", FULL_ID, "--save", str(tmp_path / "r")).code == 0
    assert (tmp_path / "r").read_bytes() == boom


def test_a_task_is_found_by_the_start_or_end_of_its_id(service: RecordedService, run: Run) -> None:
    other = FULL_ID[:-1] + "q"
    for word in (FULL_ID, FULL_ID[5:], FULL_ID[-8:]):
        service.requests.clear()
        needs_search = len(word) != len(FULL_ID)
        service.reply_with(
            *([page(), page(), page(other, FULL_ID)] if needs_search else []), Reply(200, a_task(FULL_ID))
        )
        assert run("show", word, "-o", "json").json["id"] == FULL_ID
        assert service.requests[-1].path == f"/tasks/{FULL_ID}"


def test_last_is_the_newest_task_submitted_from_here(service: RecordedService, run: Run) -> None:
    service.reply_with(
        Reply(202, a_task("task_1")), Reply(202, a_task("task_2")), Reply(200, a_task("task_2"))
    )
    run("submit a:b")
    run("submit a:b")
    run("cancel last")
    assert (service.requests[-1].method, service.requests[-1].path) == ("POST", "/tasks/task_2/cancel")


def test_last_without_a_submit_shows_the_newest_task_but_never_changes_it(
    service: RecordedService, run: Run
) -> None:
    somebodys = a_task(FULL_ID, name="theirs")
    newest = Reply(200, {"items": [somebodys], "next_cursor": None})
    service.reply_with(newest, Reply(200, somebodys), *[newest] * 4)
    shown = run("show last")
    assert shown.code == 0
    assert "nothing was submitted from here" in shown.err
    for words in ("cancel last", "hold last", "release last", "priority last 3"):
        refused = run(words)
        assert refused.code == 6
        assert f"{FULL_ID} (theirs)" in refused.err
    assert {request.method for request in service.requests} == {"GET"}


def test_a_task_is_found_by_its_name_if_the_name_is_unique(service: RecordedService, run: Run) -> None:
    two = page(FULL_ID, FULL_ID[:-1] + "q")
    service.reply_with(page(FULL_ID), Reply(200, a_task(FULL_ID)), two)
    service.always = a_problem(404, "not-found", "they are no workers of one array")
    assert run("show", "fit", "-o", "json").json["id"] == FULL_ID
    assert ("name", "fit") in service.requests[0].params
    ended = run("show", "fit")
    assert ended.code == 6
    assert ended.err.startswith("gpubroker: 'fit' is ambiguous: ")


def test_a_refused_token_is_reported_with_its_source(service: RecordedService, run: Run) -> None:
    refused = a_problem(401, "unauthenticated", "the token is unknown")
    service.reply_with(refused, refused)
    assert "came from GPUBROKER_TOKEN" in run("ps").err
    assert "came from --token" in run("--token gpb_x ps").err


def test_each_error_of_a_refusal_is_printed_once(service: RecordedService, run: Run) -> None:
    faults = [{"pointer": f"/{name}", "detail": f"{name} is wrong", "code": "x"} for name in "abc"]
    service.reply_with(a_problem(422, "validation-failed", "/a: a is wrong (and 2 more)", errors=faults))
    printed = run("submit a:b").err
    assert [printed.count(f"/{name}: {name} is wrong") for name in "abc"] == [1, 1, 1]
    assert printed.startswith("gpubroker: /a")


def test_an_ambiguous_or_unknown_word_changes_nothing(service: RecordedService, run: Run) -> None:
    several = page(FULL_ID, FULL_ID[:-1] + "q")
    service.reply_with(page(FULL_ID), page(), page(), several, page(), page())
    service.always = a_problem(403, "forbidden", "a list of other tenants' tasks")
    ended = run("cancel", "fit", FULL_ID[:14])
    assert ended.code == 6
    assert "is ambiguous" in ended.err
    assert "none of the 2 tasks was changed" in ended.err
    assert "no task is named 'zzz'" in run("cancel", "zzz").err
    assert {request.method for request in service.requests} == {"GET"}


def test_a_name_goes_before_a_part_of_an_id(service: RecordedService, run: Run) -> None:
    word = FULL_ID[-8:]
    named = FULL_ID[:-1] + "q"
    service.reply_with(page(named), Reply(200, a_task(named)))
    assert run("show", word, "-o", "json").json["id"] == named
    service.reply_with(page(named), page(named, FULL_ID))
    ended = run("cancel", word)
    assert (ended.code, f"is ambiguous: {named}, {FULL_ID}" in ended.err) == (6, True)
    assert {request.method for request in service.requests} == {"GET"}


def test_fewer_than_eight_characters_are_only_a_name(service: RecordedService, run: Run) -> None:
    others = a_problem(403, "forbidden", "a list of other tenants' tasks")
    service.reply_with(page(), page(), others, page(FULL_ID), Reply(200, a_task(FULL_ID)))
    ended = run("cancel", FULL_ID[-7:])
    assert (ended.code, "needs at least 8 characters" in ended.err) == (6, True)
    assert run("cancel", FULL_ID[-7:]).code == 0
    assert [request.method for request in service.requests] == ["GET", "GET", "GET", "GET", "POST"]


def test_a_refusal_shows_the_tasks_changed_before_it_and_names_the_rest(
    service: RecordedService, run: Run
) -> None:
    last = FULL_ID[:-1] + "z"
    service.reply_with(Reply(200, a_task(FULL_ID)), a_problem(409, "task-finished", "it is over"))
    ended = run("cancel", FULL_ID, FULL_ID[:-1] + "q", last, "-o", "ndjson")
    assert (ended.code, ended.json["id"]) == (6, FULL_ID)
    assert f"not tried after this error: {last}" in ended.err


def test_tasks_can_be_cancelled_held_released_and_given_a_priority(
    service: RecordedService, run: Run
) -> None:
    service.reply_with(*[Reply(200, a_task(FULL_ID))] * 4)
    run("cancel", FULL_ID, "--grace", "5s", "--reason", "wrong data")
    run("hold", FULL_ID)
    run("release", FULL_ID)
    run("priority", FULL_ID, "interactive")
    assert [request.body for request in service.requests] == [
        {"grace_seconds": 5, "reason": "wrong data"},
        {"held": True},
        {"held": False},
        {"priority": "interactive"},
    ]


def test_ndjson_prints_one_line_per_item_and_json_one_document(service: RecordedService, run: Run) -> None:
    service.reply_with(page("task_1", "task_2"), page("task_1", "task_2"))
    lines = run("ps -o ndjson").out.splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["task_1", "task_2"]
    assert [item["id"] for item in run("ps --output json").json] == ["task_1", "task_2"]


def test_the_newest_events_are_shown_in_order(service: RecordedService, run: Run) -> None:
    at = "2026-11-21T10:02:11.412Z"
    line = {"at": at, "kind": "task.started", "key": FULL_ID, "fields": {}}
    lines = [{"position": position, **line} for position in (99, 100)]
    lines[1] |= {"kind": "task.changed", "fields": {"members": []}}
    more = Reply(200, {"items": lines, "next_after": 100}), Reply(200, {"items": [], "next_after": 100})
    service.reply_with(*more, *more)
    ended = run("events -n 2")
    assert [dict(request.params) for request in service.requests] == [
        {"last": "2", "limit": "500"}, {"after": "100", "limit": "500"}
    ]  # fmt: skip
    assert [line.split()[0] for line in ended.out.splitlines()] == ["99", "100"]
    assert ended.out.rstrip().endswith("members"), "a field without words for people is named"
    run("events", FULL_ID, "-n", "2")
    assert (service.requests[2].path, dict(service.requests[2].params)["last"]) == (
        f"/tasks/{FULL_ID}/events", "2"
    )  # fmt: skip


def test_checkpoints_that_follow_each_other_share_a_line(service: RecordedService, run: Run) -> None:
    at, other = "2026-11-21T10:02:11.412Z", FULL_ID[:-4] + "zzzz"
    saves = {"kind": "task.changed", "fields": {"checkpoint_at": at}}
    said = [
        *({"key": FULL_ID, **saves}, {"key": other, **saves}) * 3,
        {"key": FULL_ID, "kind": "task.succeeded", "fields": {}},
    ]
    lines = [{"position": number, "at": at, **event} for number, event in enumerate(said, start=1)]
    more = Reply(200, {"items": lines, "next_after": 7}), Reply(200, {"items": [], "next_after": 7})
    service.reply_with(*more, *more)
    shown = run("events -n 7").out.splitlines()
    assert [line.split()[0] for line in shown] == ["1", "2", "5", "7", "6"]
    assert [line.endswith("(the last of 2 more checkpoints; -o json has all)") for line in shown] == [
        False, False, True, False, True,
    ]  # fmt: skip
    assert len(run("events -n 7 -o json").json) == 7


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("sumbit a:b", "did you mean: gpubroker submit"),
        ("pss", "did you mean: gpubroker ps"),
        ("squeu", "did you mean: gpubroker ps"),
        ("mgirate", "did you mean: gpubroker migrate, or: gpubroker migrate-data"),
        ("ps --json", "no option --json; write --output json"),
        ("workers list --json", "no option --json; write --output json"),
        ("stats --jsn", "no option --jsn; write --output json"),
        ("--json ps", "no option --json; write --output json after the command"),
        ("submit --gres gpu:1 a:b", "no option --gres; write --gpus"),
        ("version --gres gpu:1", "No such option: --gres"),
        ("submit a:b --gpu-memory 18 GiB", "a size or a duration is one word; write 18GiB"),
        ("submit --gpu-memory 18 GiB -- python", "a size or a duration is one word; write 18GiB"),
        ("submit --timeout=90 s a:b", "a size or a duration is one word; write 90s"),
        ("lease ask --gpu-memory 18 GiB", "a size or a duration is one word; write 18GiB"),
    ],
)
def test_a_mistyped_line_says_what_was_meant(
    service: RecordedService, run: Run, line: str, said: str
) -> None:
    ended = run(line)
    assert (ended.code, service.requests) == (2, [])
    assert said in " ".join(ended.err.replace("│", " ").split())


def test_a_running_task_is_explained_with_how_to_follow_it(service: RecordedService, run: Run) -> None:
    explained = Reply(200, {"id": FULL_ID, "state": "running", "message": "running on n1"})
    running = a_task(FULL_ID, "running", run={"kind": "command", "command": ["ls"]})
    service.reply_with(explained, Reply(200, running))
    assert f"\nto follow it: gpubroker logs -f {FULL_ID[-8:]}\n" in run("explain", FULL_ID).out


def test_token_create_only_prints_the_secret_to_standard_output(service: RecordedService, run: Run) -> None:
    service.reply_with(Reply(201, {"name": "ci", "scopes": ["tasks:write"], "token": "gpb_new"}))
    ended = run("token create ci --scope tasks:write --max-priority 50 --expires 30d")
    assert ended.out == "gpb_new\n"
    assert service.requests[0].body == {
        "name": "ci",
        "scopes": ["tasks:write"],
        "max_priority": 50,
        "expires_in_seconds": 30 * 86400,
    }


def test_without_the_server_package_its_commands_name_it(
    service: RecordedService, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [])
    for command in ("serve", "down", "migrate", "migrate-data", "backup", "restore", "openapi"):
        ended = run(command)
        assert (ended.code, ended.out) == (2, "")
        assert "pip install 'gpubroker-server[ray]'" in ended.err


def test_package_whose_commands_do_not_load_does_not_break_other_commands(
    service: RecordedService, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        value = "broken:commands"

        def load(self) -> Any:
            raise ImportError("no module named broken")

    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [Broken()])
    ended = run("--help")
    assert ended.code == 0
    assert "submit" in ended.out
    assert "cannot load the commands of broken:commands" in ended.err
