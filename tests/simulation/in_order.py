"""python -m tests.simulation.in_order: what is decided on a short day, and in short slices of plans."""

import random
from argparse import Namespace
from collections.abc import Iterator

from gpubroker_server.core.planning.cycle import plan_cycle

from bench.plan import Leader, a_cluster
from tests.simulation.day import replay

LOOKS = 3
"""So short a slice ends elsewhere if a single look more is taken."""


def main() -> None:
    report = replay(5, hours=0.25)
    print(f"{sum(report.counts.values())} events of a day, digest {report.digest}")
    shape = Namespace(nodes=24, tasks=2000, demands=150)
    for line in slices(Leader(a_cluster(shape, random.Random(42)))):
        print(line)


def slices(leader: Leader) -> Iterator[str]:
    """All that is decided, where each slice ended, and what is foreseen."""
    chance = random.Random(42)
    for _ in range(60):
        yield from a_cycle(leader)
        leader.forecast()
        yield from map(repr, leader.forecast_rounds.forecasts)
        leader.pass_time(0.1)
        leader.release_one(chance)


def a_cycle(leader: Leader) -> Iterator[str]:
    begun, cursor = [], None
    while True:
        forecasts = leader.forecast_rounds.forecasts
        plan = plan_cycle(leader.world, leader.policy, leader.now, cursor, LOOKS, leader.cache, forecasts)
        leader.commit(plan.decisions)
        for decision in plan.decisions:
            yield repr(decision)
            if decision.why == "admit":
                begun.append(decision.tasks[0].task.id)
            else:
                leader.preempted += ((leader.now, write.task.id) for write in decision.tasks)
        cursor = plan.cursor
        if cursor is None:
            break
        yield f"slice until {cursor.after}"
    leader.start(begun)


if __name__ == "__main__":
    main()
