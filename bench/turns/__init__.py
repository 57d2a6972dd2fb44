"""Requests to models that fit on a GPU only one at a time: answers per second and waits, by rule.

Simulated time, so that it is quick and repeatable. `gpubroker` is the service's own core: whose turn it is,
what the planner loads and evicts. Beside it stand `in_order`, llama-swap's rule (requests are answered in the
order in which they came, every change of model is a swap), and `while_wanted`: a model stays until it has not
been asked for five minutes. Requests come independently of each other (`random`) or in bursts of about 20 for
one model (`bursty`). `.longest_lane_s` is the longest time from the first request of a model that was not in
memory until it was.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator

from bench.measuring import Figure, percentile, report
from bench.turns.arrivals import ARRIVALS, asks_of
from bench.turns.replay import Costs, Outcome, Replay
from bench.turns.rules import RULES

BASELINE = "in_order"


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--models", type=counts, default="2,5", help="how many models")
    parser.add_argument("--per-second", type=float, default=1.0, help="requests, for all models together")
    parser.add_argument("--minutes", type=float, default=60.0, help="for how long requests come")
    parser.add_argument("--load-seconds", type=float, default=5.0, help="of each model")
    parser.add_argument(
        "--unload-seconds", type=float, default=1.2, help="of each model, after its last answer"
    )
    parser.add_argument("--answer-seconds", type=float, default=0.2, help="of each request")
    parser.add_argument("--slots", type=int, default=4, help="requests that a model answers at once")
    parser.add_argument("--seed", type=int, default=1, help="of the requests")


def counts(text: str) -> tuple[int, ...]:
    """Return the numbers in a text. Raises ValueError for anything but whole numbers from 2 on."""
    parts = tuple(int(part) for part in text.split(","))
    if min(parts) < 2:
        raise ValueError(f"models are whole numbers from 2 on, not {text!r}")
    return parts


def measure(options: Namespace) -> Iterator[Figure]:
    costs = Costs(options.load_seconds, options.unload_seconds, options.answer_seconds, options.slots)
    for count in options.models:
        models = [f"M{number}" for number in range(count)]
        for arrivals in ARRIVALS:
            asks = asks_of(arrivals, models, options.per_second, 60 * options.minutes, options.seed)
            found = {name: Replay(asks, costs, rule()).run() for name, rule in RULES.items()}
            show(f"{count} models, {arrivals}, {len(asks):,} requests", found)
            for name, outcome in found.items():
                yield from figures(f"turns.{count}.{arrivals}.{name}", outcome, found[BASELINE])


def values_of(outcome: Outcome) -> dict[str, tuple[float, str]]:
    """Return metric -> (value, unit)."""
    return {
        "per_s": (outcome.per_second, "answers/s"),
        "p50_s": (percentile(outcome.waits, 50), "s"),
        "p99_s": (percentile(outcome.waits, 99), "s"),
        "longest_lane_s": (max(outcome.lane_waits), "s"),
        "loads": (float(outcome.swaps), "loads"),
    }


def figures(prefix: str, outcome: Outcome, baseline: Outcome) -> Iterator[Figure]:
    """Yield the figures, with those of llama-swap's rule as the baseline."""
    against = values_of(baseline)
    for name, (value, unit) in values_of(outcome).items():
        base = against[name][0]
        ratio = value / base if base else None
        yield Figure("turns", f"{prefix}.{name}", value, unit, len(outcome.waits), baseline=base, ratio=ratio)


def show(title: str, found: dict[str, Outcome]) -> None:
    """Print the results as a table on stderr."""
    report(
        f"\n{title}\n  {'':<14}{'answers/s':>11}{'p50 wait s':>12}{'p99 wait s':>12}{'lane s':>9}{'loads':>8}"
    )
    for name, outcome in found.items():
        per_s, p50, p99, lane, loads = (value for value, _ in values_of(outcome).values())
        report(f"  {name:<14}{per_s:>11.2f}{p50:>12.1f}{p99:>12.1f}{lane:>9.1f}{loads:>8,.0f}")
