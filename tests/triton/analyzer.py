"""Triton's own load generator, in C++, from the wheel of its Python client."""

import json
import os
import subprocess
from collections.abc import Sequence
from math import comb
from pathlib import Path
from typing import Any

from tests.triton.server import HOME, wheel

TRIES = 4
TRY_SECONDS = 60.0
"""It takes one second, or hangs before its first request."""

HANGS_WITH_4_CLIENTS, HANGS_WITH_16_CLIENTS = 0.031, 0.19
"""How often it hangs with Triton alone, at most: the upper ends of the 95 % intervals (Clopper-Pearson) of 1
in 180 runs (60 each over HTTP, gRPC and a stream) and of 5 in 60 over HTTP, on two busy cores. Measured as
`pytest -m evidence tests/triton/test_perf_analyzer.py` does."""
FALSE_ALARMS = 0.01


class Hangs:
    """Counts them, since what is between the generator and Triton may make it hang too."""

    def __init__(self, rate: float) -> None:
        """`rate`: with Triton alone."""
        self._rate = rate
        self.tries = 0
        self.hung = 0

    def note(self, *, hung: bool) -> None:
        """Raises RuntimeError if so many are no accident any more."""
        self.tries += 1
        self.hung += hung
        chance = sum(
            comb(self.tries, n) * self._rate**n * (1 - self._rate) ** (self.tries - n)
            for n in range(self.hung, self.tries + 1)
        )
        if self.hung > 1 and chance < FALSE_ALARMS:
            raise RuntimeError(
                f"perf_analyzer hung {self.hung} times in {self.tries}; with Triton alone it hangs in at most"
                f" {self._rate:.1%}, so this is {chance:.2%} likely by accident: look at what stands between"
            )


OF_THESE_TESTS = Hangs(HANGS_WITH_4_CLIENTS)
"""Of one process of tests."""


def analyzer_libraries(folder: Path) -> Path:
    """The two that it misses, which the server's wheel brings under longer names."""
    folder.mkdir(exist_ok=True)
    for name, pattern in (("libb64.so.0d", "libb64-*.so.0d"), ("libcudart.so.12", "libcudart-*.so.12*")):
        [found] = Path(wheel()["libraries"]).glob(pattern)
        (folder / name).symlink_to(found)
    return folder


def analyzed(libraries: Path, told: Path, hangs: Hangs, *options: str) -> Sequence[dict[str, Any]]:
    """Its requests; `told` is a file that is not there yet. Raises RuntimeError with what it said, or if it
    hung too often."""
    command = [str(HOME / "bin" / "perf_analyzer"), *options, "--profile-export-file", str(told)]
    env = {**os.environ, "LD_LIBRARY_PATH": str(libraries)}
    for _ in range(TRIES):
        try:
            ran = subprocess.run(
                command, check=False, env=env, capture_output=True, text=True, timeout=TRY_SECONDS
            )
        except subprocess.TimeoutExpired:
            hangs.note(hung=True)
            continue
        hangs.note(hung=False)
        if ran.returncode:
            raise RuntimeError(f"perf_analyzer ended with {ran.returncode}:\n{ran.stdout}{ran.stderr}")
        [experiment] = json.loads(told.read_text())["experiments"]
        requests: Sequence[dict[str, Any]] = experiment["requests"]
        return requests
    raise RuntimeError(f"perf_analyzer did not end within {TRY_SECONDS:g} s, {TRIES} times: {command}")
