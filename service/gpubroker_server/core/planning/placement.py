"""Where a task can run now: one node, and on it as many devices as it asks for."""

from collections.abc import Callable, Iterator
from heapq import nsmallest
from math import inf

from gpubroker_server.core.domain.demand import need_mb, unwanted_device, unwanted_node
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Placement, Task
from gpubroker_server.core.domain.units import DeviceKey, Instant, Mib, NodeName, TaskId
from gpubroker_server.core.planning.backfill import Guards
from gpubroker_server.core.planning.draft import Draft
from gpubroker_server.core.planning.gang_nodes import grounds_of
from gpubroker_server.core.planning.gang_placement import Gang, place_gang
from gpubroker_server.core.planning.looks import Looks, Paused
from gpubroker_server.core.planning.memory import Found, Likes, Memory, Standing
from gpubroker_server.core.planning.node_room import Outlooks, Room
from gpubroker_server.core.planning.quota import Quotas
from gpubroker_server.core.world.placement_scores import Row, Worth, rows
from gpubroker_server.core.world.world import World

Option = tuple[float, DeviceKey, Mib]
"""(MiB left on the device afterwards, negated for `spread`; the device; MiB to lease)"""

CLOSE_LOOK = 5
"""A look at a node's devices costs as much as so many at what the node has at most."""

Allows = Callable[[DeviceKey, Mib], bool]
"""Whether a task may have so much of a device."""

FAR_MB = 2**40
"""A place that is less wanted comes after all that are more so, as if more were left there than GPUs have."""


def worth_of(world: World, policy: Policy) -> Worth | None:
    """What places are worth now to what is usual; None if the policy does not ask, or nothing is known."""
    return world.mix.worth(world.books, world.inventory_version, policy.placement)


class Places:
    """The places of one draft. Only nodes on which something changed are looked at again for equal tasks.

    A memory must have been opened for the draft's World, and the draft must mark its changes there.
    """

    def __init__(
        self,
        draft: Draft,
        policy: Policy,
        now: Instant,
        memory: Memory | None = None,
        worth: Worth | None = None,
        looks: Looks | None = None,
        outlooks: Outlooks | None = None,
    ) -> None:
        """`worth` of places, as it was when the cycle began; None: by room left on the devices."""
        self._looks = Looks(inf) if looks is None else looks
        self._outlooks = Outlooks(draft, policy, now, now, {}) if outlooks is None else outlooks
        self._draft = draft
        self._policy = policy
        self._now = now
        self._memory = memory
        self._worth = worth
        self._nodes = frozenset(draft.usable_nodes())

    def best(self, task: Task) -> Placement | None:
        """The best place for a task. Total order, smallest first:

        1. unmet preferences: of kinds, device by device, and of nodes
        2. what it strands of what is usually asked for, in steps of one in a hundred; or, if the task or the
           policy says `spread` or `best_fit`, if the task names its devices, or nothing is usual yet: room
           left on its devices, then CPU left on the node (`spread`: most first)
        3. names of node and devices
        """
        if self._draft.short_of(task, self._policy.custom_limits):
            return None
        found = [place for node in self._nodes if (place := self.on(node, task)) is not None]
        return min(found)[1] if found else None

    def best_of(self, likes: Likes | TaskId, task: Task) -> Placement | Paused | None:
        """The same. Places are remembered for such tasks, and the search for them can be left."""
        assert self._memory is not None, "there is one to remember them"
        self._looks.taken += 1
        if self._draft.short_of(task, self._policy.custom_limits):
            return None
        standing = self._memory.standings.setdefault(likes, Standing())
        standing.left |= dict.fromkeys(self._memory.changes.since(standing.seen))
        standing.seen = self._memory.changes.revision
        while standing.left:
            node, _ = standing.left.popitem()
            place = self.on(node, task)
            if place is not None:
                standing.found[node] = place
            else:
                standing.found.pop(node, None)
            if standing.left and self._looks.call_for_a_pause:
                return Paused.HERE
        return min(standing.found.values())[1] if standing.found else None

    def kept(self, task: Task) -> Placement | None:
        """On the devices that are pledged to it, and on no others; None if it cannot start there now."""
        if self._draft.short_of(task, self._policy.custom_limits):
            return None
        mine = self._draft.pledges_of(task.id)
        node = self._draft.book(min(mine)).device.node
        found = self.on(node, task, lambda device, _mb: device in mine)
        return None if found is None else found[1]

    def best_beside(self, guards: Guards, task: Task, likes: Likes, *, everybody: bool) -> Placement | None:
        """The best place where the task delays nobody who stands ahead of it, or nobody at all."""
        assert self._memory is not None, "its places were just worked out"
        found = self._memory.standings[likes].found
        places = [place for node, place in found.items() if node not in guards.on]
        if not guards.is_tired:
            for node in guards.on.keys() & found.keys():
                place = self.on_beside(guards, node, task, everybody=everybody)
                if place is not None:
                    places.append(place)
        return min(places)[1] if places else None

    def on_beside(self, guards: Guards, node: NodeName, task: Task, *, everybody: bool) -> Found | None:
        """The same on one node."""
        leeway = guards.leeway(task, node, everybody=everybody)
        return self.on(node, task, leeway.allows) if leeway.fits((task,)) else None

    def gang(self, task: Task, guards: Guards | None = None) -> Gang | None:
        """Places for the ranks of a gang, all at once, and for no more than its quota leaves. `guards`: so
        that it delays nobody who stands ahead of it."""
        self._looks.taken += CLOSE_LOOK * len(self._nodes)
        if self._draft.short_of(task, self._policy.custom_limits):
            return None
        worth = self._worth
        before = 0 if worth is None else worth.worked_out
        grounds = grounds_of(self._draft, task, self._policy, self._now, worth)
        most = Quotas(self._draft, self._policy).most_ranks(task)
        found = place_gang(task, grounds if guards is None else list(guards.beside(task, grounds)), most)
        if worth is not None:
            self._looks.taken += CLOSE_LOOK * (worth.worked_out - before)
        return found

    def on(self, node: NodeName, task: Task, allows: Allows | None = None) -> Found | None:
        """The best place for a task on one node, of the devices that are allowed."""
        demand = task.demand
        self._looks.taken += 1
        if node not in self._nodes:
            return None
        room = self._left(node, task)
        if not room.may_fit(task):
            return None
        self._looks.taken += CLOSE_LOOK
        far = FAR_MB * unwanted_node(demand, self._draft.world.nodes[node])
        if self._worth is None or demand.placement == "spread" or demand.where.devices:
            return self._by_room(node, task, room.beside.cpu, far, allows)
        there = _allowed(room, task, allows) if allows else self._rows(node, task.priority, room)
        return self._by_worth(node, task, far, self._worth, there)

    def _by_room(
        self, node: NodeName, task: Task, cpu: float, far: int, allows: Allows | None
    ) -> Found | None:
        demand = task.demand
        sign = -1 if "spread" in (demand.placement, self._policy.placement) else 1
        options = self._devices(node, task, sign)
        if allows is not None:
            options = (option for option in options if allows(option[1], option[2]))
        chosen = nsmallest(demand.gpus, options)
        if len(chosen) < demand.gpus:
            return None
        devices = tuple(sorted((key, mb) for _, key, mb in chosen))
        names = (node, *(key for key, _ in devices))
        return (far + sum(left for left, _, _ in chosen), sign * cpu, names), Placement(node, devices)

    def _by_worth(
        self, node: NodeName, task: Task, far: int, worth: Worth, there: tuple[Row, ...]
    ) -> Found | None:
        before = worth.worked_out
        spot = worth.spot(task.demand, there)
        self._looks.taken += CLOSE_LOOK * (worth.worked_out - before)
        if spot is None:
            return None
        devices = []
        for key in spot.devices:
            need = need_mb(task.demand, self._draft.book(key).device)
            assert need is not None, "it was found to fit"
            devices.append((key, need))
        rank = far + FAR_MB * spot.unwanted - spot.score
        return (rank, 0.0, (node, *spot.devices)), Placement(node, tuple(devices))

    def _rows(self, node: NodeName, priority: int, room: Room) -> tuple[Row, ...]:
        """Once for each room that the node has for this priority."""
        if self._memory is None:
            return rows(room.devices, room.beside.cpu)
        known = self._memory.rows.get((node, priority))
        if known is None or known[0] is not room:
            self._looks.taken += CLOSE_LOOK
            known = self._memory.rows[node, priority] = room, rows(room.devices, room.beside.cpu)
        return known[1]

    def _left(self, node: NodeName, task: Task) -> Room:
        """What such a task could have of a node; once for all without pledges there."""
        if not self._is_kept_for(node, task):
            return self._outlooks.now(node, task.priority)
        self._looks.taken += CLOSE_LOOK
        return self._outlooks.now_of(node, task)

    def _is_kept_for(self, node: NodeName, task: Task) -> bool:
        """Whether there is room on the node that only this task may have."""
        pledges = self._draft.pledges_of(task.id)
        return any(self._draft.book(device).device.node == node for device in pledges)

    def _devices(self, node: NodeName, task: Task, sign: int) -> Iterator[Option]:
        for book in self._draft.usable_books(node, self._policy, self._now):
            need = need_mb(task.demand, book.device)
            if need is not None and need <= book.unheld_mb():
                left = book.free_mb(task=task.id, priority=task.priority) - need
                if left >= 0:
                    far = FAR_MB * unwanted_device(task.demand, book.device)
                    yield sign * left + far, book.device.key, need


def _allowed(room: Room, task: Task, allows: Allows) -> tuple[Row, ...]:
    """Of devices that are not allowed there is nothing left."""
    left = []
    for device, mb in room.devices:
        need = need_mb(task.demand, device) if task.demand.gpus else None
        left.append((device, mb if need is None or allows(device.key, need) else 0))
    return rows(left, room.beside.cpu)
