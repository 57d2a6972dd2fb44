"""Short forms of the long runs that `make evidence` makes."""

import subprocess
import sys
from ast import literal_eval

import pytest

from tests.chaos.evidence import ROOT
from tests.chaos.mutants import MUTANTS

SECONDS = 1200


def chaos(*words: str) -> str:
    """What it printed. In a process of its own, whose children are counted and end with it."""
    command = [sys.executable, "-m", "tests.chaos", *words, "--no-evidence"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_kills_of_the_service_under_load_lose_and_repeat_nothing(database: str) -> None:
    told = chaos("kills", "--database", database, "--kills", "27", "--tasks-per-kill", "15")
    assert "'lost': 0" in told


@pytest.mark.timeout(SECONDS + 60)
def test_kills_of_all_that_runs_on_ray_lose_and_repeat_nothing() -> None:
    told = chaos("kills", "--database", "sqlite", "--engine", "ray", "--kills", "6", "--tasks-per-kill", "25")
    assert "'released_early': 0" in told


@pytest.mark.timeout(SECONDS + 60)
def test_leaders_that_slept_past_their_lease_write_nothing_when_they_wake() -> None:
    assert "'accepted': {}" in chaos("zombies", "--pauses", "2", "--orders", "0")


def test_every_fault_that_can_be_planted_has_its_place() -> None:
    texts = {mutant.file: (ROOT / mutant.file).read_text() for mutant in MUTANTS}
    assert [mutant.name for mutant in MUTANTS if texts[mutant.file].count(mutant.right) != 1] == []


@pytest.mark.timeout(SECONDS + 60)
def test_faults_planted_on_purpose_are_seen() -> None:
    told = chaos("mutants", "--first", "3")
    assert told.count("seen by") == 3


@pytest.mark.timeout(SECONDS + 60)
def test_a_restart_of_postgresql_and_ended_backends_lose_nothing_and_all_goes_on() -> None:
    words = ("--restarts", "1", "--kills", "10", "--watch-seconds", "0.5", "--back-seconds", "1")
    told = literal_eval(chaos("blows", *words))
    found = (told["lost"], told["accepted_twice"], told["double_leased_mb"], told["leases_left"])
    assert found == (0, 0, 0, 0)
    assert told["acknowledged"] > 0
    assert told["seconds_to_the_next_answer"]["max"] < 5.0


@pytest.mark.timeout(SECONDS + 60)
def test_lines_that_are_reset_or_say_nothing_lose_nothing_and_all_goes_on() -> None:
    words = (
        "--kind",
        "reset",
        "--kind",
        "in pieces",
        "--kind",
        "half-open",
        "--place",
        "leader and PostgreSQL",
    )
    told = literal_eval(chaos("network", *words, "--most-seconds", "0.6", "--rest-seconds", "0.2"))
    found = (told["lost"], told["accepted_twice"], told["double_leased_mb"], told["leases_left"])
    assert found == (0, 0, 0, 0)
    assert told["acknowledged"] > 0
    assert max(one["without_a_decision_seconds"] for one in told["met"]) < 10.0
