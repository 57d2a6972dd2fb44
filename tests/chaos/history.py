"""The invariants of every history, checked on the event log alone, whatever faults there were."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gpubroker_server.core.domain.holders import Member
from gpubroker_server.core.domain.lease import HOLDERS_OF_TASKS, NEXT_STATES, LeaseState, Proof
from gpubroker_server.core.domain.task import ACTIVE, TERMINAL, TRANSITIONS, Move, TaskState
from gpubroker_server.core.domain.units import Position
from gpubroker_server.core.world.events import Event
from msgspec import convert

Rank = tuple[str, int, int]
"""(holder, fence, rank): one run."""

BEGINNING = Position(0)

_PROOFS = frozenset(Proof)
_LIVE = frozenset({LeaseState.RESERVED, LeaseState.HELD})


def violations(
    events: Iterable[Event], capacities: Mapping[str, int] | None = None, after: Position = BEGINNING
) -> list[str]:
    """The violated invariants, in words.

    `capacities`: leasable MiB of devices, instead of what the log says. `after`: the position before the
    first event; what happened up to it is unknown and not checked.
    """
    history = History(capacities, after)
    history.read(events)
    history.end()
    return history.violations


@dataclass(slots=True)
class TaskSeen:
    state: TaskState
    version: int
    fence: int = 0
    gone: frozenset[int] = frozenset()
    """The ranks of a gang whose processes are gone while the others run."""
    leaving: frozenset[int] = frozenset()
    """The ranks that were asked to leave."""


@dataclass(slots=True)
class LeaseSeen:
    key: str
    run: Rank
    device: str
    mb: int
    state: LeaseState
    version: int
    of_task: bool
    freed_for: str | None = None
    """The preemptor whose pledge it goes to; kept until it is released, whatever becomes of its task."""


@dataclass(slots=True)
class DeviceSeen:
    capacity_mb: int = 0
    leased_mb: int = 0
    excess_mb: int = 0
    """The most that was ever leased or pledged beyond its capacity."""
    leases: dict[str, LeaseSeen] = field(default_factory=dict)
    pledges: dict[str, int] = field(default_factory=dict)
    """Preemptor -> MiB."""


class History:
    """Reads events in order, in any portions; collects `violations`.

    All events of one transaction have the same time. Sums that hold between transactions are checked when the
    next one begins, or at the `end`.
    """

    def __init__(self, capacities: Mapping[str, int] | None = None, after: Position = BEGINNING) -> None:
        self.violations: list[str] = []
        self.tasks: dict[str, TaskSeen] = {}
        self.leases: dict[str, LeaseSeen] = {}
        """The leases that are not released, by key."""
        self.devices: dict[str, DeviceSeen] = {}
        self._capacities = capacities
        self._position = after
        self._knows_the_beginning = after == 0
        self._of_holder: dict[str, dict[str, LeaseSeen]] = {}
        self._released: set[str] = set()
        self._at = 0.0
        self._grown: set[str] = set()
        self._just_released: list[tuple[LeaseSeen, Event]] = []

    @property
    def pledges(self) -> list[str]:
        """The open pledges, as `preemptor:device`."""
        return sorted(f"{by}:{key}" for key, device in self.devices.items() for by in device.pledges)

    def read(self, events: Iterable[Event]) -> None:
        for event in events:
            if event.at != self._at:
                self.end()
                self._at = event.at
            self._require(event.position == self._position + 1, "the log has no gap", event)
            self._position = event.position
            subject, _, what = event.kind.partition(".")
            match subject:
                case "task":
                    self._on_task(event, what)
                case "lease":
                    self._on_lease(event)
                case "pledge":
                    self._on_pledge(event, what)
                case "device":
                    row = event.fields
                    usable_mb = row["physical_mb"] - row["reserve_mb"]
                    given = (self._capacities or {}).get(event.key, usable_mb)
                    self._device(event.key).capacity_mb = given

    def end(self) -> None:
        """The end of a transaction: check what must hold between two."""
        for lease, event in self._just_released:
            self._require(self._is_over(lease), "memory is released when its run is over, not before", event)
        for key in sorted(self._grown):
            device = self.devices[key]
            staying_mb = sum(
                lease.mb for lease in device.leases.values() if not self._is_leaving(lease, device)
            )
            pledged_mb = sum(device.pledges.values())
            excess_mb = staying_mb + pledged_mb - device.capacity_mb
            if excess_mb > 0 and self._knows(key):
                device.excess_mb = max(device.excess_mb, excess_mb)
                self.violations.append(
                    f"no byte is leased or pledged twice: by position {self._position}, of the "
                    f"{device.capacity_mb} MiB of {key} {staying_mb} are leased to holders that stay and "
                    f"{pledged_mb} pledged"
                )
        self._just_released.clear()
        self._grown.clear()

    def _require(self, holds: bool, rule: str, event: Event, found: object = None) -> None:
        if not holds:
            also = "" if found is None else f"; {found}"
            self.violations.append(
                f"{rule}: position {event.position}, {event.kind} {event.key} "
                f"v{event.version} {dict(event.fields)}{also}"
            )

    # Tasks

    def _on_task(self, event: Event, what: str) -> None:
        fields, known = event.fields, self.tasks.get(event.key)
        state = TaskState(fields["state"])
        if what == Move.SUBMITTED:
            self._require(known is None, "a task is submitted once", event)
            self._require(state is TaskState.PENDING and event.version == 1, "a task begins pending", event)
            self.tasks[event.key] = TaskSeen(state, event.version)
            return
        if known is None:
            self._require(not self._knows_the_beginning, "only a submitted task changes", event)
            self.tasks[event.key] = TaskSeen(state, event.version, fields.get("fence", 0))
            return
        self._require(known.state not in TERMINAL, "an ended task stays ended", event, known.state)
        self._require(event.version == known.version + 1, "each change has the next version", event, known)
        to = TRANSITIONS.get((known.state, Move(what)))
        self._require(
            known.state in TERMINAL or to is state, "a task moves as the transition table says", event, known
        )
        claims = known.state is TaskState.PENDING and state in ACTIVE
        if claims or "fence" in fields:
            self._claim(event, known, claims=claims)
        known.state, known.version = state, event.version
        if "members" in fields:
            members = convert(fields["members"], tuple[Member, ...])
            known.gone = frozenset(member.rank for member in members if member.gone)
            known.leaving = frozenset(member.rank for member in members if not member.takes_part)
        self._note_preemptor(event, known)

    def _claim(self, event: Event, task: TaskSeen, *, claims: bool) -> None:
        fence = event.fields.get("fence")
        is_next = claims and fence == task.fence + 1
        if task.fence or self._knows_the_beginning:
            self._require(
                is_next, "each claim has the next fence, and nothing else changes it", event, task.fence
            )
        live = [lease.key for lease in self._of_holder.get(event.key, {}).values() if lease.state in _LIVE]
        self._require(not live, "a task is claimed by one run at a time", event, live or None)
        task.fence, task.gone, task.leaving = fence or task.fence, frozenset(), frozenset()

    def _note_preemptor(self, event: Event, task: TaskSeen) -> None:
        """Note the preemptor that the memory of its runs is freed for."""
        named: dict[int | None, str] = {}
        if event.fields.get("freeing_for") is not None:
            named[None] = event.fields["freeing_for"]
        for member in convert(event.fields.get("members", ()), tuple[Member, ...]):
            if member.freeing_for is not None:
                named[member.rank] = member.freeing_for
        for lease in self._of_holder.get(event.key, {}).values() if named else ():
            _, fence, rank = lease.run
            preemptor = named.get(rank, named.get(None))
            if fence == task.fence and preemptor is not None:
                lease.freed_for = preemptor

    # Leases

    def _on_lease(self, event: Event) -> None:
        state = LeaseState(event.fields["state"])
        lease = self.leases.get(event.key)
        if event.version == 1:
            is_new = lease is None and event.key not in self._released
            self._require(is_new, "a lease is made once", event)
            self._enter(event, state)
            return
        if lease is None:
            known = event.key in self._released
            self._require(not known, "a lease is released once, and never used again", event)
            self._require(known or not self._knows_the_beginning, "only a known lease changes", event)
            return
        self._require(event.version == lease.version + 1, "each change has the next version", event, lease)
        marks = event.kind == "lease.overused" and lease.state is state is LeaseState.HELD
        goes_on = marks or state in NEXT_STATES[lease.state]
        self._require(goes_on, "a lease goes forward only", event, lease.state)
        is_proven = state is not LeaseState.RELEASED or event.fields.get("proof") in _PROOFS
        self._require(is_proven, "a lease is released with a proof", event)
        lease.state, lease.version = state, event.version
        if state is LeaseState.RELEASED:
            self._leave(lease, event)

    def _enter(self, event: Event, state: LeaseState) -> None:
        row = event.fields
        run = (row["holder"], row["fence"], row["rank"])
        of_task = row["holder_kind"] in HOLDERS_OF_TASKS
        task = self.tasks.get(row["holder"])
        if of_task and (task is not None or self._knows_the_beginning):
            newest = None if task is None else task.fence
            self._require(row["fence"] == newest, "memory is leased to the newest claim", event, newest)
        lease = LeaseSeen(event.key, run, row["device"], row["mb"], state, event.version, of_task)
        self.leases[event.key] = lease
        self._of_holder.setdefault(row["holder"], {})[event.key] = lease
        device = self._device(row["device"])
        device.leases[event.key] = lease
        device.leased_mb += row["mb"]
        self._grown.add(row["device"])
        excess_mb = device.leased_mb - device.capacity_mb
        if excess_mb > 0 and self._knows(row["device"]):
            device.excess_mb = max(device.excess_mb, excess_mb)
            self._require(False, "no byte is leased twice", event, f"{excess_mb} MiB too much")

    def _leave(self, lease: LeaseSeen, event: Event) -> None:
        del self.leases[lease.key]
        self._released.add(lease.key)
        del self._of_holder[lease.run[0]][lease.key]
        device = self._device(lease.device)
        device.leased_mb -= lease.mb
        del device.leases[lease.key]
        self._just_released.append((lease, event))

    def _is_over(self, lease: LeaseSeen) -> bool:
        holder, fence, rank = lease.run
        task = self.tasks.get(holder)
        if not lease.of_task or task is None or task.fence != fence:
            return True
        return task.state not in ACTIVE or rank in task.gone

    def _is_leaving(self, lease: LeaseSeen, device: DeviceSeen) -> bool:
        """Memory that is being freed counts for its pledge, also if its lease is in quarantine by now."""
        if lease.state is LeaseState.RELEASING or lease.freed_for in device.pledges:
            return True
        holder, fence, rank = lease.run
        task = self.tasks.get(holder)
        return (
            task is not None
            and task.fence == fence
            and (task.state is TaskState.STOPPING or rank in task.leaving)
        )

    # Devices and pledges

    def _on_pledge(self, event: Event, what: str) -> None:
        row = event.fields
        pledges = self._device(row["device"]).pledges
        if what == "made":
            self._require(row["preemptor"] not in pledges, "a pledge is made once", event)
            pledges[row["preemptor"]] = row["mb"]
            self._grown.add(row["device"])
        else:
            is_open = pledges.pop(row["preemptor"], None) is not None
            self._require(is_open or not self._knows_the_beginning, "a pledge ends once", event)

    def _device(self, key: str) -> DeviceSeen:
        if key not in self.devices:
            self.devices[key] = DeviceSeen((self._capacities or {}).get(key, 0))
        return self.devices[key]

    def _knows(self, device: str) -> bool:
        """Whether the size of the device is known."""
        return self._knows_the_beginning or self._device(device).capacity_mb > 0
