"""`python -m bench pickup` with one second of tasks, through one process."""

import json

import pytest

from bench import pickup
from bench.load import OpenLoop
from bench.pickup import LoggedEvent, figures, plain_rounds, roomy_deployment, targets_of, waits_ms, waits_of
from tests.e2e.service_process import until


def event(at: float, kind: str, key: str, **fields: object) -> LoggedEvent:
    return at, kind, key, json.dumps(fields)


def test_a_wait_lasts_from_the_commit_of_the_submit_to_the_first_start() -> None:
    log = [
        event(10.0, "task.submitted", "a"),
        event(10.1, "task.submitted", "b"),
        event(10.2, "task.submitted", "waits"),
        event(10.3, "task.admitted", "b", node="n"),
        event(10.4, "task.started", "b", started_at=10.35),
        event(10.5, "task.succeeded", "a", started_at=10.45),
        event(10.6, "task.started", "b", started_at=10.55),
    ]
    assert list(waits_of(log)) == pytest.approx([450.0, 250.0])


def test_every_task_sent_is_measured() -> None:
    with roomy_deployment("sqlite") as running, OpenLoop() as load:
        sent = load.send(targets_of(running), per_second=40.0, seconds=1.0, status=202)
        waits = waits_ms(running.database, sent)
    assert len(waits) == sent > 20
    by_name = {figure.figure: figure.value for figure in figures("sqlite", waits, [], "")}
    assert 0.0 < by_name["pickup.p50_ms"] <= by_name["pickup.p99_ms"]


def test_on_postgresql_the_baseline_is_a_plain_row(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickup, "ROUND_SECONDS", 0.0)
    with plain_rounds(postgres_url) as rounds_ms:
        until(lambda: len(rounds_ms) > 10, "rounds of the baseline")
    p50, p99 = figures("postgres", [8.0, 8.0], [2.0, 4.0], "")
    assert (p50.figure, p50.baseline, p50.ratio) == ("pickup.postgres.p50_ms", 2.0, 4.0)
    assert (p99.baseline, p99.ratio) == (4.0, 2.0)
