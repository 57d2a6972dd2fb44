"""Learned sizes and times, on the command line and in the SDK."""

from typing import Any

import pytest

from tests.client.command_line import Run
from tests.client.conftest import Do
from tests.client.recorded_service import FULL_ID, RecordedService, Reply, a_task

SIZING: dict[str, Any] = {
    "gpu_mb": 9420,
    "p95_mb": 8192,
    "n": 12,
    "kind": "H100",
    "message": "95 of 100 runs of resnet used ...",
}
AT = "2026-11-21T10:02:11.412Z"
ETA = {"p50_at": AT, "p90_at": AT, "p50_seconds": 90.0, "p90_seconds": 600.0, "n": 12}


def test_submit_asks_for_a_learned_size_and_prints_the_size(service: RecordedService, run: Run) -> None:
    service.reply_with(Reply(202, a_task(FULL_ID, sizing=SIZING)))
    ended = run("submit a:b --gpu-memory learned --model-type resnet")
    assert service.requests[0].body["resources"] == {"gpu_mb": "learned"}
    assert SIZING["message"] in ended.err
    assert ended.out.strip() == FULL_ID


def test_a_rank_can_ask_for_a_learned_size(service: RecordedService, run: Run) -> None:
    service.reply_with(Reply(202, a_task(FULL_ID, sizing=SIZING)))
    ended = run("submit a:b --bundle count=4,gpu_mb=learned --bundle gpu_mb=2GiB --model-type resnet")
    bundles = [{"count": 4, "gpu_mb": "learned"}, {"gpu_mb": 2048}]
    assert service.requests[0].body["resources"] == {"bundles": bundles}
    assert SIZING["message"] in ended.err


def test_a_task_has_its_sizing_and_its_expected_end(service: RecordedService, do: Do) -> None:
    service.reply_with(Reply(202, a_task(FULL_ID, sizing=SIZING, eta=ETA)))
    task = do("submit", "a:b", gpu_mb="learned")
    assert (task.sizing.gpu_mb, task.sizing.n) == (9420, 12)
    assert (task.eta.p50_seconds, task.eta.n, task.eta.p90_at.year) == (90.0, 12, 2026)


def test_a_stated_duration_is_shown_as_stated(service: RecordedService, run: Run) -> None:
    service.reply_with(Reply(200, a_task(FULL_ID, state="running", eta={**ETA, "n": 0})))
    assert "in about 90s, as stated at submit" in run(f"show {FULL_ID}").out


def test_show_prints_the_sizing_and_the_expected_end(service: RecordedService, run: Run) -> None:
    service.reply_with(Reply(200, a_task(FULL_ID, state="running", sizing=SIZING, eta=ETA)))
    printed = run(f"show {FULL_ID}").out
    assert SIZING["message"] in printed
    assert "in about 90s, 90% within 10m (from 12 runs)" in printed


def event(kind: str, key: str, **fields: object) -> dict[str, object]:
    return {"position": 1, "at": AT, "kind": kind, "key": key, "version": 3, "fields": fields}


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (
            event(
                "lease.overused",
                f"run:{FULL_ID}:1:0:local/n1/GPU-1",
                state="held",
                mb=8192,
                overused_mb=12288,
            ),
            f"{FULL_ID[-8:]}  on GPU-1, 8.0 GiB, used 12.0 GiB",
        ),
        (
            event("estimate.learned", "resnet", values=[["L4", "gpu_mb", 8192], ["L4", "seconds", 61.5]]),
            "resnet  8.0 GiB on L4, 61.5 s on L4",
        ),
        (
            event("estimate.forgotten", "resnet", values=[["", "seconds", None]]),
            "resnet  seconds",
        ),
    ],
)
def test_events_show_what_was_used_and_learned(
    service: RecordedService, run: Run, event: dict[str, object], expected: str
) -> None:
    service.reply_with(
        Reply(200, {"items": [event], "next_after": 1}), Reply(200, {"items": [], "next_after": 1})
    )
    assert expected in run("events --after 0").out


def test_gpus_marks_holders_that_use_more_than_they_leased(service: RecordedService, run: Run) -> None:
    holder = {"kind": "run", "id": FULL_ID, "name": "train", "gpu_mb": 8192, "overused_mb": 12288}
    gpu = {"key": "local/n1/GPU-1", "node": "n1", "kind": "L4", "physical_mb": 24576, "holders": [holder]}
    service.reply_with(Reply(200, {"items": [gpu]}))
    assert "train 8.0 GiB (! used 12.0 GiB)" in run("gpus").out
