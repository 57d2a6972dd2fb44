"""Reads the log beside the broker and compares it with the truth on the machines. Believes neither."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from math import inf
from typing import Any

from service.core.events import Event
from service.core.lease import LeaseState
from service.core.task import TERMINAL
from service.core.units import DeviceKey
from tests.simulation.machine import Machine

_LIVE = frozenset({LeaseState.RESERVED, LeaseState.HELD})
_TERMINAL = frozenset(state.value for state in TERMINAL)


class Violation(AssertionError):
    """A rule that must hold at every step was broken."""


def require(holds: bool, rule: str, **found: Any) -> None:
    if not holds:
        raise Violation(f"{rule}: {', '.join(f'{name}={value}' for name, value in found.items())}")


class Auditor:
    """One pass over the events, with a book of its own; `look` is called after every step."""

    def __init__(self, machines: Callable[[], Iterable[Machine]]) -> None:
        self._machines = machines
        self._position = 0
        self._digest = sha256()
        self._fences: dict[str, int] = {}
        self._states: dict[str, str] = {}
        self._submitted: dict[str, Mapping[str, Any]] = {}
        self._leases: dict[str, dict[str, Any]] = {}
        self._leased_mb: Counter[str] = Counter()
        self._allocatable_mb: dict[str, int] = {}
        self._pledges: set[str] = set()
        self.counts: Counter[str] = Counter()

    @property
    def digest(self) -> str:
        """Of every event so far: the same day has the same digest."""
        return self._digest.hexdigest()

    def unfinished(self) -> list[str]:
        """Tasks that have not ended, leases and pledges that are still open."""
        tasks = sorted(task for task, state in self._states.items() if state not in _TERMINAL)
        return [*tasks, *self._leases, *sorted(self._pledges)]

    def read(self, events: Sequence[Event]) -> None:
        for event in events:
            require(event.position == self._position + 1, "the log has no gap", event=event)
            self._position = event.position
            line = json.dumps(
                [event.position, event.at, event.kind, event.key, event.version, dict(event.fields)]
            )
            self._digest.update(line.encode())
            self.counts[event.kind] += 1
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
                    self._allocatable_mb[event.key] = row["physical_mb"] - row["reserve_mb"]

    def look(self) -> None:
        """What is really used must fit at every moment, whatever the rows say."""
        for machine in self._machines():
            for device, mb in machine.used_mb().items():
                room = self._allocatable_mb.get(device, mb)
                require(mb <= room, "processes fit on their device", device=device, used=mb, room=room)

    def _on_task(self, event: Event, what: str) -> None:
        task, state = event.key, event.fields["state"]
        require(self._states.get(task) not in _TERMINAL, "what has ended stays ended", event=event)
        self._states[task] = state
        if what == "submitted":
            self._submitted[task] = event.fields
        self._submitted[task] = {**self._submitted[task], **_given(event.fields, "expires_at")}
        self._on_time(event, what, self._submitted[task])
        self._after_others(event, what, self._submitted[task])
        if what == "admitted":
            fence = event.fields["fence"]
            require(fence == self._fences.get(task, 0) + 1, "each claim has the next fence", event=event)
            self._fences[task] = fence
            live = [key for key, lease in self._leases.items() if _is_live(lease) and lease["holder"] == task]
            require(not live, "a task is claimed by one run at a time", event=event, live=live)
        if what == "succeeded":
            fence = self._fences[task]
            done = any((task, fence) in machine.succeeded for machine in self._machines())
            require(done, "a success is that of the accepted claim", event=event, fence=fence)

    def _after_others(self, event: Event, what: str, submitted: Mapping[str, Any]) -> None:
        """Nothing runs before those that it runs after, and nothing fails without a reason."""
        states = [(self._states[task], on_failure) for task, on_failure in submitted.get("after", ())]
        missed = [state for state, on_failure in states if on_failure == "fail" and state != "succeeded"]
        if what == "admitted":
            ended = all(state in _TERMINAL for state, _ in states)
            require(ended and not missed, "nothing runs before its dependencies", event=event, states=states)
        if "failed_by" in event.fields:
            known = [state for state in missed if state in _TERMINAL]
            require(bool(known), "a dependent fails with one of its dependencies", event=event, states=states)

    def _on_time(self, event: Event, what: str, submitted: Mapping[str, Any]) -> None:
        """Nothing starts too early or too late, and nothing expires before its time."""
        is_first = self._fences.get(event.key, 0) == 0
        until = [
            submitted[name] for name in ("deadline_at", "expires_at")[: 1 + is_first] if name in submitted
        ]
        if what == "admitted":
            require(
                event.at >= submitted.get("not_before", 0.0), "nothing starts before its time", event=event
            )
            require(event.at < min(until, default=inf), "nothing starts after its time", event=event)
        if what == "expired":
            require(event.at >= min(until, default=inf), "nothing expires before its time", event=event)

    def _on_lease(self, event: Event) -> None:
        if event.version == 1:
            self._leases[event.key] = dict(event.fields)
            require(
                event.fields["fence"] == self._fences.get(event.fields["holder"]),
                "memory is leased to the newest claim",
                event=event,
            )
            self._count(event.fields["device"], event.fields["mb"])
            return
        lease = self._leases[event.key]
        lease |= event.fields
        if lease["state"] == LeaseState.RELEASED:
            del self._leases[event.key]
            self._count(lease["device"], -lease["mb"])
            claim = (lease["holder"], lease["fence"])
            alive = [m.name for m in self._machines() for run in m.processes if run.claim == claim]
            require(not alive, "memory comes back only when its process is gone", event=event, alive=alive)

    def _count(self, device: DeviceKey, mb: int) -> None:
        self._leased_mb[device] += mb
        leased, room = self._leased_mb[device], self._allocatable_mb[device]
        require(0 <= leased <= room, "no byte is leased twice", device=device, leased=leased, room=room)

    def _on_pledge(self, event: Event, what: str) -> None:
        if what == "made":
            require(event.key not in self._pledges, "a pledge is made once", event=event)
            self._pledges.add(event.key)
        else:
            require(event.key in self._pledges, "a pledge ends once", event=event)
            self._pledges.remove(event.key)


def _given(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {name: fields[name]} if name in fields else {}


def _is_live(lease: dict[str, Any]) -> bool:
    return lease["state"] in _LIVE
