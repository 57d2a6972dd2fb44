"""Search for places for all ranks of a gang at once, over nodes and devices."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush

from gpubroker_server.core.domain.demand import Demand, node_preference_rank
from gpubroker_server.core.domain.ranks import rank_task
from gpubroker_server.core.domain.task import Placement, Task
from gpubroker_server.core.domain.units import NodeName
from gpubroker_server.core.planning.gangs.gang_nodes import Chosen, GangNode, copy_node

MAX_STEPS = 4_000
"""The number of choices of devices that a search tries before it gives up. The gang then waits, though there
may be room: an exact answer is bin packing, whose time is not bounded."""

Gang = tuple[Placement, ...]
"""One place for each rank, in rank order."""


def place_gang(task: Task, gang_nodes: Sequence[GangNode], most: int | None = None) -> Gang | None:
    """Return a place for every rank, by the gang's strategy; for an elastic gang, places for as many ranks as
    fit, from `min_ranks` up to `most`. Return None if there is no room, or if none was found in MAX_STEPS
    tries. The answer is deterministic, and the nodes are not changed."""
    demand = task.demand
    count = len(demand.bundles) if most is None else most
    places = place_ranks(task, count, gang_nodes)
    least = demand.least_ranks
    if places is not None or least == count:
        return places
    places, too_many = place_ranks(task, least, gang_nodes), count
    while places is not None and too_many - len(places) > 1:
        middle = (len(places) + too_many) // 2
        more = place_ranks(task, middle, gang_nodes)
        places, too_many = (places, middle) if more is None else (more, too_many)
    return places


def place_ranks(task: Task, count: int, gang_nodes: Sequence[GangNode]) -> Gang | None:
    """Return places for the first `count` ranks; None if no search finds them."""
    results = (search.places() for search in _searches(task, count, gang_nodes))
    return next((places for places in results if places is not None), None)


def may_fit(task: Task, count: int, gang_nodes: Sequence[GangNode]) -> bool:
    """Return True if the first `count` ranks fit, or if the search gave up."""
    searches = _searches(task, count, gang_nodes)
    return any(search.places() is not None or search.gave_up for search in searches)


def _searches(task: Task, count: int, gang_nodes: Sequence[GangNode]) -> Iterator["_Search"]:
    """Yield one search over all nodes; with `strict_pack`, one search for each node, the fullest node
    first."""
    if task.demand.strategy != "strict_pack":
        yield _Search(task, count, [copy_node(gang_node) for gang_node in gang_nodes])
        return
    sorts = {part.demand: part for part in (rank_task(task, rank) for rank in range(count))}
    for gang_node in sorted(gang_nodes, key=lambda gang_node: _tightness(gang_node, sorts.values())):
        yield _Search(task, count, [copy_node(gang_node)])


def _tightness(gang_node: GangNode, sorts: Collection[Task]) -> tuple[int, int, float, float, NodeName]:
    """Return the key that orders nodes for a gang on one node: preferred labels come first, then the least
    stranded memory, then the fullest node."""
    unwanted = max(node_preference_rank(part.demand, gang_node.node) for part in sorts)
    return unwanted, -sum(map(gang_node.score, sorts)), *gang_node.room_left, gang_node.node.name


class _Search:
    """A depth-first search that places the hardest ranks first, and skips nodes equivalent to one that
    failed."""

    def __init__(self, task: Task, count: int, gang_nodes: list[GangNode]) -> None:
        self._strategy = task.demand.strategy
        self._gang_nodes = gang_nodes
        parts = [rank_task(task, rank) for rank in range(count)]
        self._parts = parts
        self._order = sorted(range(count), key=lambda rank: (*_hardness(parts[rank].demand), rank))
        self._steps = 0
        self._places: dict[int, Placement] = {}
        self._most = self._count_most()

    def places(self) -> Gang | None:
        gang = (self._filled() or self._searched()) if self._may_fit() else None
        return gang and self._side_by_side(gang)

    def _side_by_side(self, gang: Gang) -> Gang:
        """Return the same places with equal ranks of a node ordered by device. An elastic gang gives back its
        last ranks first, and this order then frees whole devices."""
        interchangeable: dict[tuple[Demand, NodeName], list[int]] = {}
        for rank, place in enumerate(gang):
            interchangeable.setdefault((self._parts[rank].demand, place.node), []).append(rank)
        places = list(gang)
        for ranks in interchangeable.values():
            first: dict[object, int] = {}
            for rank in ranks:
                first.setdefault(gang[rank].devices, rank)
            together = sorted((gang[rank] for rank in ranks), key=lambda place: first[place.devices])
            for rank, place in zip(ranks, together, strict=True):
                places[rank] = place
        return tuple(places)

    def _filled(self) -> Gang | None:
        """Place the ranks without a search, if all are equal."""
        first = self._parts[0]
        if any(part.demand != first.demand for part in self._parts):
            return None
        most = {node: counts[first.demand] for node, counts in self._most.items()}
        filled = fill(self._strategy, first, len(self._parts), self._gang_nodes, most)
        return None if filled is None else tuple(filled)

    def _searched(self) -> Gang | None:
        is_placed = self._search(0)
        return tuple(self._places[rank] for rank in range(len(self._parts))) if is_placed else None

    @property
    def gave_up(self) -> bool:
        return self._steps > MAX_STEPS

    def _may_fit(self) -> bool:
        """Return True if the ranks of each demand would fit alone, which is a necessary condition."""
        wanted: dict[Demand, int] = {}
        for part in self._parts:
            wanted[part.demand] = wanted.get(part.demand, 0) + 1
        if self._strategy == "strict_spread":
            enough = {demand: sum(most[demand] > 0 for most in self._most.values()) for demand in wanted}
        else:
            enough = {demand: sum(most[demand] for most in self._most.values()) for demand in wanted}
        return all(enough[demand] >= count for demand, count in wanted.items())

    def _count_most(self) -> dict[NodeName, dict[Demand, int]]:
        """Return, by node and demand, how many ranks would fit on the node alone."""
        samples = {part.demand: part for part in self._parts}
        by_signature: dict[object, dict[Demand, int]] = {}
        counts = {}
        for gang_node in self._gang_nodes:
            signature = gang_node.signature()
            if signature not in by_signature:
                # Scores are left out: they order the choices, but do not change their number.
                by_room = replace(gang_node, worth=None)
                by_signature[signature] = {
                    demand: _count(by_room, part, len(self._parts)) for demand, part in samples.items()
                }
            counts[gang_node.node.name] = by_signature[signature]
        return counts

    def _search(self, depth: int) -> bool:
        if depth == len(self._order):
            return True
        rank = self._order[depth]
        part = self._parts[rank]
        failed = set()
        for gang_node in self._in_order(part, len(self._order) - depth):
            signature = gang_node.signature()
            if signature in failed:
                continue
            failed.add(signature)
            for chosen in gang_node.device_choices(part):
                self._steps += 1
                if self.gave_up:
                    return False
                gang_node.add(rank, part, chosen)
                self._places[rank] = Placement(gang_node.node.name, chosen)
                if self._search(depth + 1):
                    return True
                gang_node.remove(part, chosen)
        return False

    def _in_order(self, part: Task, left: int) -> list[GangNode]:
        """Return the nodes for a rank, the best first, by preferred labels, strategy, least stranded memory
        and name."""
        demand = part.demand
        keys: dict[str, Callable[[GangNode], tuple[float, ...]]] = {
            "pack": lambda gang_node: self._packed(gang_node, part, left),
            "strict_pack": lambda gang_node: self._packed(gang_node, part, left),
            "spread": lambda gang_node: (len(gang_node.ranks), *self._apart(gang_node, part)),
            "strict_spread": lambda gang_node: self._apart(gang_node, part),
        }
        key = keys[self._strategy]
        usable = (g for g in self._gang_nodes if not (self._strategy == "strict_spread" and g.ranks))
        return sorted(usable, key=lambda g: (node_preference_rank(demand, g.node), *key(g), g.node.name))

    def _packed(self, gang_node: GangNode, part: Task, left: int) -> tuple[float, ...]:
        """Return the key that orders nodes by these rules:

        1. nodes that have ranks of the gang
        2. nodes that can take the most of the remaining ranks
        3. the least stranded memory
        4. the fullest node
        """
        most = self._most[gang_node.node.name][part.demand]
        return (not gang_node.ranks, -min(most, left), -gang_node.score(part), *gang_node.room_left)

    def _apart(self, gang_node: GangNode, part: Task) -> tuple[float, ...]:
        """Return the key that orders nodes by the least stranded memory, then by room for the most ranks."""
        return -gang_node.score(part), -self._most[gang_node.node.name][part.demand]


def _hardness(demand: Demand) -> tuple[float, ...]:
    """Return a key by which the ranks that are hardest to place come first."""
    # The MiB of a fraction depend on the device; the factor 1e9 puts fractions before any size in MiB.
    size = float("inf") if demand.takes_whole_devices else (demand.gpu_mb or (demand.gpu_fraction or 0) * 1e9)
    return (-demand.gpus, -size, -demand.cpu, -demand.memory_mb)


def _count(gang_node: GangNode, part: Task, most: int) -> int:
    """Return how many such ranks fit on the node; a lower bound for ranks with several devices."""
    put: list[Chosen] = []
    while len(put) < most and (chosen := next(gang_node.device_choices(part), None)) is not None:
        gang_node.add(len(put), part, chosen)
        put.append(chosen)
    for chosen in reversed(put):
        gang_node.remove(part, chosen)
    return len(put)


Counts = Mapping[NodeName, int]
"""Maps a node to the number of ranks that would fit there alone."""


def fill(
    strategy: str, part: Task, count: int, gang_nodes: Sequence[GangNode], most: Counts
) -> list[Placement] | None:
    """Return places for `count` equal ranks, without backtracking: a node takes as many ranks as `most` says,
    whatever other nodes take. If a count turns out too high, return None and leave the nodes unchanged."""
    put: list[tuple[GangNode, Chosen]] = []
    for gang_node in _turns(strategy, part, count, gang_nodes, most):
        chosen = next(gang_node.device_choices(part), None)
        if chosen is None:
            break
        gang_node.add(len(put), part, chosen)
        put.append((gang_node, chosen))
    if len(put) == count:
        return [Placement(gang_node.node.name, chosen) for gang_node, chosen in put]
    for gang_node, chosen in reversed(put):
        gang_node.remove(part, chosen)
    return None


def _turns(
    strategy: str, part: Task, count: int, gang_nodes: Sequence[GangNode], most: Counts
) -> Iterator[GangNode]:
    """Yield the node of each rank, in rank order; nodes with preferred labels come first."""
    able = [gang_node for gang_node in gang_nodes if most[gang_node.node.name]]
    preferences = {
        gang_node.node.name: node_preference_rank(part.demand, gang_node.node) for gang_node in able
    }
    match strategy:
        case "spread":
            yield from _one_each_in_turn(part, count, able, preferences, most)
        case "strict_spread":
            able.sort(
                key=lambda g: (preferences[g.node.name], -g.score(part), -most[g.node.name], g.node.name)
            )
            yield from able[:count]
        case _:
            yield from _one_after_the_other(part, count, able, preferences, most)


def _one_each_in_turn(
    part: Task, count: int, gang_nodes: Sequence[GangNode], preferences: Counts, most: Counts
) -> Iterator[GangNode]:
    """Yield the node of each rank: always the node with the fewest ranks, then with the least stranded
    memory, then with room for the most ranks."""
    by_name = {gang_node.node.name: gang_node for gang_node in gang_nodes}
    turns = [
        (preferences[name], 0, -gang_node.score(part), -most[name], name)
        for name, gang_node in by_name.items()
    ]
    heapify(turns)
    for _ in range(count):
        if not turns:
            return
        preference, taken, _, room, name = heappop(turns)
        yield by_name[name]
        if taken + 1 < -room:
            heappush(turns, (preference, taken + 1, -by_name[name].score(part), room, name))


def _one_after_the_other(
    part: Task, count: int, gang_nodes: Sequence[GangNode], preferences: Counts, most: Counts
) -> Iterator[GangNode]:
    """Fill the largest nodes one by one. Once a node can take all remaining ranks, they go to the node with
    the least stranded memory, then to the fullest, among the nodes that can."""
    order = [
        (preferences[g.node.name], -most[g.node.name], -g.score(part), g.room_left, g.node.name, g)
        for g in gang_nodes
    ]
    order.sort(key=lambda place: place[:5])
    left = count
    for index, (preference, room, *_, gang_node) in enumerate(order):
        if left <= -room:
            enough = (place for place in order[index:] if place[0] == preference and left <= -place[1])
            *_, gang_node = min(enough, key=lambda place: place[2:5])
            yield from [gang_node] * left
            return
        left += room
        yield from [gang_node] * -room
