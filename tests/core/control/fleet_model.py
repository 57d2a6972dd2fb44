"""A fleet of GPUs whose higher bands come and go, and whose background work follows a controller."""

import random
from collections.abc import Callable
from heapq import heappop, heappush

from gpubroker_server.core.control.controller import Control, Gains, step, switch_on
from gpubroker_server.core.domain.units import Seconds
from msgspec import Struct

STEP_SECONDS = Seconds(2.0)

Load = Callable[[float], float]
"""Second -> the share of the fleet that higher bands use."""


class Course(Struct, frozen=True):
    """What higher bands do, and from when on the controller is judged."""

    higher: Load
    since: float
    noise: float = 0.0
    """Standard deviation of one measurement."""


LOADS = {
    "none": Course(lambda _: 0.0, 0.0),
    "falling": Course(lambda at: 0.7 if at < 3600 else 0.2, 3600.0),
    "rising": Course(lambda at: 0.1 if at < 3600 else 0.5, 3600.0),
    "ramp": Course(lambda at: 0.1 + 0.4 * min(1.0, max(0.0, (at - 1800) / 3600)), 900.0),
    "noisy": Course(lambda _: 0.3, 900.0, 0.1),
}


class Moment(Struct, frozen=True):
    at: float
    utilization: float
    share: float


def simulate(
    load: Load,
    *,
    gains: Gains,
    hours: float,
    gpus: int = 64,
    set_point: float = 0.7,
    noise: float = 0.0,
    run_seconds: float = 300.0,
    seed: int = 1,
) -> list[Moment]:
    """Background tasks use a GPU each and end by themselves; there are always more of them. Higher bands take
    the room of those that began last. `noise`: standard deviation of one measurement."""
    chance = random.Random(seed)
    ends: list[float] = []
    control: Control | None = None
    moments = []
    for number in range(int(hours * 3600 / STEP_SECONDS)):
        now = number * STEP_SECONDS
        while ends and ends[0] <= now:
            heappop(ends)
        higher = round(load(now) * gpus)
        ends = sorted(ends)[: max(0, gpus - higher)]
        utilization = (higher + len(ends)) / gpus
        measured = min(1.0, max(0.0, chance.gauss(utilization, noise)))
        if control is None:
            control = switch_on(0.0, measured, set_point, gains)
        else:
            control = step(control, measured, set_point, STEP_SECONDS, gains)
        while len(ends) < int(control.share * gpus) and higher + len(ends) < gpus:
            heappush(ends, now + chance.expovariate(1.0 / run_seconds))
        moments.append(Moment(now, utilization, control.share))
    return moments


def settled_after(moments: list[Moment], since: float, least: float = 0.6, most: float = 0.8) -> float:
    """Seconds from `since` until the utilisation is inside for good."""
    late = [moment for moment in moments if moment.at >= since]
    outside = [moment.at for moment in late if not least <= moment.utilization <= most]
    return max(outside, default=since - STEP_SECONDS) + STEP_SECONDS - since


def overshoot(moments: list[Moment], since: float, most: float = 0.8) -> float:
    """How far the utilisation was above the target at most."""
    return max(0.0, max(moment.utilization for moment in moments if moment.at >= since) - most)


def swings(moments: list[Moment], since: float, size: float = 0.05) -> int:
    """How often the share turned round after it had moved by `size` or more."""
    shares = [moment.share for moment in moments if moment.at >= since]
    turns, extreme, direction = 0, shares[0], 0
    for share in shares:
        if direction >= 0 and extreme - share >= size:
            turns, direction, extreme = turns + (direction > 0), -1, share
        elif direction <= 0 and share - extreme >= size:
            turns, direction, extreme = turns + (direction < 0), 1, share
        elif (share - extreme) * direction > 0 or direction == 0:
            extreme = share if direction else extreme
    return turns
