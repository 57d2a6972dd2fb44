"""Demands for which there was nothing, each with what it lacks; kept from cycle to cycle."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import NodeName
from gpubroker_server.core.planning.node_room import Room
from gpubroker_server.core.world.queue import Kin


@dataclass(slots=True)
class Since:
    """Revisions of `changes` and `growth` of which a refusal tells."""

    changed: int
    grown: int


@dataclass(slots=True)
class Refusal:
    """There was neither room for such a task nor anything that could be made room, on any node."""

    probe: Task
    """One of them, whatever its priority."""
    priority: int
    since: Since
    """Shared by those that hold together."""
    coming_on: NodeName | None = None
    """Or rather: room is coming on this node, so that nobody is stopped elsewhere."""
    ruled_out_before: int = 0
    """If so, the revision of `growth` at which no node had anything at all; 0 if that was never found."""
    broken: tuple[int, int] = (0, 0)
    """Revision of `changes` at which there was something after all, and for which priority."""

    @property
    def ruled_out(self) -> int:
        """Revision of `growth` at which no node had anything at all."""
        return self.since.grown if self.coming_on is None else self.ruled_out_before


class _Lack(NamedTuple):
    """What such a task needs at least, and the refusal."""

    cpu: float
    memory_mb: int
    gpus: int
    mb: int
    """Of each GPU."""
    whole: int
    """GPUs that it needs whole."""
    refusal: Refusal


def _lack(refusal: Refusal) -> _Lack:
    demand = refusal.probe.demand
    whole = demand.gpus if demand.takes_whole_devices else 0
    return _Lack(demand.cpu, demand.memory_mb, demand.gpus, demand.gpu_mb or 1, whole, refusal)


@dataclass(slots=True)
class Lot:
    """The refusals of one priority that hold up to the same revision."""

    since: Since
    lacks: dict[Kin, _Lack] = field(default_factory=dict)

    def met_by(self, room: Room) -> Iterator[tuple[Kin, Refusal]]:
        """For whom the room is enough."""
        amounts, whole = room.ceiling
        cpu, memory_mb, count = max(0.0, room.beside.cpu), max(0, room.beside.memory_mb), len(amounts)
        if room.beside.runs < 1:
            return
        for kin, lack in self.lacks.items():
            if lack.cpu > cpu or lack.memory_mb > memory_mb or lack.gpus > count or lack.whole > whole:
                continue
            if (not lack.gpus or lack.mb <= amounts[lack.gpus - 1]) and room.fits(lack.refusal.probe):
                yield kin, lack.refusal


class Refused:
    """All that is known of them.

    A refusal for which nothing is coming covers lower priorities too. Those of one priority are kept
    together and hold up to the same revision: what a node offers that has grown is compared with what they
    lack, and only whoever now has enough of everything is taken out, to be looked at one by one.
    """

    def __init__(self) -> None:
        self._all: dict[Kin, dict[int, Refusal]] = {}
        """Demand -> priority -> what is known."""
        self._lots: dict[tuple[int, bool], Lot] = {}
        """(priority, whether runs may be stopped for it) -> those that hold."""
        self.shut: dict[Kin, int] = {}
        """Demand -> the highest priority of those that hold; not to be changed."""

    def __len__(self) -> int:
        return len(self._all)

    def clear(self) -> None:
        self._all.clear()
        self._lots.clear()
        self.shut.clear()

    def of(self, kin: Kin) -> dict[int, Refusal]:
        """Priority -> what is known; not to be changed."""
        return self._all.get(kin, {})

    def put(self, kin: Kin, refusal: Refusal) -> None:
        """In the place of what it covers."""
        known, priority = self._all.setdefault(kin, {}), refusal.priority
        if refusal.coming_on is None:
            for covered in [at for at in known if at < priority]:
                self._take_out(kin, known.pop(covered))
        if priority in known:
            self._take_out(kin, known[priority])
        known[priority] = refusal

    def join(self, kin: Kin, refusal: Refusal, lot: Lot) -> None:
        """It holds, and nothing is coming."""
        refusal.since = lot.since
        lot.lacks[kin] = _lack(refusal)
        self.shut[kin] = max(self.shut.get(kin, -1), refusal.priority)

    def _take_out(self, kin: Kin, refusal: Refusal) -> None:
        for stops in (False, True):
            lot = self._lots.get((refusal.priority, stops))
            if lot is not None and kin in lot.lacks:
                self.leave(kin, refusal, lot)

    def leave(self, kin: Kin, refusal: Refusal, lot: Lot) -> None:
        """From now on it has to be asked for itself."""
        refusal.since = replace(lot.since)
        del lot.lacks[kin]
        left = [at for (at, _), other in self._lots.items() if kin in other.lacks]
        if left:
            self.shut[kin] = max(left)
        else:
            del self.shut[kin]

    def lot(self, priority: int, *, stops: bool, now: Since) -> Lot:
        lot = self._lots.get((priority, stops))
        if lot is None:
            lot = self._lots[priority, stops] = Lot(replace(now))
        return lot

    def lots(self) -> list[tuple[int, bool, Lot]]:
        return [(priority, stops, lot) for (priority, stops), lot in self._lots.items()]
