"""Sizes and times that were learned, on the command line and in the SDK."""

from tests.client.command_line import Run
from tests.client.conftest import Do
from tests.client.recorded_service import FULL_ID, RecordedService, Reply, a_task

SIZING = {
    "gpu_mb": 9420,
    "p95_mb": 8192,
    "n": 12,
    "kind": "H100",
    "message": "95 of 100 runs of resnet used ...",
}
AT = "2026-11-21T10:02:11.412Z"
ETA = {"p50_at": AT, "p90_at": AT, "p50_seconds": 90.0, "p90_seconds": 600.0, "n": 12}


def test_submit_asks_for_a_learned_size_and_says_what_it_came_to(service: RecordedService, run: Run) -> None:
    service.told(Reply(202, a_task(FULL_ID, sizing=SIZING)))
    ended = run("submit a:b --gpu-memory learned --model-type resnet")
    assert service.asked[0].body["resources"] == {"gpu_mb": "learned"}
    assert SIZING["message"] in ended.err
    assert ended.out.strip() == FULL_ID


def test_the_sdk_tells_how_a_size_was_learned_and_when_a_run_may_end(
    service: RecordedService, do: Do
) -> None:
    service.told(Reply(202, a_task(FULL_ID, sizing=SIZING, eta=ETA)))
    task = do("submit", "a:b", gpu_mb="learned")
    assert (task.sizing.gpu_mb, task.sizing.n) == (9420, 12)
    assert (task.eta.p50_seconds, task.eta.n, task.eta.p90_at.year) == (90.0, 12, 2026)


def test_an_end_that_was_stated_goes_by_no_runs(service: RecordedService, run: Run) -> None:
    service.told(Reply(200, a_task(FULL_ID, state="running", eta={**ETA, "n": 0})))
    assert "in about 90s, as its submitter said" in run(f"show {FULL_ID}").out


def test_show_tells_how_a_size_was_learned_and_when_a_run_may_end(service: RecordedService, run: Run) -> None:
    service.told(Reply(200, a_task(FULL_ID, state="running", sizing=SIZING, eta=ETA)))
    told = run(f"show {FULL_ID}").out
    assert SIZING["message"] in told
    assert "in about 90s, 9 of 10 within 10m (going by 12 runs)" in told
