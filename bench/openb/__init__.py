"""How much of a cluster of 6,212 GPUs gets used: our placement against the policies of the FGD paper.

The trace is shuffled and prolonged until 130 % of all GPUs are asked for; tasks come one by one and stay. The
figure is the part of all GPUs that is allocated in the end, a mean over seeds, beside the published mean
(`gpubroker` beside the published FGD). Everything on a node is decided by
`gpubroker_server.core.world.fragmentation_gradient`.

Data: https://github.com/alibaba/clusterdata/tree/master/cluster-trace-gpu-v2023/csv
"""

import random
import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from os import sched_getaffinity
from pathlib import Path

from bench.measuring import Figure, say
from bench.openb.families import synthesise
from bench.openb.policies import POLICIES, policy
from bench.openb.published import published
from bench.openb.replay import Replay
from bench.openb.trace import Job, arrivals, read_jobs, read_machines, renamed, total_milli, traces_in

FIRST_SEED = 42
"""The paper's seeds start here; its random numbers are not ours."""

SYNTHETIC = "synthetic-"

Run = tuple[Path, str, str, int, bool, tuple[int, ...]]
"""(data, trace, policy, seed, nodes renamed, arrivals)"""


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, help="folder with the openb_*.csv files")
    parser.add_argument(
        "--traces", type=listed, default=None, help="like default,cpu100; default: all there are"
    )
    parser.add_argument(
        "--synthesise",
        type=listed,
        default=(),
        help="families to make of the default trace, like cpu250,gpuspec33",
    )
    parser.add_argument("--policies", type=listed, default=POLICIES, help=f"default: {','.join(POLICIES)}")
    parser.add_argument("--arrival", type=percents, default=(130,), help="in %% of all GPUs, like 130,100")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument(
        "--node-order",
        choices=["shuffled", "name"],
        default="shuffled",
        help="who wins ties: per seed a random order as in the paper's simulator, or the order of the file",
    )
    parser.add_argument("--processes", type=int, default=len(sched_getaffinity(0)))


def listed(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def percents(text: str) -> tuple[int, ...]:
    """Raises ValueError if a part is no whole number from 1 to 130."""
    parts = tuple(int(part) for part in listed(text))
    if not parts or not all(0 < part <= 130 for part in parts):
        raise ValueError(f"arrivals are whole percents from 1 to 130, not {text!r}")
    return parts


def measure(options: Namespace) -> Iterator[Figure]:
    unknown = sorted(set(options.policies) - set(POLICIES))
    if unknown:
        raise SystemExit(f"no such policy: {', '.join(unknown)}; known are {', '.join(POLICIES)}")
    traces = traces_in(options.data) if options.traces is None else options.traces
    with ProcessPoolExecutor(options.processes) as pool:
        for trace in (*traces, *(SYNTHETIC + family for family in options.synthesise)):
            runs = [run for name in options.policies for run in runs_of(options, trace, name)]
            results = list(pool.map(one_run, runs))
            for arrival in options.arrival:
                by_policy = {
                    name: [found[arrival] for run, found in zip(runs, results, strict=True) if run[2] == name]
                    for name in options.policies
                }
                show(trace, arrival, by_policy)
                yield from figures(trace, arrival, by_policy, main=arrival == options.arrival[0])


def runs_of(options: Namespace, trace: str, name: str) -> list[Run]:
    seeds = range(FIRST_SEED, FIRST_SEED + options.seeds)
    shuffled = options.node_order == "shuffled"
    return [(options.data, trace, name, seed, shuffled, options.arrival) for seed in seeds]


def one_run(run: Run) -> dict[int, float]:
    """arrival -> allocated, in % of all GPUs."""
    data, trace, name, seed, shuffled, at = run
    jobs, machines = jobs_of(data, trace), read_machines(data)
    chance = random.Random(seed)
    order = arrivals(jobs, total_milli(machines), chance)
    nodes = renamed(machines, chance) if shuffled else machines
    return Replay(nodes, policy(name, jobs, machines, chance)).allocated(order, at)


@cache
def jobs_of(data: Path, trace: str) -> Sequence[Job]:
    if trace.startswith(SYNTHETIC):
        return synthesise(trace.removeprefix(SYNTHETIC), read_jobs(data, "default"))
    return read_jobs(data, trace)


def figures(trace: str, arrival: int, by_policy: dict[str, list[float]], *, main: bool) -> Iterator[Figure]:
    """The first arrival asked for has the plain names, others end in `.atN`."""
    for name, values in by_policy.items():
        value, baseline = statistics.fmean(values), published(trace, name, arrival)
        yield Figure(
            bench="openb",
            figure=f"openb.{trace}.{name}" + ("" if main else f".at{arrival}"),
            value=value,
            unit="% of GPUs",
            n=len(values),
            baseline=baseline,
            ratio=None if baseline is None else value / baseline,
        )


def show(trace: str, arrival: int, by_policy: dict[str, list[float]]) -> None:
    """The same for people, beside what was published."""
    say(f"\n{trace}, {arrival} % asked for   allocated %     sd   published")
    for name, values in by_policy.items():
        baseline = published(trace, name, arrival)
        beside = "-" if baseline is None else f"{baseline:.2f}" + (" (FGD)" if name == "gpubroker" else "")
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        say(f"  {name:<24} {statistics.fmean(values):>11.2f}  {spread:5.2f}   {beside}")
