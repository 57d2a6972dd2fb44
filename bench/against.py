"""Another checkout of the service in turn with this one: operations per second, and CPU time of an operation.

Both services run all the time, each with the code and the `.venv` of its checkout; rounds of load alternate,
and each pair of rounds begins with the other one. On a machine that does other things too, CPU time says
more than throughput. The CPU time is that of the service and of all processes that it has started, without
the database's, the model server's and the client's; with `cli` it is that of the command.
"""

import json
import os
import statistics
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import psutil

from bench import accept, batch, cli, pickup, proxy, run
from bench.deployment import VARIANTS, deployed
from bench.http import Target
from bench.inference_servers import triton
from bench.load import ClosedLoop, OpenLoop
from bench.measuring import Figure, percentile, report
from bench.processes import service

BATCH = 1000
CONNECTIONS = {"accept": 32, "batch": 4, "run": 64}
PICKUPS_PER_SECOND = 50
STARTS = 5
"""The starts of each command in a round of `cli`."""
RUN_SETTINGS = {
    "ENTRYPOINTS": "bench.tasks:*",
    "RAY__WARM_RUNNERS": "1",
    "SIMULATED_DEVICES": json.dumps([{"memory_mb": 1024}]),
}


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--tree", type=Path, required=True, help="the other checkout")
    parser.add_argument("--of", choices=[*OPERATIONS], default="accept", help="the operation")
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
        found = ", ".join(f"{name} {before[name]:,.1f} and {after[name]:,.1f}" for name in _names(after))
        report(f"  {options.of} {options.variant} pair {number + 1}: {found}")
    for side in sides:
        _stdin(side).close()
        side.wait()
    count = int(sum(pair[1]["count"] for pair in pairs))
    for name in _names(pairs[0][1]):
        ours, theirs = ([pair[which][name] for pair in pairs] for which in (1, 0))
        yield Figure(
            "against",
            f"against.{options.of}.{options.variant}.{name}",
            statistics.median(ours),
            "1/s" if name == "per_second" else name.rpartition("_")[2],
            count,
            baseline=statistics.median(theirs),
            ratio=statistics.median(one / other for one, other in zip(ours, theirs, strict=True)),
        )


def _names(found: dict[str, float]) -> list[str]:
    """Return the names of the figures of a round."""
    return [name for name in found if name != "count"]


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


Round = Callable[[], dict[str, float]]
"""Measures one round of an operation, and returns its figures by name, among them `count`."""


@contextmanager
def _closed_loop(of: str, variant: str, seconds: float) -> Iterator[Round]:
    """Yield rounds of requests that are sent as fast as they are answered."""
    with deployed(variant, **RUN_SETTINGS) if of == "run" else accept.full_deployment(variant) as running:
        gateway = running.gateways[0]
        post = {
            "accept": ("/tasks", json.dumps(accept.TASK), 202, 1),
            "batch": ("/tasks/batch", batch.a_batch(BATCH), 207, BATCH),
            "run": ("/tasks", json.dumps(run.TASK), 201, 1),
        }
        path, body, status, operations = post[of]
        headers = {**gateway.headers, **({"Prefer": "wait=30"} if of == "run" else {})}
        target = Target(gateway.port, "POST", path, headers, body)
        with ClosedLoop() as load:

            def one_round() -> dict[str, float]:
                meter = _CpuMeter(gateway.process.pid)
                measured = load.measure(target, connections=CONNECTIONS[of], seconds=seconds)
                count = len(measured.must_all_be(status).latencies_ms) * operations
                found = {"per_second": count / measured.seconds, "cpu_us": meter.used_us() / count}
                running.wait_until_idle()
                return {**found, "count": count}

            yield one_round


@contextmanager
def _pickup(_of: str, variant: str, seconds: float) -> Iterator[Round]:
    """Yield rounds of tasks that arrive one by one and start at once."""
    with pickup.roomy_deployment(variant) as running, OpenLoop() as load:
        targets, known = pickup.targets_of(running), 0

        def one_round() -> dict[str, float]:
            nonlocal known
            meter = _CpuMeter(running.gateways[0].process.pid)
            sent = load.send(targets, per_second=PICKUPS_PER_SECOND, seconds=seconds, status=202)
            used, known = meter.used_us(), known + sent
            waits = pickup.waits_ms(running.database, known)[-sent:]
            p50, p99 = (percentile(waits, percent) for percent in (50, 99))
            return {"p50_ms": p50, "p99_ms": p99, "cpu_us": used / sent, "count": sent}

        yield one_round


@contextmanager
def _proxy(_of: str, _variant: str, seconds: float) -> Iterator[Round]:
    """Yield rounds of small inference requests through the service."""
    with triton([proxy.MODEL]) as server:
        main = {"name": "main", "http_url": server.url, "grpc_url": f"http://127.0.0.1:{server.grpc_port}"}
        settings = json.dumps({"servers": [main]})
        with service(ENGINE="simulated", TRITON=settings) as running, ClosedLoop() as load:
            [shape] = [shape for shape in proxy.SHAPES if shape.name == proxy.BUSIEST]
            target = proxy.target_of(running.port, shape, running.token)

            def one_round() -> dict[str, float]:
                before = proxy.cpu_seconds(running.process)
                measured = load.measure(target, connections=shape.clients, seconds=seconds).must_all_be(200)
                used, count = proxy.cpu_seconds(running.process) - before, len(measured.latencies_ms)
                return {"per_second": measured.per_second, "cpu_us": 1e6 * used / count, "count": count}

            yield one_round


@contextmanager
def _cli(_of: str, _variant: str, _seconds: float) -> Iterator[Round]:
    """Yield rounds of three starts of each command."""
    program = str(Path(sys.executable).with_name("gpubroker"))
    with service(**accept.FULL_SETTINGS) as running:
        env = {
            **os.environ,
            "GPUBROKER_URL": f"http://127.0.0.1:{running.port}",
            "GPUBROKER_TOKEN": running.token,
        }

        def one_round() -> dict[str, float]:
            found: dict[str, float] = {"count": STARTS}
            for name, words in cli.COMMANDS.items():
                took = [cli.started([program, *words], env) for _ in range(STARTS)]
                wall, cpu = zip(*took, strict=True)
                found |= {f"{name}_ms": statistics.median(wall), f"{name}.cpu_ms": statistics.median(cpu)}
            return found

        yield one_round


OPERATIONS = {
    "accept": _closed_loop,
    "batch": _closed_loop,
    "run": _closed_loop,
    "pickup": _pickup,
    "proxy": _proxy,
    "cli": _cli,
}


def serve_rounds(of: str, variant: str, seconds: float) -> None:
    """Measure one round for each line of standard input, and print its figures."""
    with OPERATIONS[of](of, variant, seconds) as one_round:
        one_round()  # warm-up
        print(json.dumps({}), flush=True)
        for _ in sys.stdin:
            print(json.dumps(one_round()), flush=True)


class _CpuMeter:
    """Measures the CPU time of the service and of the processes it has started, from its creation on."""

    def __init__(self, pid: int) -> None:
        self._service = psutil.Process(pid)
        self._before = _cpu_seconds(self._service)

    def used_us(self) -> float:
        after = _cpu_seconds(self._service)
        return 1e6 * sum(after[pid] - self._before[pid] for pid in self._before.keys() & after.keys())


def _cpu_seconds(service: psutil.Process) -> dict[int, float]:
    """Return the CPU time of the service and of the processes it has started, including a Ray head that
    outlives it."""
    data_dir = service.environ()["GPUBROKER_DATA_DIR"]
    started = {service}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            # The head and its workers have no variable of ours, but the path of Ray's token, which is there.
            if any(data_dir in value for value in process.environ().values()):
                started |= {process, *process.children(recursive=True)}
    seconds: dict[int, float] = {}
    for process in started:
        with suppress(psutil.Error):  # the process has ended
            seconds[process.pid] = sum(process.cpu_times()[:2])
    return seconds


if __name__ == "__main__":
    serve_rounds(sys.argv[1], sys.argv[2], float(sys.argv[3]))
