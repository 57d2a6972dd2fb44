"""When a task may start, how long it waits and by when it has ended: what clients say, as instants."""

from dataclasses import dataclass
from datetime import datetime

from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.gateway.http.bodies import Timed
from gpubroker_server.gateway.http.faults import refused
from gpubroker_server.gateway.http.problems import Fault
from gpubroker_server.gateway.submission.task_body import CHANGEABLE_TIMES, ChangeTask

HORIZON_SECONDS = 3650 * 24 * 3600.0
"""No time that a task may be given lies further ahead."""


@dataclass(frozen=True, slots=True)
class Timing:
    not_before: Instant | None
    queue_ttl_seconds: Seconds | None
    expires_at: Instant | None
    deadline_at: Instant | None
    expected_seconds: Seconds | None


_UNTIMED = Timing(None, None, None, None, None)
_TIMES = frozenset({"not_before", "queue_ttl_seconds", "deadline_at", "deadline_seconds", "expected_seconds"})


def timing_of(body: Timed, now: Instant) -> Timing:
    """The time to wait begins when the task may start; of one that runs after others, when those have ended.

    Raises Problem for a time that is too late to be kept, or too far away; a `not_before` that has passed
    means nothing.
    """
    if body.model_fields_set.isdisjoint(_TIMES):
        return _UNTIMED
    faults: list[Fault] = []
    not_before = _ahead("not_before", body.not_before, now, faults)
    if body.deadline_seconds is not None:
        deadline_at: float | None = now + body.deadline_seconds
    else:
        deadline_at = _ahead("deadline_at", body.deadline_at, now, faults)
    earliest = max(now, not_before or now)
    name = "deadline_at" if body.deadline_seconds is None else "deadline_seconds"
    _check_order(name, deadline_at, earliest, now, faults)
    if faults:
        raise refused(faults)
    ttl = None if body.queue_ttl_seconds is None else Seconds(body.queue_ttl_seconds)
    return Timing(
        not_before=Instant(not_before) if not_before is not None and not_before > now else None,
        queue_ttl_seconds=ttl,
        expires_at=None if ttl is None or body.after else Instant(earliest + ttl),
        deadline_at=None if deadline_at is None else Instant(deadline_at),
        expected_seconds=None if body.expected_seconds is None else Seconds(body.expected_seconds),
    )


def changed_times(body: ChangeTask, task: Task, now: Instant) -> dict[str, float | None]:
    """The times that the client gives, null among them. Raises Problem as `timing_of` does."""
    given = body.model_fields_set & CHANGEABLE_TIMES
    if given and task.external is not None:
        detail = f"an external lease has no such time; it is renewed: POST /leases/{task.id}/renew"
        raise refused(
            [Fault(pointer=f"/{name}", detail=detail, code="not-of-a-lease") for name in sorted(given)]
        )
    faults: list[Fault] = []
    times: dict[str, float | None] = dict.fromkeys(given)
    if body.not_before is not None:
        times["not_before"] = _ahead("not_before", body.not_before, now, faults)
    if body.queue_ttl_seconds is not None:
        times["queue_ttl_seconds"] = body.queue_ttl_seconds
    if body.deadline_at is not None:
        times["deadline_at"] = _ahead("deadline_at", body.deadline_at, now, faults)
    name = "deadline_at" if "deadline_at" in times else "not_before"
    if name in times:
        earliest = max(now, times.get("not_before", task.not_before) or now)
        _check_order(name, times.get("deadline_at", task.deadline_at), earliest, now, faults)
    if faults:
        raise refused(faults)
    return times


def _check_order(
    name: str, deadline_at: float | None, earliest: float, now: Instant, faults: list[Fault]
) -> None:
    if deadline_at is not None and deadline_at <= earliest:
        what = "the task may start" if earliest > now else "it was sent"
        ends = f"the deadline is {_span(earliest - deadline_at)} before {what}; give it time to run"
        faults.append(Fault(pointer=f"/{name}", detail=ends, code="deadline-passed"))


def _span(seconds: float) -> str:
    units = (("days", 24 * 3600), ("hours", 3600), ("minutes", 60))
    name, size = next((unit for unit in units if seconds >= 2 * unit[1]), ("s", 1))
    return f"{seconds / size:.0f} {name}"


def _ahead(name: str, time: datetime | None, now: Instant, faults: list[Fault]) -> float | None:
    if time is None:
        return None
    at = time.timestamp()
    if at > now + HORIZON_SECONDS:
        detail = (
            f"lies {(at - now) / (24 * 3600):.0f} days ahead; at most {HORIZON_SECONDS / (24 * 3600):.0f}"
        )
        faults.append(Fault(pointer=f"/{name}", detail=detail, code="too-far-ahead"))
        return None
    return at
