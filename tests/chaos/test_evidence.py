"""Evidence is summed up correctly, and the page of the docs shows it."""

import json
from pathlib import Path

from tests.chaos.evidence import Evidence, bound
from tests.chaos.evidence_page import PAGE, page


def test_the_page_shows_the_current_evidence() -> None:
    """If it does not: python -m tests.chaos evidence-page."""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_runs_are_summed_up_and_identified_by_seed_and_engine(tmp_path: Path) -> None:
    evidence = Evidence("kill", summed=("kills", "lost"), trials=("kills",), folder=tmp_path)
    evidence.add(
        {"seed": 1, "engine": "ray", "kills": {"main": 2, "driver": 1}, "lost": 0}, database="sqlite"
    )
    evidence.add({"seed": 2, "engine": "ray", "kills": {"main": 5}, "lost": 1}, database="sqlite")
    evidence.add({"seed": 2, "engine": "ray", "kills": {"main": 7}, "lost": 0}, database="sqlite")
    assert evidence.has(seed=2, engine="ray")
    assert not evidence.has(seed=2, engine="simulated")
    assert [run["kills"] for run in evidence.runs] == [{"main": 2, "driver": 1}, {"main": 7}]
    whole = json.loads((tmp_path / "kill.json").read_text())
    assert (whole["kills"], whole["lost"], whole["bound"]) == (10, 0, {"kills": 0.3})
    assert whole["kills_by_kind"] == {"main": 9, "driver": 1}


def test_the_bound_without_a_failure_is_three_divided_by_the_trials() -> None:
    assert (bound(300), bound(0)) == (0.01, 1.0)
