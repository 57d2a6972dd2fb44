"""The least time that any policy can spend on loading when models differ in load time.

With different load times, Belady's choice is not optimal. The optimum is a minimum-cost flow: keeping a model
from one use to the next takes a slot for all requests in between and saves one load. Each slot, except the
one of the request being served, is a path through the trace along such stays; together the paths save as much
as possible. The flow is solved by successive shortest paths with Johnson's potentials, one slot at a time.
"""

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from math import inf

Stay = tuple[int, int, float]
"""(first request during which the model takes a slot, first request after that, seconds saved)"""


def least_seconds(models: Sequence[str], seconds: Mapping[str, float], slots: int) -> float:
    """Return the least seconds of loading for requests for these models in this order."""
    order = [model for at, model in enumerate(models) if at == 0 or models[at - 1] != model]
    stays = stays_of(order, seconds)
    return sum(seconds[model] for model in order) - most_saved(len(order), stays, slots - 1)


def stays_of(order: Sequence[str], seconds: Mapping[str, float]) -> list[Stay]:
    """Return the stays from each use of a model to its next one. `order` never names a model twice in a
    row."""
    last: dict[str, int] = {}
    stays = []
    for place, model in enumerate(order):
        if model in last:
            stays.append((last[model] + 1, place, seconds[model]))
        last[model] = place
    return stays


def most_saved(places: int, stays: Sequence[Stay], slots: int) -> float:
    """Return the most seconds of loading that `slots` slots save."""
    starting: list[list[int]] = [[] for _ in range(places + 1)]
    ending: list[list[int]] = [[] for _ in range(places + 1)]
    for number, (start, end, _) in enumerate(stays):
        starting[start].append(number)
        ending[end].append(number)
    potential = [0.0] * (places + 1)
    for place in range(1, places + 1):
        before = [potential[stays[number][0]] - stays[number][2] for number in ending[place]]
        potential[place] = min(potential[place - 1], *before) if before else potential[place - 1]
    is_kept = [False] * len(stays)
    idle = [0] * places  # the empty slots at each request
    saved = 0.0
    for _ in range(slots):
        gain = _one_more(stays, starting, ending, potential, is_kept, idle)
        if gain <= 0:
            break
        saved += gain
    return saved


def _one_more(
    stays: Sequence[Stay],
    starting: Sequence[Sequence[int]],
    ending: Sequence[Sequence[int]],
    potential: list[float],
    kept: list[bool],
    idle: list[int],
) -> float:
    """Return the seconds that one more slot saves. `potential`, `kept` and `idle` are changed in place."""
    places = len(idle)
    distance = [inf] * (places + 1)
    steps: list[tuple[int, int]] = [(0, -1)] * (places + 1)  # (previous place, stay used; -1: none)
    distance[0] = 0.0
    heap = [(0.0, 0)]
    while heap:
        far, place = heappop(heap)
        if far > distance[place]:
            continue
        ways = [(place + 1, -1, 0.0)] if place < places else []
        if place > 0 and idle[place - 1]:
            ways.append((place - 1, -1, 0.0))
        ways += [(stays[n][1], n, -stays[n][2]) for n in starting[place] if not kept[n]]
        ways += [(stays[n][0], n, stays[n][2]) for n in ending[place] if kept[n]]
        for target, number, cost in ways:
            further = far + max(0.0, cost + potential[place] - potential[target])
            if further < distance[target]:
                distance[target] = further
                steps[target] = place, number
                heappush(heap, (further, target))
    for place in range(places + 1):
        potential[place] += distance[place]
    place = places
    while place > 0:
        before, number = steps[place]
        if number >= 0:
            kept[number] = not kept[number]
        elif before < place:
            idle[before] += 1
        else:
            idle[place] -= 1
        place = before
    return potential[0] - potential[places]
