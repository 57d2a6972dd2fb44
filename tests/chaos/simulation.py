"""Storms in the simulation, by the hundred: what each seed came to, and the sums of a batch."""

import gc
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from tests.simulation.storm import StormReport, storm

BATCH = 100
"""Seeds of one record."""
STEPS = 200
_SEEDS_AT_ONCE = 5
SUMMED = (
    "seeds", "steps", "acknowledged", "lost", "accepted_twice", "double_leased_mb", "leases_left", "terms",
    "events", "virtual_seconds", "faults",
)  # fmt: skip


@dataclass(frozen=True)
class Seeds:
    first: int
    count: int
    steps: int = STEPS

    def parts(self) -> Iterator[range]:
        end = self.first + self.count
        for begin in range(self.first, end, _SEEDS_AT_ONCE):
            yield range(begin, min(begin + _SEEDS_AT_ONCE, end))


def with_fixed_hashes() -> None:
    """Go on as a process in which the same texts have the same hashes as everywhere: the order of a set may
    decide who is looked at first, and a seed must be the same storm wherever it is tried again."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        command = [sys.executable, "-m", "tests.chaos", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "PYTHONHASHSEED": "0"})


def run(seeds: Seeds, workers: int) -> dict[str, Any]:
    """The record of these seeds. Says of each that went wrong how to see it again."""
    if workers == 1:
        return _record(seeds, _say(storm(seed, seeds.steps) for part in seeds.parts() for seed in part))
    gc.freeze()
    with ProcessPoolExecutor(workers) as pool:
        asked = [pool.submit(_several, part, seeds.steps) for part in seeds.parts()]
        return _record(seeds, _say(report for done in asked for report in done.result()))


def _several(seeds: range, steps: int) -> list[StormReport]:
    return [storm(seed, steps) for seed in seeds]


def _say(reports: Iterable[StormReport]) -> Iterator[StormReport]:
    for report in reports:
        if report.wrong:
            again = f"python -m tests.chaos simulation --first {report.seed} --seeds 1 --no-evidence"
            print(f"seed {report.seed} went wrong; {again}", *report.wrong, sep="\n  ", flush=True)
        yield report


def _record(seeds: Seeds, reports: Iterable[StormReport]) -> dict[str, Any]:
    sums, faults = Counter[str](), Counter[str]()
    digest, wrong = sha256(), list[str]()
    for report in reports:
        sums.update({name: getattr(report, name) for name in SUMMED if name not in ("seeds", "faults")})
        faults += report.faults
        digest.update(report.digest.encode())
        wrong += [f"seed {report.seed}: {line}" for line in report.wrong[:3]]
    return {
        "seed": seeds.first,
        "seeds": seeds.count,
        **{name: round(sums[name]) for name in SUMMED if name not in ("seeds", "faults")},
        "faults": dict(sorted(faults.items())),
        "digest": digest.hexdigest(),
        "wrong": wrong[:20],
    }
