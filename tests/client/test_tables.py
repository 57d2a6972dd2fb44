"""What the command line prints for people, from recorded answers."""

import json
import threading
from signal import SIGINT, raise_signal
from typing import Any

import pytest
from gpubroker.cli.tables import gib_of

from tests.client.command_line import Run
from tests.client.recorded_service import FULL_ID, RecordedService, Reply, Request, a_task, outcome, page
from tests.patience import PATIENCE_SECONDS

GPU = {"key": "local/n1/GPU-1", "uuid": "GPU-1", "node": "n1", "kind": "sim-24g", "physical_mb": 24576}
NODE = {
    "name": "n1",
    "ready": True,
    "cpu": {"total": 4, "used": 1.5},
    "memory_mb": {"total": 8192, "used": 0},
}
FORETOLD = {"basis": "learned", "n": 40, "median_error_seconds": 70.4, "within_p90": 0.88}
STATS = {
    "gpu": {"leased_mb": 1024, "used_mb": 512, "free_mb": 1024, "total_mb": 2048},
    "tasks": {"pending": 7},
    "age_seconds": 0.2,
    "position": 9,
}
POLICY = {
    "bands": [
        {"name": "critical", "lowest": 90, "highest": 100},
        {"name": "idle", "lowest": 0, "highest": 9},
    ],
    "placement": "stranded",
    "preemption": {"enabled": True, "budget": 3, "shield_seconds": 600.0},
    "maximum": {"gpus": None, "timeout_seconds": 3600.0},
    "pools": [
        {"name": "lab", "kinds": ["H100"], "nodes": {"zone": ["a"]}, "fractions": True, "gpus": None},
        {"name": "scratch", "fractions": True, "custom": {"storage_gb": 500.0}},
    ],
    "max_running": [{"of": "tenant:*", "limit": 8.0}],
    "streams": {"nightly": 0.5},
}
POLICY_SAYS = [
    "critical 90 to 100 · idle 0 to 9",
    "budget 3 · shield_seconds 600",
    "at most     timeout_seconds 3600",
    "lab: kinds H100 · nodes zone=a · fractions yes",
    "scratch: fractions yes · custom storage_gb=500",
    "tenant:*: limit 8",
    "nightly 0.5",
]
IN_PIECES = {
    "free_mb": 40960,
    "stranded_mb": 10240,
    "share": 0.25,
    "kinds": [
        {"kind": "A100", "free_mb": 20480, "stranded_mb": 10240, "share": 0.5},
        {"kind": "H100", "free_mb": 20480, "stranded_mb": 0, "share": 0.0},
        {"kind": "L40", "free_mb": 0, "stranded_mb": 0, "share": None},
    ],
    "scattered": {"gpus": 2, "gpu_mb": 30720, "waiting": 5, "free_mb": 40960, "largest_mb": 20480},
}
UP, DOWN = {"up": True, "fault": ""}, {"up": False, "fault": "no route"}
IN_PIECES_SAYS = [
    "25% of free memory, 10.0 GiB (A100 50% · H100 0%)",
    "! 5 tasks wait for 2 × 30.0 GiB; 40.0 GiB are free, at most 20.0 GiB in one piece",
]
EXPLAINED: dict[str, Any] = {
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

ESTIMATE = {
    "subject": "resnet",
    "kind": "H100",
    "gpu_mb": {"n": 12, "p50": 8000.0, "p90": 9000.0, "p95": 9216.0},
    "seconds": {"n": 11, "p50": 1.5, "p90": 180.0, "p95": 200.0},
    "needed_runs": 5,
}
WAITS = {"reason": "WaitingForMemory", "message": "needs 18.0 GiB", "position": 1}
EXPLAINED_SAYS = [
    "WaitingForMemory: needs 18.0 GiB on one GPU",
    "position 4 of 7",
    "also WaitingForPreemption: one run is stopping",
    "another tenant 20.0 GiB (priority 25, stopping)  18.0 GiB are needed",
]


TENANT = {
    "name": "acme",
    "cohort": "lab",
    "guaranteed_mb": 20480,
    "held_mb": 30720,
    "borrowed_mb": 10240,
    "fair_share": 0.666667,
    "level": 0.449,
}


@pytest.mark.parametrize(
    ("line", "answer", "expected"),
    [
        (
            "gpus",
            {"items": [{**GPU, "split": True}, {**GPU, "uuid": "MIG-1", "index": 8, "parent": GPU["uuid"]}]},
            ["n1  1 GPU ", "split: its instances are leased", "instance of 0   "],
        ),
        ("gpus", {"items": [{**GPU, "free_mb": 24576}]}, ["n1  1 GPU ", "24.0 GiB free of 24.0", "░ free"]),
        ("gpus --idle", {"items": [{**GPU, "utilization": 0.0, "idle_seconds": 700}]}, ["idle for 12m"]),
        ("gpus --idle", {"items": []}, ["no GPU is idle"]),
        ("idle-template list", {"items": []}, ["no idle templates"]),
        ("nodes", {"items": [NODE]}, ["n1", "ready", "1.5/4", "0.0/8.0 GiB"]),
        (
            "nodes",
            {"items": [{**NODE, "agent": {"gpu_faults": {"GPU-b": "GPU is lost"}}}]},
            ["n1", "ready", "! n1: GPU-b: GPU is lost"],
        ),
        (
            "nodes",
            {"items": [{**NODE, "agent": {"gpu_absence": "the NVIDIA driver is not loaded"}}]},
            ["n1", "ready", "! n1: no GPU: the NVIDIA driver is not loaded"],
        ),
        ("nodes", {"items": [{**NODE, "silent_since": "2026-01-01T00:00:00Z"}]}, ["n1", "silent"]),
        (
            "gpus",
            {"items": [{**GPU, "free_mb": 20480, "stranded_mb": 5120}]},
            ["20.0 GiB free of 24.0, 5.0 GiB stranded"],
        ),
        (
            "gpus",
            {"items": [{**GPU, "present": False, "stale": True, "fault": "GPU is lost"}]},
            ["not in its machine   ! GPU is lost"],
        ),
        ("policy", POLICY, POLICY_SAYS),
        ("policy", {"preemption": {"enabled": False}}, ["preemption  off"]),
        (
            "profiles",
            {"items": [{"name": "judge", "cpu": 0.5, "gpus": 1, "gpu_mb": 8192, "max_retries": 2}]},
            ["judge", "0.5", "8.0 GiB", "max_retries 2"],
        ),
        ("profiles", {"items": [{"name": "llm", "gpu_mb": "learned"}]}, ["llm", "learned"]),
        ("stats", {**STATS, "fragmentation": IN_PIECES}, IN_PIECES_SAYS),
        (
            "stats",
            {**STATS, "forecasts": [FORETOLD]},
            ["forecasts", "learned: 88% of 40 started by their p90, median error 70s"],
        ),
        (
            "stats",
            {
                **STATS,
                "model_servers": [
                    {"name": "a", "http": UP, "grpc": None, "requests_in_flight": 3},
                    {"name": "b", "http": DOWN, "grpc": UP, "requests_in_flight": 0},
                    {"name": "c", "http": UP, "node_fault": "its node has not joined"},
                ],
            },
            [
                "a · up, 3 requests",
                "b · ! http is down: no route",
                "c · ! its node has not joined",
            ],
        ),
        (
            "stats",
            STATS,
            [
                "leased 1.0 GiB · used 0.5 GiB · free 1.0 GiB · total 2.0 GiB",
                "pending 7",
                "0.2 s ago, event 9",
            ],
        ),
        (
            f"explain {FULL_ID}",
            EXPLAINED,
            EXPLAINED_SAYS,
        ),
        (
            f"explain {FULL_ID}",
            {**EXPLAINED, "inherits": {"priority": 80, "task": "task_2"}},
            ["position 4 of 7 in the queue; inherits priority 80 from task_2"],
        ),
        (
            f"show {FULL_ID}",
            a_task(FULL_ID, pending={**WAITS, "inherits": {"priority": 80, "task": "task_2"}}),
            ["needs 18.0 GiB (position 1); inherits priority 80 from task_2"],
        ),
        (
            f"show {FULL_ID}",
            a_task(FULL_ID, labels={"run": "[bold]"}, run={"entrypoint": "a:b"}),
            ["run=[bold]"],
        ),
        (
            "estimates",
            {"items": [ESTIMATE]},
            ["resnet", "H100", "12", "12 of 5", "7.8 GiB", "9.0 GiB", "1.5s", "3m"],
        ),
        ("estimates", {"items": []}, ["nothing learned yet"]),
        ("tenants", {"items": [TENANT]}, ["acme", "lab", "30.0", "20.0", "10.0", "67%", "0.45", "in GiB"]),
        (
            "tenants",
            {"items": [TENANT], "cohorts": [{"name": "lab", "message": "cohort lab holds more"}]},
            ["acme", "cohort lab holds more"],
        ),
        ("tenants", {"items": []}, ["no tenants yet"]),
        ("token list", {"items": [{"name": "ci", "scopes": ["tasks:write"]}]}, ["ci", "tasks:write"]),
    ],
)
def test_answers_are_printed_as_tables(
    service: RecordedService, run: Run, line: str, answer: dict[str, Any], expected: list[str]
) -> None:
    service.reply_with(Reply(200, answer), Reply(200, a_task(FULL_ID)))
    ended = run(line)
    assert (ended.code, ended.err) == (0, "")
    for text in expected:
        assert text in ended.out


EVENTS = [
    {"kind": "task.changed", "key": FULL_ID, "fields": {"checkpoint_at": "2026-11-21T10:02:10Z"}},
    {"kind": "task.stopping", "key": FULL_ID, "fields": {"stop_reason": "preempt", "freeing_for": "task_2"}},
    {"kind": "task.requeued", "key": FULL_ID, "fields": {"preemptions": 1}},
]


def test_a_preempted_task_shows_its_preemptor_and_its_checkpoint(service: RecordedService, run: Run) -> None:
    at = "2026-11-21T10:02:11.412Z"
    victim = a_task(FULL_ID, preemptions=1, checkpoint_at=at, pending=WAITS)
    history = [
        Reply(200, {"items": [{**event, "at": at} for event in EVENTS], "next_after": 9}),
        Reply(200, {"items": [], "next_after": 9}),
        Reply(200, a_task("task_2", name="vip")),
    ]
    explained = Reply(200, {**EXPLAINED, "devices": []})
    listed = Reply(200, {"items": [victim], "next_cursor": None})
    service.reply_with(
        Reply(200, victim), *history, explained, Reply(200, victim), *history, listed, Reply(200, victim)
    )
    by_whom = (
        "at 2026-11-21 10:02:11Z for vip (task_2); it resumes from its checkpoint of 2026-11-21 10:02:10Z"
    )
    assert by_whom in run("show", FULL_ID).out
    assert f"preempted {by_whom}" in run("explain", FULL_ID).out
    assert "1. needs 18.0 GiB; preempted 1×" in run("ps").out


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"stop_cause": "the drain of n2 by admin"}, "asked to leave at {at} for the drain of n2 by admin;"),
        ({"stop_cause": None, "freeing_for": None}, "preempted at {at} for a task of another tenant;"),
        ({}, "preempted at {at};"),
    ],
)
def test_a_stop_names_its_cause_and_no_task_that_it_does_not_know(
    service: RecordedService, run: Run, fields: dict[str, object], said: str
) -> None:
    at = "2026-11-21T10:02:11.412Z"
    events = [
        {"kind": "task.admitted", "key": FULL_ID, "at": at, "fields": {"fence": 1, "node": "n2"}},
        {"kind": "task.stopping", "key": FULL_ID, "at": at, "fields": {"stop_reason": "preempt", **fields}},
        {"kind": "task.requeued", "key": FULL_ID, "at": at, "fields": {"preemptions": 1}},
    ]
    history = [Reply(200, {"items": it, "next_after": 9}) for it in (events, [])]
    waits = a_task(FULL_ID, preemptions=1, pending=WAITS)
    service.reply_with(Reply(200, waits), *history)
    out = " ".join(run("show", FULL_ID).out.split())
    assert said.format(at="2026-11-21 10:02:11Z") in out
    end = f"asked to leave for {fields['stop_cause']}" if fields.get("stop_cause") else "preempted"
    assert f"1: on n2 not started, {end} at" in out


def test_a_cancelled_task_shows_the_reason(service: RecordedService, run: Run) -> None:
    event = {"kind": "request.made", "key": "ask_1", "at": "2026-11-21T10:02:11Z"}
    fields = {"task": FULL_ID, "what": "cancel", "fields": {"reason": "wrong data", "by": "carl"}}
    service.reply_with(
        Reply(200, a_task(FULL_ID, "cancelled")),
        Reply(200, {"items": [{**event, "fields": fields}], "next_after": 9}),
        Reply(200, {"items": [], "next_after": 9}),
    )
    assert "cancelled  requested at 2026-11-21 10:02:11Z by carl: wrong data" in run("show", FULL_ID).out


def test_a_failed_task_is_explained_by_its_error(service: RecordedService, run: Run) -> None:
    error = {"kind": "exception", "message": "no luck\nat all", "traceback": ""}
    message = "failed at 2026-11-21T10:02:11.000Z, after 60 s on n1: no luck"
    explained = {"id": FULL_ID, "name": "fit", "state": "failed", "message": message}
    service.reply_with(Reply(200, explained), Reply(200, a_task(FULL_ID, "failed", error=error)))
    short = FULL_ID[-8:]
    assert (
        run("explain", FULL_ID).out == f"fit ({short}), failed\n{message}\ndetails: gpubroker show {short}\n"
    )


def test_a_cut_log_says_so_and_begins_with_a_whole_line(service: RecordedService, run: Run) -> None:
    printed = "".join(f"line {number}\n" for number in range(4000))
    service.reply_with(
        outcome("succeeded", log_tail="all of it\n"), outcome("succeeded", log_tail=printed[-16384:])
    )
    assert run("result", FULL_ID).err == "all of it\n"
    [mark, first, *_, last] = run("result", FULL_ID).err.splitlines()
    assert mark == "[only the last 16 KiB were kept]"
    assert first in printed.splitlines()
    assert last == "line 3999"


def test_ps_of_all_tenants_has_a_column_for_them(service: RecordedService, run: Run) -> None:
    service.reply_with(
        Reply(
            200, {"items": [a_task(state="running", tenant="vision")], "next_cursor": None, "has_more": False}
        )
    )
    shown = run("ps --all-tenants").out
    assert ("tenant", "*") in service.requests[-1].params
    assert "TENANT" in shown
    assert "vision" in shown


def test_ps_says_that_the_node_of_a_run_is_silent(service: RecordedService, run: Run) -> None:
    task = a_task(state="running", node="n2", notice="paused: n2, n3 silent")
    service.reply_with(Reply(200, {"items": [task], "next_cursor": None, "has_more": False}))
    assert "paused: n2, n3 silent" in " ".join(run("ps").out.split())


def test_an_empty_ps_mentions_finished_tasks(service: RecordedService, run: Run) -> None:
    # A hint is asked for besides, and left out where the token may not see the cluster.
    service.reply_with(page(), Reply(403, {"code": "forbidden", "detail": "no"}), page())
    assert "gpubroker ps --all" in run("ps").out
    assert run("ps --all").out == "no matching tasks\n"


def test_an_empty_filtered_ps_mentions_finished_tasks(service: RecordedService, run: Run) -> None:
    service.reply_with(page(), page())
    for words in (f"ps --after {FULL_ID}", "ps --name fit"):
        assert run(words).out == "no matching task is pending or running; --all includes finished tasks\n"


def test_ps_says_that_there_are_more_tasks(service: RecordedService, run: Run) -> None:
    service.reply_with(page(FULL_ID, "task_2"), page(FULL_ID, "task_2"))
    cut = run("ps -o ndjson --limit 1")
    assert (cut.json["id"], "the first 1; --limit shows more" in cut.err) == (FULL_ID, True)
    assert run("ps -o ndjson --limit 2").err == ""


def test_without_gpus_the_advice_depends_on_the_executors_state(service: RecordedService, run: Run) -> None:
    for state, expected in (
        ("connecting", "no GPUs yet: connecting: to Ray"),
        ("connected", "set simulated_devices"),
    ):
        executor = {"state": state, "message": "to Ray"}
        service.reply_with(Reply(200, {"items": []}), Reply(200, {"executor": executor}))
        assert expected in run("gpus").out


def test_command_names_of_other_systems_suggest_ours(service: RecordedService, run: Run) -> None:
    for word, ours in (("list", "gpubroker ps"), ("kill", "gpubroker cancel")):
        ended = run(word)
        assert (ended.code, ended.out) == (2, "")
        assert ours in ended.err
    assert run("--version").out.startswith("gpubroker ")


@pytest.mark.parametrize("columns", [60, 80, 100, 140])
def test_a_long_name_does_not_hide_other_columns(
    service: RecordedService, run: Run, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setattr("gpubroker.cli.printing._PIPE_WIDTH", columns)
    pending = {"reason": "WaitingForMemory", "message": "needs room", "position": None}
    waiting = a_task(FULL_ID, name="n" * 200, pending=pending)
    service.reply_with(Reply(200, {"items": [waiting], "next_cursor": None}), Reply(200, waiting))
    [head, line] = run("ps").out.splitlines()
    assert len(head) <= columns
    assert len(line) <= columns
    for text in (FULL_ID[-8:], "pending", "50", "needs room", "n…"):
        assert text in line


def a_device_event(position: int) -> bytes:
    event = {"position": position, "at": "2026-11-21T10:02:11.412Z", "kind": "device.seen", "key": "gpu0"}
    return b"id: %d\ndata: %s\n\n" % (position, json.dumps({**event, "version": 1, "fields": {}}).encode())


def test_watch_prints_an_answer_after_each_change(
    service: RecordedService, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for an hour for anything but a change."""
    monkeypatch.setattr("gpubroker.cli.watching._LATEST_SECONDS", 3600.0)
    changed, answers = threading.Event(), iter([1, 2])

    def stream(_request: Request) -> bytes:
        changed.wait(PATIENCE_SECONDS)
        changed.clear()
        return a_device_event(7)

    def gpus(_request: Request) -> bytes:
        free_mb = next(answers, None)
        if free_mb is None:
            raise_signal(SIGINT)
        changed.set()
        return json.dumps({"items": [{**GPU, "free_mb": free_mb or 0}]}).encode()

    service.always_at = {"/events": Reply(200, stream), "/gpus": Reply(200, gpus)}
    ended = run("gpus --watch -o ndjson")
    assert [json.loads(line)["free_mb"] for line in ended.out.splitlines()][:2] == [1, 2]
    assert ended.code == 0
    [first, *_] = [request for request in service.requests if request.path == "/events"]
    assert ("last", "0") in first.params
    assert ("kind", "lease.*") in first.params


def test_watch_asks_every_second_without_a_stream(
    service: RecordedService, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpubroker.cli.watching._LATEST_SECONDS", 0.1)
    answers = iter([1, 2, 3])

    def gpus(_request: Request) -> bytes:
        free_mb = next(answers, None)
        if free_mb is None:
            raise_signal(SIGINT)
        return json.dumps({"items": [{**GPU, "free_mb": free_mb or 0}]}).encode()

    service.always_at = {"/events": Reply(403, {"detail": "no"}), "/gpus": Reply(200, gpus)}
    ended = run("gpus --watch -o ndjson")
    assert [json.loads(line)["free_mb"] for line in ended.out.splitlines()][:3] == [1, 2, 3]


def test_the_holders_of_a_gpu_have_a_line_each(service: RecordedService, run: Run) -> None:
    [device] = EXPLAINED["devices"]
    holders = [
        {"id": FULL_ID, "name": f"fit{mb}", "priority": 25, "gpu_mb": mb} for mb in range(1024, 8192, 1024)
    ]
    explained = {**EXPLAINED, "devices": [{**device, "holders": holders}]}
    service.reply_with(Reply(200, explained), Reply(200, a_task(FULL_ID)))
    shown = run("explain", FULL_ID).out.splitlines()
    lines = [line for line in shown if "(priority 25)" in line]
    assert max(map(len, lines[1:])) <= 80
    assert ["fit7168 7.0 GiB (priority 25)" in lines[0], len(lines)] == [True, 5]
    assert shown[shown.index(lines[-1]) + 1].strip() == "and 2 more"


def test_free_and_whole_memory_that_round_alike_are_in_mib() -> None:
    assert (gib_of(10_239, 10_240), gib_of(10_240, 10_240), gib_of(5_120, 10_240, unit=" GiB")) == (
        "10239/10240 MiB", "10.0/10.0", "5.0/10.0 GiB",
    )  # fmt: skip
