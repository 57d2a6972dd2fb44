"""The command line against recorded answers: what is asked, what is printed where, and how it ends."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from tests.client.command_line import Run, command_line
from tests.client.recorded_service import RecordedService, Reply, a_problem, a_task

FULL_ID = "task_01k9z6x8d2000abcdefghjkmnp"


@pytest.fixture
def run(service: RecordedService, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("GPUBROKER_URL", service.url)
    monkeypatch.setenv("GPUBROKER_TOKEN", "gpb_secret")
    return command_line(monkeypatch, capsys)


def outcome(state: str, **more: Any) -> Reply:
    ended = {"id": FULL_ID, "state": state, "format": "json", "error": None, "log_tail": "", **more}
    return Reply(200, ended)


def test_submit_prints_the_id_and_nothing_else_to_standard_output(service: RecordedService, run: Run) -> None:
    service.told(Reply(202, a_task(FULL_ID)))
    ended = run("submit team.work:fit --arg 5 --arg s3://x -i epochs=3 -i name=resnet")
    assert (ended.code, ended.out) == (0, f"{FULL_ID}\n")
    assert f"gpubroker explain {FULL_ID}" in ended.err
    assert service.asked[0].body["run"] == {
        "entrypoint": "team.work:fit",
        "args": [5, "s3://x"],
        "kwargs": {"epochs": 3, "name": "resnet"},
    }


def test_submit_reads_sizes_durations_and_pairs(service: RecordedService, run: Run) -> None:
    service.told(Reply(202, a_task(FULL_ID)))
    words = "submit a:b --gpu-memory 18GiB --gpus 2 --memory 4g --cpu 0 --priority critical --name n"
    more = (
        "--label run=x --label user=me --env SEED=1 --timeout 1h30m --grace 0 --retries 0 --custom licence=2"
    )
    assert run(f"{words} --exclusive {more}").code == 0
    sent = service.asked[0].body
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
        },
        "labels": {"run": "x", "user": "me"},
        "env": {"SEED": "1"},
        "timeout_seconds": 5400,
        "grace_seconds": 0,
        "max_retries": 0,
    }


def test_words_behind_two_dashes_are_a_command_with_its_own_options(
    service: RecordedService, run: Run
) -> None:
    service.told(Reply(202, a_task(FULL_ID)))
    assert run("submit --gpus 1 --priority 7 -- python train.py --gpus 9").code == 0
    sent = service.asked[0].body
    assert sent["run"] == {"command": ["python", "train.py", "--gpus", "9"]}
    assert (sent["resources"], sent["priority"]) == ({"gpus": 1}, 7)


@pytest.mark.parametrize(
    "words",
    [
        ["submit"],
        ["submit", "a:b", "--", "ls"],
        ["submit", "a:b", "--gpu-memory", "much"],
        ["submit", "a:b", "--timeout", "soon"],
        ["submit", "a:b", "-i", "epochs"],
        ["submit", "a:b", "--custom", "licence=two"],
        ["submit", "a:b", "--nonsense"],
        ["nonsense"],
    ],
)
def test_what_cannot_be_meant_is_a_usage_error_and_asks_nothing(
    service: RecordedService, run: Run, words: list[str]
) -> None:
    ended = run(*words)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err
    assert not service.asked


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("submit train.py", "gpubroker submit -- python train.py"),
        ("submit team.training.fit", "write module:function"),
        ("submit echo hi 'a b'", "gpubroker submit -- echo hi 'a b'"),
        ("submit a:b epochs=3", "'epochs=3' is one word too many"),
        ("submit a:b -C /srv", "working_directory is for commands"),
        ("submit a:b --cpu nan", "do not fit into JSON"),
    ],
)
def test_the_mistakes_of_the_first_day_are_told_in_one_line(
    service: RecordedService, run: Run, line: str, says: str
) -> None:
    ended = run(line)
    assert (ended.code, ended.out) == (2, "")
    # A box on a terminal would cut the line: what counts is the words.
    assert says in " ".join(ended.err.replace("│", " ").split())
    assert "Traceback" not in ended.err
    assert not service.asked


def test_submit_and_wait_prints_the_result(service: RecordedService, run: Run) -> None:
    service.told(
        Reply(202, a_task(FULL_ID)),
        Reply(200, a_task(FULL_ID, "succeeded")),
        outcome("succeeded", result={"accuracy": 0.9}, log_tail="epoch 3\n"),
    )
    ended = run("submit a:b --wait")
    assert (ended.code, ended.json) == (0, {"accuracy": 0.9})
    assert "epoch 3" in ended.err


def failed(state: str = "failed") -> Reply:
    error = {"kind": "exception", "message": "no luck", "traceback": "Traceback ...\nValueError: no luck"}
    return outcome(state, error=error)


@pytest.mark.parametrize(
    ("replies", "code", "says"),
    [
        ([Reply(200, a_task(FULL_ID, "failed")), failed()], 3, "ValueError: no luck"),
        ([Reply(200, a_task(FULL_ID, "cancelled")), outcome("cancelled")], 4, "was cancelled"),
        ([Reply(202, a_task(FULL_ID, "running"))], 5, "it goes on"),
        ([a_problem(404, "not-found", "no such task")], 6, "no such task"),
        ([a_problem(500, "internal-error", "our mistake")], 1, "our mistake"),
    ],
)
def test_the_exit_code_says_how_it_ended(
    service: RecordedService, run: Run, replies: list[Reply], code: int, says: str
) -> None:
    service.told(*replies)
    ended = run("result", FULL_ID, "--wait", "--timeout", "0")
    assert (ended.code, ended.out) == (code, "")
    assert says in ended.err


def test_wait_ends_as_the_task_did(service: RecordedService, run: Run) -> None:
    shown = Reply(200, a_task(FULL_ID, "failed"))
    service.told(shown, shown, failed())
    ended = run("wait", FULL_ID, "-o", "json")
    assert (ended.code, ended.json["state"]) == (3, "failed")


def test_no_service_and_nobody_listening_are_unreachable(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpubroker.cli.session._RETRY_SECONDS", 0)
    assert run("--url http://127.0.0.1:1 stats").code == 7
    monkeypatch.delenv("GPUBROKER_URL")
    ended = run("stats")
    assert ended.code == 7
    assert "gpubroker serve" in ended.err


def test_a_pickled_result_is_saved_and_never_opened(
    service: RecordedService, run: Run, tmp_path: Path
) -> None:
    boom = b"cos\nabort\n(tR."
    told = outcome("succeeded", format="cloudpickle", data_base64=base64.b64encode(boom).decode())
    service.told(told, told)
    ended = run("result", FULL_ID)
    assert (ended.code, ended.out) == (0, "")
    assert "--save" in ended.err
    assert run("result", FULL_ID, "--save", str(tmp_path / "r")).code == 0
    assert (tmp_path / "r").read_bytes() == boom


def page(*ids: str) -> Reply:
    return Reply(200, {"items": [a_task(id) for id in ids], "next_cursor": None, "has_more": False})


def test_a_task_may_be_named_by_its_beginning_or_its_end(service: RecordedService, run: Run) -> None:
    other = FULL_ID[:-1] + "q"
    for word in (FULL_ID, FULL_ID[5:], FULL_ID[-4:]):
        service.asked.clear()
        needs_search = len(word) != len(FULL_ID)
        service.told(*([page(other, FULL_ID)] if needs_search else []), Reply(200, a_task(FULL_ID)))
        assert run("show", word, "-o", "json").json["id"] == FULL_ID
        assert service.asked[-1].path == f"/tasks/{FULL_ID}"


def test_last_is_the_newest_task_submitted_from_here(service: RecordedService, run: Run) -> None:
    service.told(Reply(202, a_task("task_1")), Reply(202, a_task("task_2")), Reply(200, a_task("task_2")))
    run("submit a:b")
    run("submit a:b")
    run("cancel last")
    assert (service.asked[-1].method, service.asked[-1].path) == ("POST", "/tasks/task_2/cancel")


def test_where_nothing_was_submitted_last_may_be_looked_at_but_not_changed(
    service: RecordedService, run: Run
) -> None:
    somebodys = a_task(FULL_ID, name="theirs")
    newest = Reply(200, {"items": [somebodys], "next_cursor": None})
    service.told(newest, Reply(200, somebodys), *[newest] * 4)
    shown = run("show last")
    assert shown.code == 0
    assert "nothing was submitted from here" in shown.err
    for words in ("cancel last", "hold last", "release last", "priority last 3"):
        refused = run(words)
        assert refused.code == 6
        assert f"{FULL_ID} (theirs)" in refused.err
    assert {asked.method for asked in service.asked} == {"GET"}


def test_a_task_may_be_named_by_its_name_if_it_is_the_only_one(service: RecordedService, run: Run) -> None:
    two = page(FULL_ID, FULL_ID[:-1] + "q")
    service.told(page(FULL_ID), page(FULL_ID), Reply(200, a_task(FULL_ID)), page(FULL_ID), two)
    assert run("show", "fit", "-o", "json").json["id"] == FULL_ID
    assert ("name", "fit") in service.asked[1].params
    ended = run("show", "fit")
    assert ended.code == 6
    assert ended.err.startswith("gpubroker: 'fit' may be any of ")


def test_a_refused_token_is_traced_to_where_it_came_from(service: RecordedService, run: Run) -> None:
    refused = a_problem(401, "unauthenticated", "the token is unknown")
    service.told(refused, refused)
    assert "came from GPUBROKER_TOKEN" in run("ps").err
    assert "came from --token" in run("--token gpb_x ps").err


def test_each_fault_of_a_refusal_is_told_once(service: RecordedService, run: Run) -> None:
    faults = [{"pointer": f"/{name}", "detail": f"{name} is wrong", "code": "x"} for name in "abc"]
    service.told(a_problem(422, "validation-failed", "/a: a is wrong (and 2 more)", errors=faults))
    said = run("submit a:b").err
    assert [said.count(f"/{name}: {name} is wrong") for name in "abc"] == [1, 1, 1]
    assert said.startswith("gpubroker: /a")


def test_a_word_that_means_several_tasks_or_none_changes_nothing(service: RecordedService, run: Run) -> None:
    service.told(page(FULL_ID), page(FULL_ID, FULL_ID[:-1] + "q"), page(FULL_ID), page())
    ended = run("cancel", "mnp", "task_01k9")
    assert ended.code == 6
    assert "may be any of" in ended.err
    assert "no task is named 'zzz'" in run("cancel", "zzz").err
    assert {asked.method for asked in service.asked} == {"GET"}


def test_tasks_can_be_cancelled_held_released_and_moved(service: RecordedService, run: Run) -> None:
    service.told(*[Reply(200, a_task(FULL_ID))] * 4)
    run("cancel", FULL_ID, "--grace", "5s", "--reason", "wrong data")
    run("hold", FULL_ID)
    run("release", FULL_ID)
    run("priority", FULL_ID, "interactive")
    assert [asked.body for asked in service.asked] == [
        {"grace_seconds": 5, "reason": "wrong data"},
        {"held": True},
        {"held": False},
        {"priority": "interactive"},
    ]


def test_ps_says_why_the_waiting_ones_wait(service: RecordedService, run: Run) -> None:
    waiting, running = a_task(FULL_ID, name="fit"), a_task("task_2", "running", name="judge")
    pending = {"reason": "WaitingForMemory", "message": "needs 18.0 GiB", "position": 2}
    service.told(
        Reply(200, {"items": [waiting, running], "next_cursor": None}),
        Reply(200, {**waiting, "pending": pending}),
    )
    ended = run("ps")
    [head, first, second] = ended.out.splitlines()
    assert "NOTE" in head
    assert FULL_ID[-8:] in first
    assert "needs 18.0 GiB (position 2)" in first
    assert "judge" in second
    assert ("state", "pending") in service.asked[0].params
    assert ("state", "succeeded") not in service.asked[0].params


def test_ndjson_is_one_line_per_item_and_json_is_one_document(service: RecordedService, run: Run) -> None:
    service.told(page("task_1", "task_2"), page("task_1", "task_2"))
    lines = run("ps -o ndjson").out.splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["task_1", "task_2"]
    assert [item["id"] for item in run("ps --output json").json] == ["task_1", "task_2"]


def test_the_newest_events_are_shown_in_order(service: RecordedService, run: Run) -> None:
    at = "2026-11-21T10:02:11.412Z"
    line = {"at": at, "kind": "task.started", "key": FULL_ID, "fields": {}}
    lines = [{"position": position, **line} for position in (99, 100)]
    service.told(
        Reply(200, {"position": 100}),
        Reply(200, {"items": lines, "next_after": 100}),
        Reply(200, {"items": [], "next_after": 100}),
    )
    ended = run("events -n 2")
    assert dict(service.asked[1].params)["after"] == "98"
    assert [line.split()[0] for line in ended.out.splitlines()] == ["99", "100"]


def test_a_token_s_secret_is_all_that_goes_to_standard_output(service: RecordedService, run: Run) -> None:
    service.told(Reply(201, {"name": "ci", "scopes": ["tasks:write"], "token": "gpb_new"}))
    ended = run("token create ci --scope tasks:write --max-priority 50 --expires 30d")
    assert ended.out == "gpb_new\n"
    assert service.asked[0].body == {
        "name": "ci",
        "scopes": ["tasks:write"],
        "max_priority": 50,
        "expires_in_seconds": 30 * 86400,
    }


def test_without_the_service_its_commands_name_the_package(
    service: RecordedService, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpubroker.cli.app.entry_points", lambda group: [])
    for command in ("serve", "down", "migrate", "openapi"):
        ended = run(command)
        assert (ended.code, ended.out) == (2, "")
        assert "pip install gpubroker-server" in ended.err


def test_a_package_whose_commands_cannot_be_loaded_breaks_no_other_command(
    service: RecordedService, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        value = "broken:commands"

        def load(self) -> Any:
            raise ImportError("no module named broken")

    monkeypatch.setattr("gpubroker.cli.app.entry_points", lambda group: [Broken()])
    ended = run("--help")
    assert ended.code == 0
    assert "submit" in ended.out
    assert "broken:commands cannot be loaded" in ended.err


GPU = {"key": "local/n1/GPU-1", "uuid": "GPU-1", "node": "n1", "kind": "sim-24g", "physical_mb": 24576}
NODE = {
    "name": "n1",
    "ready": True,
    "cpu": {"total": 4, "used": 1.5},
    "memory_mb": {"total": 8192, "used": 0},
}
STATS = {
    "gpu": {"leased_mb": 1024, "total_mb": 2048},
    "tasks": {"pending": 7},
    "age_seconds": 0.2,
    "position": 9,
}
EXPLAINED = {
    "id": FULL_ID,
    "state": "pending",
    "reason": "WaitingForMemory",
    "message": "needs 18.0 GiB on one GPU",
    "position": 4,
    "queue_length": 7,
    "blockers": [
        {"reason": "WaitingForMemory", "tier": 11, "message": "needs 18.0 GiB on one GPU"},
        {"reason": "WaitingForPreemption", "tier": 13, "message": "one run is stopping"},
    ],
    "devices": [
        {
            "node": "n1",
            "index": 3,
            "kind": "sim-24g",
            "free_mb": 4096,
            "allocatable_mb": 24576,
            "message": "18.0 GiB are needed, 4.0 GiB are free",
            "holders": [{"id": None, "priority": 25, "gpu_mb": 20480, "stopping": True}],
        }
    ],
}

EXPLAINED_SAYS = [
    "WaitingForMemory: needs 18.0 GiB on one GPU",
    "position 4 of 7",
    "also WaitingForPreemption: one run is stopping",
    "n1 3 sim-24g  4.0/24.0  another tenant 20.0 GiB (priority 25, stopping)  18.0 GiB are needed",
]


@pytest.mark.parametrize(
    ("line", "answer", "says"),
    [
        ("gpus", {"items": [{**GPU, "free_mb": 24576}]}, ["n1  1 GPU ", "24.0 GiB free of 24.0", "░ free"]),
        ("nodes", {"items": [NODE]}, ["n1", "ready", "1.5/4", "0.0/8.0 GiB"]),
        ("stats", STATS, ["leased 1.0 GiB · total 2.0 GiB", "pending 7", "0.2 s ago, event 9"]),
        (
            f"explain {FULL_ID}",
            EXPLAINED,
            EXPLAINED_SAYS,
        ),
        (
            f"show {FULL_ID}",
            a_task(FULL_ID, labels={"run": "[bold]"}, run={"entrypoint": "a:b"}),
            ["run=[bold]"],
        ),
        ("token list", {"items": [{"name": "ci", "scopes": ["tasks:write"]}]}, ["ci", "tasks:write"]),
    ],
)
def test_answers_are_drawn_for_people(
    service: RecordedService, run: Run, line: str, answer: dict[str, Any], says: list[str]
) -> None:
    service.told(Reply(200, answer), Reply(200, a_task(FULL_ID)))
    ended = run(line)
    assert (ended.code, ended.err) == (0, "")
    for text in says:
        assert text in ended.out


EVENTS = [
    {"kind": "task.stopping", "key": FULL_ID, "fields": {"stop_reason": "preempt", "freeing_for": "task_2"}},
    {"kind": "task.requeued", "key": FULL_ID, "fields": {"preemptions": 1}},
]


def test_who_was_preempted_says_so_and_by_whom_and_from_where_it_goes_on(
    service: RecordedService, run: Run
) -> None:
    at = "2026-11-21T10:02:11.412Z"
    pending = {"reason": "WaitingForMemory", "message": "needs 18.0 GiB", "position": 1}
    victim = a_task(FULL_ID, preemptions=1, checkpoint_at=at, pending=pending)
    history = [
        Reply(200, {"items": [{**event, "at": at} for event in EVENTS], "next_after": 9}),
        Reply(200, a_task("task_2", name="vip")),
        Reply(200, {"items": [], "next_after": 9}),
    ]
    explained = Reply(200, {**EXPLAINED, "devices": []})
    listed = Reply(200, {"items": [victim], "next_cursor": None})
    service.told(
        Reply(200, victim), *history, explained, Reply(200, victim), *history, listed, Reply(200, victim)
    )
    by_whom = (
        "at 2026-11-21 10:02:11Z for vip (task_2); it goes on from its checkpoint of 2026-11-21 10:02:11Z"
    )
    assert by_whom in run("show", FULL_ID).out
    assert f"preempted {by_whom}" in run("explain", FULL_ID).out
    assert "(position 1); preempted 1×" in run("ps").out


def test_what_cancelled_a_task_is_shown_with_it(service: RecordedService, run: Run) -> None:
    asked = {"kind": "request.made", "key": "ask_1", "at": "2026-11-21T10:02:11Z"}
    fields = {"task": FULL_ID, "what": "cancel", "fields": {"reason": "wrong data"}}
    service.told(
        Reply(200, a_task(FULL_ID, "cancelled")),
        Reply(200, {"items": [{**asked, "fields": fields}], "next_after": 9}),
        Reply(200, {"items": [], "next_after": 9}),
    )
    assert "cancelled  asked for at 2026-11-21 10:02:11Z: wrong data" in run("show", FULL_ID).out


def test_a_failed_task_is_explained_by_its_error(service: RecordedService, run: Run) -> None:
    error = {"kind": "exception", "message": "no luck\nat all", "traceback": ""}
    explained = {"id": FULL_ID, "state": "failed", "message": "failed; it no longer waits for anything"}
    service.told(Reply(200, explained), Reply(200, a_task(FULL_ID, "failed", error=error)))
    assert f"exception: no luck; more: gpubroker show {FULL_ID[-8:]}" in run("explain", FULL_ID).out


def test_a_log_whose_beginning_is_gone_says_so_and_begins_with_a_whole_line(
    service: RecordedService, run: Run
) -> None:
    printed = "".join(f"line {number}\n" for number in range(4000))
    service.told(
        outcome("succeeded", log_tail="all of it\n"), outcome("succeeded", log_tail=printed[-16384:])
    )
    assert run("logs", FULL_ID).out == "all of it\n"
    [mark, first, *_, last] = run("logs", FULL_ID).out.splitlines()
    assert mark == "[only the last 16 KiB were kept]"
    assert first in printed.splitlines()
    assert last == "line 3999"


def test_a_list_without_unfinished_tasks_says_where_the_others_are(
    service: RecordedService, run: Run
) -> None:
    service.told(page(), page())
    assert "gpubroker ps --all" in run("ps").out
    assert run("ps --all").out == "no such task\n"


def test_no_gpus_while_the_cluster_starts_is_no_reason_to_declare_some(
    service: RecordedService, run: Run
) -> None:
    for state, says in (
        ("connecting", "no GPUs yet: connecting"),
        ("connected", "declare simulated_devices"),
    ):
        service.told(Reply(200, {"items": []}), Reply(200, {"executor": {"state": state}}))
        assert says in run("gpus").out


def test_commands_of_other_systems_are_answered_with_ours(service: RecordedService, run: Run) -> None:
    for word, ours in (("list", "gpubroker ps"), ("kill", "gpubroker cancel")):
        ended = run(word)
        assert (ended.code, ended.out) == (2, "")
        assert ours in ended.err
    assert run("--version").out.startswith("gpubroker ")


@pytest.mark.parametrize("columns", [60, 80, 100, 140])
def test_a_long_name_takes_nothing_from_the_others(
    service: RecordedService, run: Run, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setattr("gpubroker.cli.session._PIPE_WIDTH", columns)
    pending = {"reason": "WaitingForMemory", "message": "needs room", "position": None}
    waiting = a_task(FULL_ID, name="n" * 200, pending=pending)
    service.told(Reply(200, {"items": [waiting], "next_cursor": None}), Reply(200, waiting))
    [head, line] = run("ps").out.splitlines()
    assert len(head) <= columns
    assert len(line) <= columns
    for text in (FULL_ID[-8:], "pending", "50 batch", "needs room", "n…"):
        assert text in line


def test_a_watch_into_a_pipe_is_one_answer_after_another(
    service: RecordedService, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    naps = iter([None, KeyboardInterrupt])

    def sleep(_seconds: float) -> None:
        if (trouble := next(naps)) is not None:
            raise trouble

    monkeypatch.setattr("gpubroker.cli.session.time.sleep", sleep)
    service.told(
        Reply(200, {"items": [{**GPU, "free_mb": 1}]}), Reply(200, {"items": [{**GPU, "free_mb": 2}]})
    )
    ended = run("gpus --watch -o ndjson")
    assert [json.loads(line)["free_mb"] for line in ended.out.splitlines()] == [1, 2]
    assert ended.code == 0
