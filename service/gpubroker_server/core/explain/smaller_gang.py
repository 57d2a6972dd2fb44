"""What a gang could ask for instead so that it has room now: fewer ranks, smaller ones, or other places."""

from dataclasses import replace
from math import ceil

from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.units import in_gib
from gpubroker_server.core.explain.remedy_trial import LEAST_SHARE, Remedy, Trials, first
from gpubroker_server.core.explain.smaller_demand import asked_mb, with_memory

STEPS = 64
"""Smaller ranks are tried in so many steps of the size that is asked for."""

LOOSER = {"strict_pack": "pack", "strict_spread": "spread"}


def fewer_ranks(trials: Trials) -> Remedy | None:
    """The most of its first ranks that could start together."""
    demand = trials.task.demand
    fewer = range(demand.least_ranks - 1, ceil(LEAST_SHARE * demand.least_ranks) - 1, -1)
    ranks = first(fewer, lambda ranks: trials.has_place(replace(demand, min_ranks=ranks)))
    if ranks is None:
        return None
    said = f"with min_ranks at most {ranks}"
    return trials.placed({"min_ranks": ranks}, replace(demand, min_ranks=ranks), said)


def smaller_ranks(trials: Trials) -> Remedy | None:
    """The most GPU memory that each rank could ask for, of those that ask for more."""
    demand = trials.task.demand
    asked = max(asked_mb(trials, part) for part in demand.bundles)
    steps = sorted({asked * step // STEPS for step in range(ceil(LEAST_SHARE * STEPS), STEPS)}, reverse=True)
    most = first(steps, lambda mb: mb > 0 and trials.has_place(_capped(trials, mb)))
    if most is None:
        return None
    change = {"bundles": {"gpu_mb": most}}
    said = f"with gpu_mb at most {most} ({in_gib(most)}) in each rank"
    return trials.placed(change, _capped(trials, most), said)


def _capped(trials: Trials, most: int) -> Demand:
    demand = trials.task.demand
    bundles = tuple(
        with_memory(part, most)[1] if part.gpus and asked_mb(trials, part) > most else part
        for part in demand.bundles
    )
    return replace(demand, bundles=bundles)


def looser(trials: Trials) -> Remedy | None:
    """The strategy that asks for the same where that is possible, and no more."""
    demand = trials.task.demand
    strategy = LOOSER.get(demand.strategy)
    if strategy is None:
        return None
    return trials.placed(
        {"strategy": strategy}, replace(demand, strategy=strategy), f"with strategy {strategy}"
    )
