"""Short forms of the runs of `make evidence`."""

import subprocess
import sys
from ast import literal_eval
from pathlib import Path
from typing import Any

import pytest
from gpubroker_server.adapters.sql.store import migrate

from tests.chaos.evidence import ROOT
from tests.chaos.forked import LATE, ForkedService
from tests.chaos.mutation import MUTANTS

SECONDS = 1200
NOTHING_WRONG = {"lost": 0, "accepted_twice": 0, "double_leased_mb": 0, "leases_left": 0}


def chaos(*arguments: str) -> str:
    """The output of `python -m tests.chaos`, in a process of its own: its children are counted, it forks."""
    command = [sys.executable, "-m", "tests.chaos", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


def record_of(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = literal_eval(chaos(*arguments, "--no-evidence"))
    return found


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_kills_under_load_lose_and_repeat_no_task(database: str) -> None:
    found = record_of("kill", "--database", database, "--kills", "12", "--tasks-per-kill", "15")
    assert sum(found["kills"].values()) >= 12
    assert found["acknowledged"] > 12
    assert found["lost"] == 0


@pytest.mark.timeout(SECONDS + 60)
def test_kills_of_processes_on_ray_lose_and_repeat_no_task() -> None:
    found = record_of(
        "kill", "--database", "sqlite", "--engine", "ray", "--kills", "6", "--tasks-per-kill", "25"
    )
    assert sum(found["kills"].values()) >= 6
    assert found["runs_seen"] > 0
    assert found["released_early"] == 0


@pytest.mark.timeout(SECONDS + 60)
def test_a_leader_paused_past_its_lease_writes_nothing_when_it_resumes() -> None:
    found = record_of("pause", "--pauses", "2", "--orders", "0")
    assert (sum(found["refused"].values()), found["accepted"]) == (2, {})


def test_every_mutant_finds_the_text_that_it_replaces_once() -> None:
    texts = {mutant.file: (ROOT / mutant.file).read_text() for mutant in MUTANTS}
    assert [mutant.name for mutant in MUTANTS if texts[mutant.file].count(mutant.right) != 1] == []


@pytest.mark.timeout(SECONDS + 60)
def test_planted_faults_are_found_by_their_tests() -> None:
    assert chaos("mutation", "--first", "3", "--no-evidence").count("found by") == 3


@pytest.mark.timeout(SECONDS + 60)
def test_postgresql_restart_and_killed_backends_lose_no_task() -> None:
    """The service recovers."""
    arguments = ("--restarts", "1", "--kills", "10", "--window-seconds", "0.5", "--recovery-seconds", "1")
    found = record_of("postgres-restart", *arguments)
    assert found.items() >= NOTHING_WRONG.items()
    assert found["acknowledged"] > 0
    assert found["seconds_to_the_next_answer"]["max"] < 5.0


@pytest.mark.timeout(SECONDS + 60)
def test_reset_fragmented_and_half_open_connections_lose_no_task() -> None:
    """The service recovers."""
    kinds = ("--kind", "reset", "--kind", "fragmented", "--kind", "half-open")
    where = ("--place", "leader and PostgreSQL")
    found = record_of("network", *kinds, *where, "--most-seconds", "0.6", "--rest-seconds", "0.2")
    assert found.items() >= NOTHING_WRONG.items()
    assert found["acknowledged"] > 0
    assert max(one["without_a_decision_seconds"] for one in found["observed"]) < 10.0


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize(("name", "every"), [("sqlite", 1), ("postgres", 4)])
def test_no_fault_at_any_boundary_of_any_operation_loses_anything(
    name: str, every: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """On PostgreSQL at each fourth boundary; `make evidence` takes them all."""
    if name == "sqlite":
        url = f"sqlite:///{tmp_path / 'gpubroker.db'}"
        migrate(url, "head")
    else:
        url = request.getfixturevalue("postgres_url")
    found = chaos("sweep", "--database-url", url, "--every", f"{every}")
    print(found)
    assert "cut at " in found
    assert "kill at " in found


def test_a_forked_service_imports_no_module_of_the_service_after_the_fork(tmp_path: Path) -> None:
    with ForkedService(tmp_path / "data", engine="simulated") as service:
        assert service.broker.stats().tasks is not None
    assert LATE not in service.log()
