"""`gpubroker doctor` where the server is not installed: what the service finds."""

import pytest

from tests.client.command_line import Run
from tests.client.recorded_service import RecordedService, Reply

FOUND = {
    "kind": "gpu-held-unasked",
    "subject": "n1/gpu0 train",
    "severity": "warning",
    "cause": "train holds memory and computes nothing: it waits for data, or for requests.",
    "evidence": {"held_mb": 1024},
    "remedy": "gpubroker cancel task_0000",
    "first_seen_at": "2026-01-01T00:00:00.000Z",
}
NO_LEADER = {**FOUND, "kind": "no-leader", "severity": "critical", "evidence": {}, "first_seen_at": None}


def test_findings_are_paragraphs_and_a_critical_one_ends_with_1(
    service: RecordedService, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [])  # without the server
    for found in ([FOUND], [NO_LEADER, FOUND], []):
        service.reply_with(Reply(200, {"items": found}))
    ended = run("doctor")
    assert ended.code == 0
    assert ended.out.startswith("warning  gpu-held-unasked  n1/gpu0 train for ")
    assert "\n    held_mb 1024\n    > gpubroker cancel task_0000\n" in ended.out
    ended = run("doctor")
    assert (ended.code, ended.out.split()[0]) == (1, "critical")
    ended = run("doctor")
    assert (ended.code, ended.out) == (0, "nothing is wrong\n")
