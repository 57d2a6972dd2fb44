"""The event log as lines for people, and the events that the demo checks."""

import time
from collections.abc import Iterable, Sequence
from datetime import datetime

from gpubroker import Event, Gpu, Task


class EventLines:
    def __init__(self, began: float) -> None:
        self._began = began
        self._names: dict[str, str] = {}
        self._lease_mb: dict[str, int] = {}
        self._waits: dict[str, str] = {}
        self._lines: list[str] = []
        self._first: dict[tuple[str, str], Event] = {}
        self.position = 0

    def register(self, task: Task) -> None:
        self._names[task.id] = task.name

    def add(self, line: str) -> None:
        self._lines.append(f"{time.monotonic() - self._began:6.1f}s  {line}")

    def new_lines(self) -> list[str]:
        """Return the lines of events since the last call."""
        lines, self._lines = self._lines, []
        return lines

    def observe(self, events: Iterable[Event], gpus: Sequence[Gpu], tasks: Sequence[Task]) -> None:
        labels = {gpu.key: f"gpu {gpu.index}" for gpu in gpus}
        for event in events:
            self.position = event.position
            if line := self._line(event, labels):
                self.add(line)
        for task in tasks:
            reason = task.pending.reason if task.pending else ""
            if task.pending and self._waits.get(task.id) != reason:
                self.add(f"{task.name:<17} waits: {self._with_names(task.pending.message)}")
            self._waits[task.id] = reason

    def first(self, kind: str, name: str) -> Event | None:
        """Return the first event of this kind about the task with this name; None if there is none."""
        return self._first.get((kind, name))

    def _line(self, event: Event, labels: dict[str, str]) -> str | None:
        subject = self._subject(event)
        name = self._names.get(subject)
        if name is None:
            return None
        self._first.setdefault((event.kind, name), event)
        fields = event.fields
        match event.kind:
            case "lease.reserved":
                mb = self._lease_mb[event.key] = fields["mb"]
                return f"{name:<17} leases {_gib(mb)} of {labels.get(fields['device'], '')}"
            case "lease.released":
                mb = self._lease_mb.get(event.key, 0)
                return f"{name:<17} is confirmed gone: its {_gib(mb)} are free"
            case "pledge.made":
                place = labels.get(fields["device"], "")
                return f"{name:<17} is pledged {_gib(fields['mb'])} of {place} while others leave"
            case "task.stopping":
                return f"{name:<17} is asked to stop ({fields.get('stop_reason')})"
            case "task.requeued":
                return f"{name:<17} is back in the queue, with its checkpoint"
            case "task.submitted" | "task.started" | "task.succeeded" | "task.failed" | "task.cancelled":
                return f"{name:<17} {event.kind.removeprefix('task.')}"
            case _:
                return None

    def _with_names(self, message: str) -> str:
        for task, name in self._names.items():
            message = message.replace(task, name)
        return message

    def _subject(self, event: Event) -> str:
        """Return the id of the task that an event is about. Leases and pledges have it in their key."""
        match event.kind.partition(".")[0], event.key.split(":"):
            case "lease", [_, holder, *_]:
                return holder
            case "pledge", [preemptor, *_]:
                return preemptor
            case _:
                return event.key


def seconds_between(earlier: Event, later: Event) -> float:
    def moment(at: datetime | None) -> float:
        return at.timestamp() if at else 0.0

    return moment(later.at) - moment(earlier.at)


def _gib(mb: int) -> str:
    return f"{mb / 1024:.1f} GiB"
