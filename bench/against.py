"""Another checkout of the service in turn with this one: operations per second, and CPU time of an operation.

Both services run all the time, each with the code and the `.venv` of its checkout; rounds of load alternate,
and each pair of rounds begins with the other one. On a machine that does other things too, CPU time says
more than throughput. The CPU time is that of the service and of all processes that it has started, without
the database's and the client's.
"""

import json
import os
import statistics
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import psutil

from bench import accept, batch, run
from bench.deployment import VARIANTS, deployed
from bench.http import Target
from bench.load import ClosedLoop
from bench.measuring import Figure, report

BATCH = 1000
CONNECTIONS = {"accept": 32, "batch": 4, "run": 64}
WARM_UP_SECONDS = 1.5
RUN_SETTINGS = {
    "ENTRYPOINTS": "bench.tasks:*",
    "RAY__WARM_RUNNERS": "1",
    "SIMULATED_DEVICES": json.dumps([{"memory_mb": 1024}]),
}


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--tree", type=Path, required=True, help="the other checkout")
    parser.add_argument("--of", choices=[*CONNECTIONS], default="accept", help="the operation")
    parser.add_argument("--variant", choices=[*VARIANTS], default="sqlite", help="how the services are run")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of rounds")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of load per round")


def measure(options: Namespace) -> Iterator[Figure]:
    sides = [_begin(tree.resolve(), options) for tree in (options.tree, Path(__file__).parents[1])]
    pairs: list[list[dict[str, float]]] = []
    for number in range(options.pairs):
        taken_by_side: dict[int, dict[str, float]] = {}
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            taken_by_side[which] = _ask(sides[which])
        pairs.append([taken_by_side[0], taken_by_side[1]])
        before, after = pairs[-1]
        report(
            f"  {options.of} {options.variant} pair {number + 1}: "
            f"{before['per_second']:,.0f} and {after['per_second']:,.0f}/s, "
            f"{before['cpu_us']:,.1f} and {after['cpu_us']:,.1f} µs of CPU"
        )
    for side in sides:
        _stdin(side).close()
        side.wait()
    count = int(sum(pair[1]["count"] for pair in pairs))
    for name, unit in (("per_second", "1/s"), ("cpu_us", "us")):
        ours, theirs = ([pair[which][name] for pair in pairs] for which in (1, 0))
        yield Figure(
            "against",
            f"against.{options.of}.{options.variant}.{name}",
            statistics.median(ours),
            unit,
            count,
            baseline=statistics.median(theirs),
            ratio=statistics.median(one / other for one, other in zip(ours, theirs, strict=True)),
        )


def _begin(tree: Path, options: Namespace) -> "subprocess.Popen[str]":
    # This checkout's file runs with the other checkout's modules, because that one may be older than this
    # file.
    command = [str(tree / ".venv/bin/python"), "-P", __file__, options.of, options.variant]
    side = subprocess.Popen(
        [*command, str(options.seconds)],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    _answer(side)
    return side


def _ask(side: "subprocess.Popen[str]") -> dict[str, float]:
    _stdin(side).write("go\n")
    _stdin(side).flush()
    return _answer(side)


def _answer(side: "subprocess.Popen[str]") -> dict[str, Any]:
    """Return the next answer of a side. Raises RuntimeError if its process has ended."""
    assert side.stdout is not None
    line = side.stdout.readline()
    if not line:
        raise RuntimeError(f"{side.args!r} has ended with {side.wait()}")
    found: dict[str, Any] = json.loads(line)
    return found


def _stdin(side: "subprocess.Popen[str]") -> IO[str]:
    assert side.stdin is not None
    return side.stdin


def serve_rounds(of: str, variant: str, seconds: float) -> None:
    """Run one round for each line of standard input, and print its figures."""
    full = accept.full_deployment(variant)
    with deployed(variant, **RUN_SETTINGS) if of == "run" else full as running, ClosedLoop() as load:
        gateway = running.gateways[0]
        service = psutil.Process(gateway.process.pid)
        post = {
            "accept": ("/tasks", json.dumps(accept.TASK), 202, 1),
            "batch": ("/tasks/batch", batch.a_batch(BATCH), 207, BATCH),
            "run": ("/tasks", json.dumps(run.TASK), 201, 1),
        }
        path, body, status, operations = post[of]
        headers = {**gateway.headers, **({"Prefer": "wait=30"} if of == "run" else {})}
        target = Target(gateway.port, "POST", path, headers, body)
        load.measure(target, connections=CONNECTIONS[of], seconds=WARM_UP_SECONDS)
        running.wait_until_idle()
        print(json.dumps({}), flush=True)
        for _ in sys.stdin:
            before = _cpu_seconds(service)
            measured = load.measure(target, connections=CONNECTIONS[of], seconds=seconds).must_all_be(status)
            after = _cpu_seconds(service)
            count = len(measured.latencies_ms) * operations
            used = sum(after[pid] - before[pid] for pid in before.keys() & after.keys())
            found = {"per_second": count / measured.seconds, "cpu_us": 1e6 * used / count, "count": count}
            print(json.dumps(found), flush=True)
            running.wait_until_idle()


def _cpu_seconds(service: psutil.Process) -> dict[int, float]:
    """Return the CPU time of the service and of the processes it has started, including a Ray head that
    outlives it."""
    data_dir = service.environ()["GPUBROKER_DATA_DIR"]
    seconds: dict[int, float] = {}
    for process in psutil.process_iter():
        try:
            if process == service or data_dir in process.environ().values() or _is_within(process, service):
                seconds[process.pid] = sum(process.cpu_times()[:2])
        except psutil.Error:
            continue  # the process has ended
    return seconds


def _is_within(process: psutil.Process, service: psutil.Process) -> bool:
    return service in process.parents()


if __name__ == "__main__":
    serve_rounds(sys.argv[1], sys.argv[2], float(sys.argv[3]))
