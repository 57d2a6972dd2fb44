"""The page says what the evidence holds, and evidence adds up."""

import json
from pathlib import Path

from tests.chaos.evidence import Evidence, bound
from tests.chaos.tables import PAGE, page


def test_the_page_shows_what_the_evidence_holds() -> None:
    """If not: python -m tests.chaos table."""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_runs_add_up_and_one_that_is_there_is_known_by_its_seed_and_engine(tmp_path: Path) -> None:
    evidence = Evidence("kills", summed=("kills", "lost"), trials=("kills",), folder=tmp_path)
    evidence.add(
        {"seed": 1, "engine": "ray", "kills": {"main": 2, "driver": 1}, "lost": 0}, database="sqlite"
    )
    evidence.add({"seed": 2, "engine": "ray", "kills": {"main": 5}, "lost": 1}, database="sqlite")
    evidence.add({"seed": 2, "engine": "ray", "kills": {"main": 7}, "lost": 0}, database="sqlite")
    assert evidence.has(seed=2, engine="ray")
    assert not evidence.has(seed=2, engine="simulated")
    assert [run["kills"] for run in evidence.runs] == [{"main": 2, "driver": 1}, {"main": 7}]
    whole = json.loads((tmp_path / "kills.json").read_text())
    assert (whole["kills"], whole["lost"], whole["bound"]) == (10, 0, {"kills": 0.3})
    assert whole["kills_by_kind"] == {"main": 9, "driver": 1}


def test_of_no_failure_in_so_many_trials_the_bound_is_three_by_that() -> None:
    assert (bound(300), bound(0)) == (0.01, 1.0)
