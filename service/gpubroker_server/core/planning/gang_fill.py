"""Places for ranks that are all alike: nodes are filled in one pass, and nothing need be tried twice."""

from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush

from gpubroker_server.core.domain.demand import unwanted_node
from gpubroker_server.core.domain.task import Placement, Task
from gpubroker_server.core.domain.units import NodeName
from gpubroker_server.core.planning.gang_nodes import Chosen, Ground

Counts = Mapping[NodeName, int]
"""How many of the ranks each node could have if it had no others."""


def fill(
    strategy: str, part: Task, count: int, grounds: Sequence[Ground], most: Counts
) -> list[Placement] | None:
    """A place for each of `count` ranks: where the search would put them, if it never had to turn back.

    As no rank is in the way of another sort of rank, it never has to: a node takes as many as were counted
    there, whatever lies elsewhere. None, and nothing of the grounds is changed, if it does not after all.
    """
    put: list[tuple[Ground, Chosen]] = []
    for ground in _turns(strategy, part, count, grounds, most):
        chosen = next(ground.choices(part), None)
        if chosen is None:
            break
        ground.put(len(put), part, chosen)
        put.append((ground, chosen))
    if len(put) == count:
        return [Placement(ground.node.name, chosen) for ground, chosen in put]
    for ground, chosen in reversed(put):
        ground.take(part, chosen)
    return None


def _turns(
    strategy: str, part: Task, count: int, grounds: Sequence[Ground], most: Counts
) -> Iterator[Ground]:
    """The node of each rank, in order of rank, as far as there are any; preferred labels come first."""
    able = [ground for ground in grounds if most[ground.node.name]]
    wishes = {ground.node.name: unwanted_node(part.demand, ground.node) for ground in able}
    match strategy:
        case "spread":
            yield from _one_each_in_turn(part, count, able, wishes, most)
        case "strict_spread":
            able.sort(key=lambda g: (wishes[g.node.name], -g.score(part), -most[g.node.name], g.node.name))
            yield from able[:count]
        case _:
            yield from _one_after_the_other(part, count, able, wishes, most)


def _one_each_in_turn(
    part: Task, count: int, grounds: Sequence[Ground], wishes: Counts, most: Counts
) -> Iterator[Ground]:
    """Always the node with the fewest ranks; of these where a rank strands the least, then the largest."""
    known = {ground.node.name: ground for ground in grounds}
    turns = [(wishes[name], 0, -ground.score(part), -most[name], name) for name, ground in known.items()]
    heapify(turns)
    for _ in range(count):
        if not turns:
            return
        wish, has, _, room, name = heappop(turns)
        yield known[name]
        if has + 1 < -room:
            heappush(turns, (wish, has + 1, -known[name].score(part), room, name))


def _one_after_the_other(
    part: Task, count: int, grounds: Sequence[Ground], wishes: Counts, most: Counts
) -> Iterator[Ground]:
    """The largest nodes, each until it is full; for the rest, of those that take all of it, the one where a
    rank strands the least, then the fullest."""
    order = [
        (wishes[g.node.name], -most[g.node.name], -g.score(part), g.room_left, g.node.name, g)
        for g in grounds
    ]
    order.sort(key=lambda place: place[:5])
    left = count
    for at, (wish, room, *_, ground) in enumerate(order):
        if left <= -room:
            enough = (place for place in order[at:] if place[0] == wish and left <= -place[1])
            *_, ground = min(enough, key=lambda place: place[2:5])
            yield from [ground] * left
            return
        left += room
        yield from [ground] * -room
