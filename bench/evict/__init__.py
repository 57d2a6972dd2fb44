"""Requests of a published trace whose model had to be loaded first, by eviction policy.

Each model takes one slot. `gpubroker` is the service's planner: what `plan_cycle` evicts for one more
model when all models there are idle and past their minimum residency. Beside it stand FIFO, LRU, LFU,
LFU with a half-life, and Belady's optimum, which knows the future. `.hours` is the time spent on loading
when each model has its own load time; there `clairvoyant` is the least that any policy could reach.
`.second_half` counts the later half of the requests: the service's constants were chosen on the earlier.

Data: https://github.com/alibaba/clusterdata/tree/master/cluster-trace-v2026-GenAI
"""

import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench.evict.optimum import least_seconds
from bench.evict.policies import BEST, LEAST_RECENT, OURS, POLICIES, misses, policy
from bench.evict.trace import Use, read_loads, read_uses, spread
from bench.measuring import Figure, report

Missed = dict[str, list[int]]
"""Policy -> the numbers of the requests that had to wait."""


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, help="folder with the two files of the trace")
    parser.add_argument("--slots", type=sizes, default="2,4,8,16", help="how many models fit")


def sizes(text: str) -> tuple[int, ...]:
    """Return the numbers in a text. Raises ValueError for anything but whole numbers from 1 on."""
    parts = tuple(int(part) for part in text.split(","))
    if min(parts) < 1:
        raise ValueError(f"slots are whole numbers from 1 on, not {text!r}")
    return parts


def measure(options: Namespace) -> Iterator[Figure]:
    uses = read_uses(options.data)
    loads = read_loads(options.data)
    own = spread({use.model for use in uses}, loads)
    means = dict.fromkeys(own, statistics.fmean(loads))
    report(
        f"{len(uses):,} requests for {len(own)} models; a load takes {means[uses[0].model]:.1f} s on average"
    )
    for slots in options.slots:
        equal = {name: misses(uses, slots, policy(name, uses, means)) for name in POLICIES}
        different = {name: misses(uses, slots, policy(name, uses, own)) for name in POLICIES}
        hours = {name: seconds_of(uses, missed, own) / 3600 for name, missed in different.items()}
        hours[BEST] = least_seconds([use.model for use in uses], own, slots) / 3600
        show(slots, uses, equal, means[uses[0].model], hours)
        yield from figures(slots, uses, equal, hours)


def seconds_of(uses: Sequence[Use], missed: Sequence[int], seconds: Mapping[str, float]) -> float:
    return sum(seconds[uses[number].model] for number in missed)


def figures(slots: int, uses: Sequence[Use], missed: Missed, hours: Mapping[str, float]) -> Iterator[Figure]:
    half = len(uses) // 2
    late = {name: [number for number in numbers if number >= half] for name, numbers in missed.items()}
    for end, part, n in (("", missed, len(uses)), (".second_half", late, len(uses) - half)):
        shares = {name: 100 * len(numbers) / n for name, numbers in part.items()}
        for name in POLICIES:
            yield figure(f"{slots}.{name}{end}", shares[name], "% of requests", n, shares[LEAST_RECENT])
        yield figure(f"{slots}.way{end}", way(shares), "of the way from LRU to clairvoyant", n)
    for name in POLICIES:
        yield figure(f"{slots}.{name}.hours", hours[name], "h of loading", len(uses), hours[LEAST_RECENT])


def figure(name: str, value: float, unit: str, n: int, baseline: float | None = None) -> Figure:
    """Return a figure, with the value of LRU as its baseline."""
    ratio = value / baseline if baseline else None
    return Figure("evict", f"evict.{name}", value, unit, n, baseline=baseline, ratio=ratio)


def way(values: Mapping[str, float]) -> float:
    """Return how far the service gets from LRU (0) to clairvoyant (1)."""
    least, most = values[BEST], values[LEAST_RECENT]
    return (most - values[OURS]) / (most - least) if most > least else 0.0


def show(slots: int, uses: Sequence[Use], missed: Missed, seconds: float, hours: Mapping[str, float]) -> None:
    """Print the results as a table on stderr."""
    half = len(uses) // 2
    report(f"\n{slots} slots         missed %  second half %  hours, equal loads  hours, own loads")
    for name, numbers in missed.items():
        late = sum(number >= half for number in numbers)
        share, late_share = 100 * len(numbers) / len(uses), 100 * late / (len(uses) - half)
        equal = len(numbers) * seconds / 3600
        report(f"  {name:<14}{share:>10.2f}{late_share:>15.2f}{equal:>20.1f}{hours[name]:>18.1f}")
    counts = {name: float(len(numbers)) for name, numbers in missed.items()}
    report(
        f"  gpubroker gets {way(counts):.0%} of the way from LRU to clairvoyant, {way(hours):.0%} by hours"
    )
