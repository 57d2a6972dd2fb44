"""Reads the log beside the broker and compares it with the truth on the machines. Believes neither."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from math import inf
from typing import Any

from gpubroker_server.core.domain.task import TERMINAL, TaskState
from gpubroker_server.core.world.events import Event

from tests.chaos.history import History, LeaseSeen
from tests.simulation.machine import Machine


class Violation(AssertionError):
    """A rule that must hold at every step was broken."""


def require(holds: bool, rule: str, **found: Any) -> None:
    if not holds:
        raise Violation(f"{rule}: {', '.join(f'{name}={value}' for name, value in found.items())}")


class Auditor:
    """One pass over the events, with ledgers of its own; `look` is called after every step.

    What holds of every log is judged by its `History`; here is what only the machines and the clock tell.
    """

    def __init__(self, machines: Callable[[], Iterable[Machine]], *, times_are_kept: bool = True) -> None:
        """`times_are_kept`: the clock of the events' times is not set."""
        self._machines = machines
        self._times_are_kept = times_are_kept
        self.history = History()
        self._digest = sha256()
        self._submitted: dict[str, Mapping[str, Any]] = {}
        self.counts: Counter[str] = Counter()

    @property
    def digest(self) -> str:
        """Of every event so far: the same day has the same digest."""
        return self._digest.hexdigest()

    def unfinished(self) -> list[str]:
        """Tasks that have not ended, leases and pledges that are still open."""
        seen = self.history
        tasks = sorted(task for task, row in seen.tasks.items() if row.state not in TERMINAL)
        return [*tasks, *seen.leases, *seen.pledges]

    def read(self, events: Sequence[Event]) -> None:
        for event in events:
            line = json.dumps(
                [event.position, event.at, event.kind, event.key, event.version, dict(event.fields)]
            )
            self._digest.update(line.encode())
            self.counts[event.kind] += 1
            lease = self.history.leases.get(event.key)
            self.history.read([event])
            if self.history.violations:
                raise Violation(self.history.violations[0])
            subject, _, what = event.kind.partition(".")
            if subject == "task":
                self._on_task(event, what)
            if lease is not None and event.key not in self.history.leases:
                self._on_release(event, lease)

    def look(self) -> None:
        """What is really used must fit at every moment, whatever the rows say."""
        for machine in self._machines():
            for device, mb in machine.used_mb().items():
                known = self.history.devices.get(device)
                room = mb if known is None else known.capacity_mb
                require(mb <= room, "processes fit on their device", device=device, used=mb, room=room)

    def _on_task(self, event: Event, what: str) -> None:
        task = event.key
        if what == "submitted":
            self._submitted[task] = event.fields
        self._submitted[task] = {**self._submitted[task], **_given(event.fields, "expires_at")}
        if self._times_are_kept:
            self._on_time(event, what, self._submitted[task])
        self._after_others(event, what, self._submitted[task])
        if what == "succeeded":
            fence = self.history.tasks[task].fence
            done = any((task, fence) in machine.succeeded for machine in self._machines())
            require(done, "a success is that of the accepted claim", event=event, fence=fence)

    def _after_others(self, event: Event, what: str, submitted: Mapping[str, Any]) -> None:
        """Nothing runs before those that it runs after, and nothing fails without a reason."""
        states = [
            (self.history.tasks[task].state, on_failure) for task, on_failure in submitted.get("after", ())
        ]
        missed = [
            state for state, on_failure in states if on_failure == "fail" and state is not TaskState.SUCCEEDED
        ]
        if what == "admitted":
            ended = all(state in TERMINAL for state, _ in states)
            require(ended and not missed, "nothing runs before its dependencies", event=event, states=states)
        if "failed_by" in event.fields:
            known = [state for state in missed if state in TERMINAL]
            require(bool(known), "a dependent fails with one of its dependencies", event=event, states=states)

    def _on_time(self, event: Event, what: str, submitted: Mapping[str, Any]) -> None:
        """Nothing starts too early or too late, and nothing expires before its time."""
        is_first = self.history.tasks[event.key].fence == (1 if what == "admitted" else 0)
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

    def _on_release(self, event: Event, lease: LeaseSeen) -> None:
        claim = lease.run[:2]
        alive = [m.name for m in self._machines() for run in m.processes if run.claim == claim]
        require(not alive, "memory comes back only when its process is gone", event=event, alive=alive)


def _given(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {name: fields[name]} if name in fields else {}
