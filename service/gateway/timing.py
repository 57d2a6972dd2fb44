"""When a task may start, how long it waits and by when it has ended: what clients say, as instants."""

from dataclasses import dataclass
from datetime import datetime

from service.core.units import Instant, Seconds
from service.gateway.faults import refused
from service.gateway.problems import Fault
from service.gateway.schemas import SubmitTask

HORIZON_SECONDS = 3650 * 24 * 3600.0
"""No time that a task may be given lies further ahead."""


@dataclass(frozen=True, slots=True)
class Timing:
    not_before: Instant | None
    queue_ttl_seconds: Seconds | None
    expires_at: Instant | None
    deadline_at: Instant | None
    expected_seconds: Seconds | None


def timing_of(body: SubmitTask, now: Instant) -> Timing:
    """The time to wait begins when the task may start; of one that runs after others, when those have ended.

    Raises Problem for a time that is too late to be kept, or too far away; a `not_before` that has passed
    means nothing.
    """
    faults: list[Fault] = []
    not_before = _ahead("not_before", body.not_before, now, faults)
    if body.deadline_seconds is not None:
        deadline_at: float | None = now + body.deadline_seconds
    else:
        deadline_at = _ahead("deadline_at", body.deadline_at, now, faults)
    earliest = max(now, not_before or now)
    if deadline_at is not None and deadline_at <= earliest:
        what = "the task may start" if earliest > now else "it was sent"
        name = "deadline_at" if body.deadline_seconds is None else "deadline_seconds"
        detail = f"ends {earliest - deadline_at:.0f} s before {what}; give it time to run"
        faults.append(Fault(pointer=f"/{name}", detail=detail, code="deadline-passed"))
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
