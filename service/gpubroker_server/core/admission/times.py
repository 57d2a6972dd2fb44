"""Check the times at which a task may start and must end, for new tasks and for changes of waiting tasks."""

from collections.abc import Mapping

from msgspec import Struct

from gpubroker_server.core.admission.submission import AskedTimes
from gpubroker_server.core.domain.holders import External
from gpubroker_server.core.domain.reasons import Refusal
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import DAY_SECONDS, Instant, Seconds

HORIZON_SECONDS = 3650.0 * DAY_SECONDS
"""The most that a time of a task may lie ahead."""


class Timing(Struct, frozen=True):
    not_before: Instant | None = None
    queue_ttl_seconds: Seconds | None = None
    expires_at: Instant | None = None
    deadline_at: Instant | None = None


UNTIMED = Timing()


def timing_of(asked: AskedTimes, now: Instant, *, has_dependencies: bool, faults: list[Refusal]) -> Timing:
    """Return the times of a new task, and add a refusal to `faults` for a deadline that leaves no time to
    run, and for each time that is too far ahead.

    The queue TTL begins when the task may start; for a task with dependencies, when they have ended. A
    `not_before` in the past has no effect.
    """
    not_before = _ahead("not_before", asked.not_before, now, faults)
    name, deadline_at = "deadline_at", _ahead("deadline_at", asked.deadline_at, now, faults)
    if asked.deadline_seconds is not None:
        name, deadline_at = "deadline_seconds", now + asked.deadline_seconds
    earliest = max(now, not_before or now)
    _check_deadline(name, deadline_at, earliest, now, faults)
    ttl = None if asked.queue_ttl_seconds is None else Seconds(asked.queue_ttl_seconds)
    return Timing(
        not_before=Instant(not_before) if not_before is not None and not_before > now else None,
        queue_ttl_seconds=ttl,
        expires_at=None if ttl is None or has_dependencies else Instant(earliest + ttl),
        deadline_at=None if deadline_at is None else Instant(deadline_at),
    )


def changed_times(
    given: Mapping[str, float | None], task: Task, now: Instant, faults: list[Refusal]
) -> dict[str, float | None]:
    """Return the times that change, including those that are removed (None), and add a refusal to `faults`
    for each invalid time.

    `given` may name `not_before`, `queue_ttl_seconds` and `deadline_at`.
    """
    if given and isinstance(task.holder, External):
        detail = f"an external lease has no such time; renew it instead: POST /leases/{task.id}/renew"
        faults += (Refusal("not-of-a-lease", detail, f"/{name}") for name in sorted(given))
        return {}
    times = dict(given)
    for name in sorted(given.keys() - {"queue_ttl_seconds"}, reverse=True):
        times[name] = _ahead(name, given[name], now, faults)
    name = "deadline_at" if "deadline_at" in times else "not_before"
    if name in times:
        earliest = max(now, times.get("not_before", task.not_before) or now)
        _check_deadline(name, times.get("deadline_at", task.deadline_at), earliest, now, faults)
    return times


def _check_deadline(
    name: str, deadline_at: float | None, earliest: float, now: Instant, faults: list[Refusal]
) -> None:
    if deadline_at is not None and deadline_at <= earliest:
        start = "the task may start" if earliest > now else "it was sent"
        detail = f"the deadline is {_in_words(earliest - deadline_at)} before {start}; give it time to run"
        faults.append(Refusal("deadline-passed", detail, f"/{name}"))


def _in_words(seconds: float) -> str:
    units = (("days", DAY_SECONDS), ("hours", 3600), ("minutes", 60))
    name, size = next((unit for unit in units if seconds >= 2 * unit[1]), ("s", 1))
    return f"{seconds / size:.0f} {name}"


def _ahead(name: str, at: float | None, now: Instant, faults: list[Refusal]) -> float | None:
    """Return the time; None if it is not given or too far ahead, and in the latter case add a refusal to
    `faults`."""
    if at is not None and at > now + HORIZON_SECONDS:
        days, most = (at - now) / DAY_SECONDS, HORIZON_SECONDS / DAY_SECONDS
        detail = f"is {days:.0f} days ahead; at most {most:.0f} are allowed"
        faults.append(Refusal("too-far-ahead", detail, f"/{name}"))
        return None
    return at
