"""`gpubroker submit --dry-run`, and how remedies are printed."""

from typing import Any

import pytest

from tests.client.command_line import Run
from tests.client.recorded_service import RecordedService, Reply, page

RUN = {
    "id": None,
    "name": None,
    "priority": 20,
    "band": "background",
    "gpu_mb": 61440,
    "lost_gpu_seconds": 90.0,
}
WAITS: dict[str, Any] = {
    "verdict": "waits",
    "reason": "WaitingForMemory",
    "message": "needs 40.0 GiB on one GPU",
    "position": 3,
    "queue_length": 2,
    "start": {"p50_seconds": 40.0, "p90_seconds": 240.0, "n": 12},
    "preemption": {
        "why": "all_shielded",
        "message": "no run may be preempted for priority 50",
        "counts": {"priority": 1},
        "runs": [{**RUN, "shield": "priority"}],
    },
    "start_record": {"basis": "learned", "n": 40, "median_error_seconds": 20.0, "within_p90": 0.9},
    "quota": {
        "tenant": "acme",
        "cohort": "labs",
        "guaranteed_mb": 20480,
        "used_mb": 24576,
        "borrowed_mb": 4096,
        "lent_mb": 6144,
        "left_mb": 6144,
        "counts_mb": 40960,
    },
    "ranks": [
        {"rank": 0, "place": {"node": "n1", "devices": [{"index": 3}]}, "message": "fits"},
        {"rank": 1, "place": {"node": "n1", "devices": [{"index": 3}]}, "message": "fits"},
        {"rank": 2, "place": None, "reason": "Fragmented", "message": "no place beside the others"},
    ],
    "remedies": [
        {"change": {"min_ranks": 2}, "effect": "starts", "message": "with min_ranks at most 2"},
        {"change": {"kinds": ["A100 40GB"]}, "effect": "starts", "message": "on A100 40GB only"},
        {
            "change": {"gpu_mb": 20480},
            "effect": "starts",
            "message": "with gpu_mb at most 20480 it starts now",
        },
        {"change": {"kinds": [], "nodes": {}}, "effect": "starts", "message": "on any GPU of any node"},
        {"change": {"gpu_mb": 1, "exclusive": False}, "effect": "starts", "message": "with part of one"},
        {"change": {"priority": 81}, "effect": "preempts", "message": "with priority 81", "victims": [RUN]},
        {"change": {}, "effect": "starts_later", "message": "when x ends", "after": RUN},
    ],
    "devices": [
        {
            "key": "n1/gpu0",
            "node": "n1",
            "kind": "H100",
            "free_mb": 20480,
            "allocatable_mb": 81920,
            "need_mb": 40960,
            "message": "40.0 GiB are needed",
            "free_in": {"p50_seconds": 40.0, "p90_seconds": 240.0, "n": 12},
            "holders": [{**RUN, "ends": {"p50_seconds": 40.0, "p90_seconds": 40.0, "n": 0}}],
        }
    ],
}


@pytest.mark.parametrize(
    ("answer", "code", "expected"),
    [
        ({"verdict": "starts", "message": "the task would start now on n1"}, 0, ["would start now on n1\n"]),
        (
            {"verdict": "preempts", "message": "1 run would be preempted for it", "victims": [RUN]},
            0,
            ["would start after a preemption: 1 run", "preempts another tenant 60.0 GiB (priority 20)"],
        ),
        (
            {"verdict": "refused", "message": "too much", "refusal": {}, "remedies": WAITS["remedies"][2:3]},
            6,
            ["would be refused: too much", "submit with --gpu-memory 20480MiB"],
        ),
        (
            WAITS,
            8,
            [
                "would wait (WaitingForMemory): needs 40.0 GiB",
                "room expected in about 40s (90% within 4m; from 12 similar runs",
                "; half of the last 40 such forecasts were off by less than 20s",
                "no run may be preempted for priority 50",
                "quota of acme: 24.0 of 20.0 GiB used, and labs lends 6.0 more; this task counts 40.0,",
                "  0-1  fits on n1/gpu3",
                "    2  no place beside the others",
                "submit with --min-ranks 2",
                "submit with --kind 'A100 40GB'",
                "submit without --kind, --on",
                "submit with --gpu-memory 1MiB and without --exclusive",
                "submit with --priority 81",
                "preempts another tenant 60.0 GiB (priority 20)",
                "40s-4m",
                "(priority 20, 40s left)",
            ],
        ),
    ],
)
def test_a_dry_run_shows_what_would_happen_and_submits_nothing(
    service: RecordedService, run: Run, answer: dict[str, Any], code: int, expected: list[str]
) -> None:
    service.reply_with(page(), Reply(200, answer))
    ended = run("submit --gpu-memory 40GiB --dry-run -- python train.py")
    assert (ended.code, ended.err) == (code, "")
    for text in expected:
        assert text in ended.out
    assert [request.path for request in service.requests] == ["/nodes", "/tasks/simulate"]


def test_a_dry_run_works_without_a_target(service: RecordedService, run: Run) -> None:
    service.reply_with(Reply(200, {"verdict": "starts", "message": "x"}))
    assert run("submit --gpus 2 --dry-run").code == 0
    assert service.requests[0].body == {"resources": {"gpus": 2}}


def test_of_many_devices_those_with_room_soonest_are_shown(service: RecordedService, run: Run) -> None:
    [device] = WAITS["devices"]
    many = [{**device, "key": f"n1/gpu{n}", "index": n} for n in range(40)]
    service.reply_with(Reply(200, {**WAITS, "devices": many}))
    assert "16 more devices are not shown; -o json has all" in run("submit --gpus 2 --dry-run").out
