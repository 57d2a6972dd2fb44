"""`gpubroker plan -f fleet.yaml`."""

from pathlib import Path

import pytest

from tests.client.command_line import Run
from tests.client.recorded_service import RecordedService, Reply

TOTALS = {"gpus": 2, "whole_gpus": 1, "gpu_mb": 20480, "cpu": 5.0, "memory_mb": 0}
PLAN = {
    "fits": True,
    "message": "it fits if 1 run of lower priority leave",
    "components": [{"name": "trainer", "count": 2, "placed": 2, "missing": 0}],
    "places": [{"component": "trainer", "node": "n1", "devices": [], "displaces": 0}] * 2,
    "displaced": [
        {"id": None, "name": None, "priority": 20, "gpu_mb": 61440, "node": "n1", "ranks": None},
        {"id": "g", "name": "gang", "priority": 10, "gpu_mb": 20480, "node": "n2", "ranks": [2, 3]},
    ],
    "totals": TOTALS,
    "totals_without_colocation": {**TOTALS, "gpus": 0},
}


def test_a_plan_is_printed_and_its_exit_code_says_whether_it_fits(service: RecordedService, run: Run) -> None:
    service.reply_with(Reply(200, PLAN), Reply(200, {**PLAN, "fits": False, "message": "it does not fit"}))
    file = str(Path(__file__).parents[2] / "examples/fleet.yaml")
    ended = run(f"plan -f {file}")
    assert (ended.code, ended.err) == (0, "")
    for text in (
        "it fits if 1 run of lower priority leave",
        "2/2",
        "n1 ×2",
        "displaces another tenant 60.0 GiB (priority 20) on n1",
        "displaces gang 20.0 GiB (priority 10) on n2 (only rank 2, 3)",
        "total 2 GPUs (1 whole), 20.0 GiB of GPU memory in parts, 5 CPUs",
        "without colocation 20.0 GiB of GPU memory in parts, 5 CPUs",
    ):
        assert text in " ".join(ended.out.split())
    assert service.requests[0].path == "/plan"
    assert [part["name"] for part in service.requests[0].body["components"]][:2] == [
        "rollout-worker",
        "trainer",
    ]
    assert run(f"plan -f {file}").code == 8


def test_a_plan_is_retried_while_the_service_works_on_another(
    service: RecordedService, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    service.reply_with(Reply(429, {"code": "too-many-requests"}, {"Retry-After": "9"}), Reply(200, PLAN))
    assert run(f"plan -f {Path(__file__).parents[2] / 'examples/fleet.yaml'}").code == 0
    assert pauses == [9.0]


def test_an_invalid_plan_file_is_refused_before_anything_is_sent(
    service: RecordedService, run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "fleet.yaml"
    for text, expected in (
        ("a: [", "cannot read"),
        ("[]", "no list"),
        ("{components: [], x: 1}", "unknown keys: x"),
    ):
        file.write_text(text)
        ended = run(f"plan -f {file}", "--output", "json")
        assert ended.code == 2
        assert expected in " ".join(ended.err.split())
    assert service.requests == []
