"""The results of a load, computed from the service's events."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from statistics import mean
from typing import Any

from bench.churn.shapes import UNIT_MB, Shape
from bench.processes import Service

PAGE = 500
ENDS = frozenset({"task.succeeded", "task.failed", "task.cancelled", "task.expired"})


@dataclass
class Outcome:
    began: float = 0.0
    ended: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    """The number of events by kind."""
    waits: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Class -> the seconds from submit to first admission of each task."""
    held_unit_seconds: float = 0.0
    """Units of quota × seconds, from admission until the memory was confirmed free."""
    cpu_seconds: float = 0.0
    """User and system time of the service, in seconds."""

    @property
    def wall_seconds(self) -> float:
        return self.ended - self.began

    @property
    def turnover_per_second(self) -> float:
        """The admissions per second of wall time."""
        return self.counts["task.admitted"] / self.wall_seconds

    def figures(self, shape: Shape) -> dict[str, tuple[float, str]]:
        """Return figure -> (value, unit). `use` and `held_use` are shares of the quota over the whole wall
        time."""
        offered = shape.units * self.wall_seconds
        return {
            "wall_s": (self.wall_seconds, "s"),
            "use": (shape.work_unit_seconds / offered, ""),
            "held_use": (self.held_unit_seconds / offered, ""),
            "admissions": (self.turnover_per_second, "/s"),
            "cpu_per_admission": (1000 * self.cpu_seconds / self.counts["task.admitted"], "ms"),
            "preemptions": (float(self.counts["task.requeued"]), ""),
            **{
                f"wait.{each.name}_s": (mean(self.waits[each.name]), "s")
                for each in sorted(shape.classes, key=lambda each: -each.priority)
            },
        }


def events_of(running: Service, after: int) -> Iterator[dict[str, Any]]:
    """Yield all events after this position of the log."""
    while True:
        page = running.ask("GET", f"/events?after={after}&limit={PAGE}")
        yield from page["items"]
        if page["next_after"] == after:
            return
        after = page["next_after"]


def outcome_of(events: Iterable[dict[str, Any]], shape: Shape, cpu_seconds: float = 0.0) -> Outcome:
    """Return the outcome of a load. Raises RuntimeError unless every task of the shape succeeded."""
    outcome = Outcome(cpu_seconds=cpu_seconds)
    submitted: dict[str, tuple[float, str]] = {}
    leased: dict[str, tuple[float, int]] = {}
    for event in events:
        kind, key, at = event["kind"], event["key"], _seconds(event["at"])
        outcome.counts[kind] += 1
        match kind:
            case "task.submitted":
                submitted[key] = at, event["fields"]["name"]
                outcome.began = outcome.began or at
            case "task.admitted" if key in submitted and event["fields"]["fence"] == 1:
                since, name = submitted[key]
                outcome.waits[name].append(at - since)
            case "lease.reserved":
                leased[key] = at, event["fields"]["mb"]
            case "lease.released":
                since, mb = leased.pop(key)
                outcome.held_unit_seconds += (at - since) * mb / UNIT_MB
            case _ if kind in ENDS:
                outcome.ended = at
    if outcome.counts["task.succeeded"] != shape.tasks:
        raise RuntimeError(f"{shape.tasks} tasks had to succeed; the log has {dict(outcome.counts)}")
    return outcome


def _seconds(at: str) -> float:
    return datetime.fromisoformat(at.replace("Z", "+00:00")).timestamp()
