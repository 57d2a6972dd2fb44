"""Count the calls and bytes that one operation takes in each process. The counts are the same on every
machine.

`accept` is a task posted alone and `batch` one of 1,000 posted together, on SQLite, with the plan that
follows; `run` a no-op from POST to result in a warm runner; `item` one of an array; `proxied` a request with
a binary tensor of 64 bytes to a model that its server has; `first_plan` a task that the first plan of an
empty cluster starts, and `cycle` the planning after one run has ended, both on the cluster of `bench plan`
with 80 GPUs and 2,000 tasks.

Calls are those of Python and C functions, by `sys.setprofile` in all threads. Live bytes are what an
operation leaves behind, and peak bytes what it takes meanwhile in all processes together, by `tracemalloc`.
All processes run as tasks of one event loop, whose clock stands still while anything works; who makes a call
is told by a context variable. The code is that of the service, except that Ray, the model server and the
client's machine are stood in for. The calls of asyncio and of thread queues are left out, since uvloop makes
none of the former. What a service does at rest counts as far as it falls into the time of an
operation: 5 ms for a run, 10 ms for an accepted task.
"""

import json
import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.measuring import Figure, report

SCENES = ("runs", "planning", "tasks", "inference")
"""The scenes, the longest first: two are counted at a time, each in a process of its own."""


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--scene", choices=[*SCENES, "all"], default="all", help="the paths to count")
    parser.add_argument("--functions", type=int, default=10, help="show as many of the functions called most")


def measure(options: Namespace) -> Iterator[Figure]:
    for found in count(SCENES if options.scene == "all" else [options.scene]):
        for process, functions in found["most_called"].items():
            report(f"{found['path']} in the {process}:")
            for name, calls in functions[: options.functions]:
                report(f"  {calls:10,.2f} {name}")
        for name, value in figures_of(found).items():
            yield Figure("cost", f"cost.{name}", value, name.rpartition(".")[2].rpartition("_")[2], 1)


def count(scenes: Iterable[str]) -> list[dict[str, Any]]:
    """Return the counts of each path of these scenes, with the fields of `paths.Counted`. Raises RuntimeError
    if a scene fails."""
    with ThreadPoolExecutor(2) as children:
        return [found for of_scene in children.map(_count, scenes) for found in of_scene]


def _count(scene: str) -> list[dict[str, Any]]:
    # What the caller has set for its own service or Ray must not change a count.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("GPUBROKER_", "RAY_"))}
    child = subprocess.run(
        [sys.executable, "-m", "bench.cost.child", scene],
        env={**env, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode:
        raise RuntimeError(
            f"the scene {scene} could not be counted: its process ended with {child.returncode}:\n"
            f"{child.stderr[-4000:]}"
        )
    return [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]


def figures_of(found: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a path under the names that their rows have in `bounds.BOUNDS`."""
    path = found["path"]
    figures = {f"{path}.{process}.calls": calls for process, calls in found["calls"].items()}
    figures |= {f"{path}.{process}.live_bytes": size for process, size in found["live_bytes"].items()}
    return {**figures, f"{path}.peak_bytes": found["peak_bytes"]}
