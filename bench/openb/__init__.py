"""GPUs allocated on a cluster of 6,212 GPUs, by placement policy, beside the figures of the FGD paper.

The trace is shuffled and extended until 130 % of all GPUs are requested; tasks arrive one by one and stay.
The figure is the share of all GPUs that is allocated in the end, a mean over seeds, beside the published mean
(`gpubroker` beside the published FGD). The service's measure of fragmentation is
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

from bench.measuring import Figure, report
from bench.openb.policies import POLICIES, policy
from bench.openb.published import published
from bench.openb.replay import Replay
from bench.openb.synthesis import synthesise
from bench.openb.trace import Job, arrivals, read_jobs, read_machines, shuffled_nodes, total_milli, traces_in

FIRST_SEED = 42
"""The first of the paper's seeds. The paper used another random number generator."""

SYNTHETIC = "synthetic-"

Run = tuple[Path, str, str, int, bool, tuple[int, ...]]
"""(data, trace, policy, seed, whether the nodes are shuffled, arrivals)"""


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, help="folder with the openb_*.csv files")
    parser.add_argument(
        "--traces",
        type=listed,
        default=None,
        help="traces to replay, like default,cpu100; without it all in the folder",
    )
    parser.add_argument(
        "--synthesise",
        type=listed,
        default="",
        help="families to derive from the default trace, like cpu250,gpuspec33",
    )
    parser.add_argument("--policies", type=listed, default=", ".join(POLICIES), help="policies to compare")
    parser.add_argument(
        "--arrival", type=percents, default="130", help="GPUs requested, in %% of all GPUs, like 130,100"
    )
    parser.add_argument("--seeds", type=int, default=10, help="runs per policy")
    parser.add_argument(
        "--node-order",
        choices=["shuffled", "name"],
        default="shuffled",
        help="order that decides ties: random per seed, as in the paper's simulator, or by name",
    )
    parser.add_argument("--processes", type=int, default=len(sched_getaffinity(0)), help="parallel runs")


def listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part)


def percents(text: str) -> tuple[int, ...]:
    """Return the percentages in a text. Raises ValueError unless all parts are whole numbers from 1 to
    130."""
    parts = tuple(int(part) for part in listed(text))
    if not parts or not all(0 < part <= 130 for part in parts):
        raise ValueError(f"arrivals are whole percents from 1 to 130, not {text!r}")
    return parts


def measure(options: Namespace) -> Iterator[Figure]:
    unknown = sorted(set(options.policies) - set(POLICIES))
    if unknown:
        raise SystemExit(f"unknown policy: {', '.join(unknown)}; policies: {', '.join(POLICIES)}")
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
    """Return requested GPUs -> allocated GPUs of a run, both in % of all GPUs."""
    data, trace, name, seed, shuffled, at = run
    jobs, machines = jobs_of(data, trace), read_machines(data)
    chance = random.Random(seed)
    order = arrivals(jobs, total_milli(machines), chance)
    nodes = shuffled_nodes(machines, chance) if shuffled else machines
    return Replay(nodes, policy(name, jobs, machines, chance)).allocated(order, at)


@cache
def jobs_of(data: Path, trace: str) -> Sequence[Job]:
    if trace.startswith(SYNTHETIC):
        return synthesise(trace.removeprefix(SYNTHETIC), read_jobs(data, "default"))
    return read_jobs(data, trace)


def figures(trace: str, arrival: int, by_policy: dict[str, list[float]], *, main: bool) -> Iterator[Figure]:
    """Yield the figures. Those of the first arrival have plain names; those of others end in `.atN`."""
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
    """Print the results and the published values as a table on stderr."""
    report(f"\n{trace}, {arrival} % requested   allocated %     sd   published")
    for name, values in by_policy.items():
        baseline = published(trace, name, arrival)
        beside = "-" if baseline is None else f"{baseline:.2f}" + (" (FGD)" if name == "gpubroker" else "")
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        report(f"  {name:<24} {statistics.fmean(values):>11.2f}  {spread:5.2f}   {beside}")
