"""Results of long runs: one JSON file per kind in evidence/, with a record per batch and their sums."""

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.chaos.database import DURABILITY

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "evidence"


class Evidence:
    """A file of runs. A run is identified by its seed and engine; a newer record replaces an older one."""

    def __init__(
        self, name: str, summed: Sequence[str], trials: Sequence[str], folder: Path = FOLDER
    ) -> None:
        """`summed`: the numbers that are added up over all runs. `trials`: those that also get a bound."""
        self._path = folder / f"{name}.json"
        self._summed, self._trials = summed, trials

    @property
    def runs(self) -> list[dict[str, Any]]:
        return json.loads(self._path.read_text())["runs"] if self._path.exists() else []

    def has(self, **identity: Any) -> bool:
        return any(identity.items() <= run.items() for run in self.runs)

    def add(self, run: Mapping[str, Any], **common: Any) -> None:
        """`common`: facts that hold for all runs."""
        identity = ("seed", "engine")
        others = [old for old in self.runs if any(old.get(name) != run.get(name) for name in identity)]
        runs = [*others, {**run, "commit": commit()}]
        runs.sort(key=lambda one: [str(one.get(name)) for name in identity])
        whole = {**common, **self._sums(runs), "runs": runs}
        self._path.parent.mkdir(exist_ok=True)
        self._path.write_text(json.dumps(whole, indent=1) + "\n")

    def _sums(self, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        sums: dict[str, Any] = {name: sum(_total(run[name]) for run in runs) for name in self._summed}
        kinds = {f"{name}_by_kind": by for name in self._summed if (by := _by_kind(runs, name))}
        return {**sums, "bound": {name: bound(sums[name]) for name in self._trials}, **kinds}


def _by_kind(runs: Sequence[Mapping[str, Any]], name: str) -> dict[str, int]:
    """Empty for a number that is not counted by kind."""
    by: Counter[str] = Counter()
    for run in runs:
        if isinstance(run[name], dict):
            by.update(run[name])
    return dict(by.most_common())


def _total(value: Any) -> int:
    return sum(value.values()) if isinstance(value, dict) else int(value)


def bound(trials: int) -> float:
    """The upper 95 % bound of the failure rate after `trials` trials without a failure (rule of three)."""
    return round(3 / trials, 6) if trials else 1.0


def commit() -> str:
    """The commit of the source, with a `+` if service or client have uncommitted changes."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run(
        [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "service", "client"], capture_output=True).stdout
    return f"{head}{'+' if changed else ''}"


def add_seeds(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=1, help="seed of the first batch; the next ones count up")
    parser.add_argument("--batches", type=int, default=1, help="batches, each with its own seed and database")
    add_no_evidence(parser)


def add_no_evidence(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-evidence", action="store_true", help="print the record and do not keep it")


def run_seeds(
    options: argparse.Namespace,
    evidence: Evidence,
    run: Callable[[int], dict[str, Any]],
    **about: Any,
) -> None:
    """Run each seed that the evidence does not have yet; stop after a run in which something was wrong."""
    for seed in range(options.seed, options.seed + options.batches):
        record = run_once(options, evidence, seed, run, **about)
        if record is not None and (record["wrong"] or record.get("stale")):
            sys.exit(1)


def run_once(
    options: argparse.Namespace,
    evidence: Evidence,
    seed: int,
    run: Callable[[int], dict[str, Any]],
    *,
    engine: str | None = None,
    **common: Any,
) -> dict[str, Any] | None:
    """The record, None if the evidence has it already. `common`: facts that hold for all runs."""
    identity = {"seed": seed} if engine is None else {"seed": seed, "engine": engine}
    if not options.no_evidence and evidence.has(**identity):
        return None
    record = run(seed)
    print(record, flush=True)
    if not options.no_evidence:
        evidence.add(record, **common)
    return record


def on_database(name: str) -> dict[str, str]:
    """The facts about a database that evidence states."""
    return {"database": name, "durability": DURABILITY[name]}
