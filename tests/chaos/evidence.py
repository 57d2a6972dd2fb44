"""What is written down of long runs: one file per kind and database, a record per run, and their sums."""

import json
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "evidence"


class Evidence:
    """A file of runs. Known by its seed and engine, a run is there once; the newest counts."""

    def __init__(
        self, name: str, summed: Sequence[str], trials: Sequence[str], folder: Path = FOLDER
    ) -> None:
        """`summed`: the numbers that are added up over all runs; of `trials` a bound is told as well."""
        self._path = folder / f"{name}.json"
        self._summed, self._trials = summed, trials

    @property
    def runs(self) -> list[dict[str, Any]]:
        return json.loads(self._path.read_text())["runs"] if self._path.exists() else []

    def has(self, **which: Any) -> bool:
        return any(which.items() <= run.items() for run in self.runs)

    def add(self, run: Mapping[str, Any], **about: Any) -> None:
        """`about` is said once of all runs."""
        same = ("seed", "engine")
        others = [old for old in self.runs if any(old.get(name) != run.get(name) for name in same)]
        runs = sorted([*others, {**run, "commit": commit()}], key=lambda one: [str(one.get(n)) for n in same])
        whole = {**about, **self._sums(runs), "runs": runs}
        self._path.parent.mkdir(exist_ok=True)
        self._path.write_text(json.dumps(whole, indent=1) + "\n")

    def _sums(self, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        sums: dict[str, Any] = {name: sum(_amount(run[name]) for run in runs) for name in self._summed}
        kinds = {f"{name}_by_kind": by for name in self._summed if (by := _by_kind(runs, name))}
        return {**sums, "bound": {name: bound(sums[name]) for name in self._trials}, **kinds}


def _by_kind(runs: Sequence[Mapping[str, Any]], name: str) -> dict[str, int]:
    """Empty for what is not counted by kind."""
    by: Counter[str] = Counter()
    for run in runs:
        if isinstance(run[name], dict):
            by.update(run[name])
    return dict(by.most_common())


def _amount(value: Any) -> int:
    """Of what is counted by kind, all kinds together."""
    return sum(value.values()) if isinstance(value, dict) else int(value)


def bound(trials: int) -> float:
    """No failure in so many trials: at 95 %, the rate of failures is below this. The rule of three."""
    return round(3 / trials, 6) if trials else 1.0


def commit() -> str:
    """Which source was run, with a `+` if it was changed since."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run(
        [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "service", "client"], capture_output=True).stdout
    return f"{head}{'+' if changed else ''}"
