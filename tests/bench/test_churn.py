"""`python -m bench churn` with three queues and a few seconds of work, through a real service."""

import pytest

from bench.churn import churn, figures
from bench.churn.outcome import outcome_of
from bench.churn.shapes import SHAPES, UNIT_MB, Shape, WorkClass

SMALL = Shape(
    "kueue-small",
    cohorts=1,
    queues=3,
    quota=20,
    borrow=40,
    classes=(
        WorkClass("small", 20, 0.05, 0.2, 25, 1),
        WorkClass("medium", 6, 0.2, 0.3, 50, 5),
        WorkClass("large", 2, 0.6, 0.4, 75, 20),
    ),
    published={"wall_s": 100.0},
)


@pytest.mark.parametrize(
    ("name", "tasks", "floor"), [("kueue-baseline", 15_000, 66), ("kueue-large", 50_000, 4)]
)
def test_the_loads_have_the_published_sizes(name: str, tasks: int, floor: float) -> None:
    shape = SHAPES[name]
    assert shape.tasks == len(shape.arrivals()) == tasks
    assert shape.work_unit_seconds / shape.units == pytest.approx(floor, abs=0.1)


def test_a_shortened_load_has_no_published_figures() -> None:
    part = SHAPES["kueue-large"].shortened(0.5)
    assert [(each.name, each.count) for each in part.classes] == [("small", 18), ("medium", 6), ("large", 2)]
    assert part.tasks == len(part.arrivals()) == 26_000
    assert not part.published
    assert SHAPES["kueue-large"].shortened(1.0).published


def test_a_small_load_runs_through_the_whole_service() -> None:
    found = churn(SMALL, connections=4)
    by_name = {figure.figure: figure for figure in figures(SMALL, found, "SQLite")}
    assert found.counts["task.submitted"] == found.counts["task.succeeded"] == SMALL.tasks
    assert by_name["churn.small.wall_s"].value > 1.0
    assert by_name["churn.small.wall_s"].ratio == pytest.approx(by_name["churn.small.wall_s"].value / 100.0)
    assert "Kubernetes API server" in by_name["churn.small.wall_s"].published
    assert by_name["churn.small.wait.large_s"].published == ""
    assert by_name["churn.small.wait.large_s"].value > 0.0
    assert by_name["churn.small.cpu_per_admission"].value > 0.0
    assert 0.0 < by_name["churn.small.use"].value < by_name["churn.small.held_use"].value <= 1.0
    assert {name for name in found.waits if found.waits[name]} == {"small", "medium", "large"}


def event(second: float, kind: str, key: str, **fields: object) -> dict[str, object]:
    return {"at": f"2026-01-01T00:00:{second:06.3f}Z", "kind": kind, "key": key, "fields": fields}


def test_use_counts_run_time_and_held_use_held_memory_as_quota_shares() -> None:
    one = Shape("kueue-one", 1, 1, 10, 0, (WorkClass("only", 1, 1.0, 2.0, 50, 5),), {})
    log = [
        event(1, "task.submitted", "t", name="only"),
        event(2, "task.admitted", "t", fence=1),
        event(2, "lease.reserved", "l", mb=5 * UNIT_MB),
        event(5, "task.succeeded", "t"),
        event(5, "lease.releasing", "l"),
        event(6, "lease.released", "l"),
    ]
    found = outcome_of(log, one).figures(one)
    assert found["wall_s"] == (4.0, "s")
    assert found["use"][0] == pytest.approx(2 * 5 / (10 * 4))
    assert found["held_use"][0] == pytest.approx(4 * 5 / (10 * 4))
    assert found["wait.only_s"] == (1.0, "s")
    with pytest.raises(RuntimeError, match="1 tasks had to succeed"):
        outcome_of(log[:3], one)
