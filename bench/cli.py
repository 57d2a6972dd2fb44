"""Time of one command of the command line, from its start to its end, beside a Python that does nothing.

`version` asks none; `ps` and `submit` ask a service on this machine. The commands are started in turn. On a
machine that does other things too, CPU time says more.
"""

import os
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path

from bench.accept import FULL_SETTINGS
from bench.measuring import Figure
from bench.processes import service

COMMANDS = {
    "version": ["--version"],
    "ps": ["ps"],
    "submit": ["submit", "bench.tasks:noop", "--hold"],
}


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--times", type=int, default=15, help="starts of each command")


def measure(options: Namespace) -> Iterator[Figure]:
    program = str(Path(sys.executable).with_name("gpubroker"))
    with service(**FULL_SETTINGS) as running:
        token = running.headers["Authorization"].removeprefix("Bearer ")
        env = {**os.environ, "GPUBROKER_URL": f"http://127.0.0.1:{running.port}", "GPUBROKER_TOKEN": token}
        took_ms: dict[str, list[tuple[float, float]]] = {name: [] for name in ("nothing", *COMMANDS)}
        for _ in range(options.times + 1):
            took_ms["nothing"].append(started([sys.executable, "-c", "pass"], env))
            for name, words in COMMANDS.items():
                took_ms[name].append(started([program, *words], env))
    for name in COMMANDS:
        for at, unit in enumerate(("ms", "cpu_ms")):
            value, baseline = (
                statistics.median(one[at] for one in took_ms[of][1:]) for of in (name, "nothing")
            )
            ratio = value / baseline
            yield Figure("cli", f"cli.{name}.{unit}", value, "ms", options.times, "", baseline, ratio)


def started(words: list[str], env: dict[str, str]) -> tuple[float, float]:
    """Run a command and return its milliseconds of wall time and of CPU time. Raises RuntimeError if it
    fails."""
    began = time.perf_counter()
    process = subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}")
    return 1000 * (time.perf_counter() - began), 1000 * (used.ru_utime + used.ru_stime)
