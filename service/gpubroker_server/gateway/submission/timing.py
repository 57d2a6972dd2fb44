"""When a task may start: its times, its deadline, and the tasks that it runs after."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import AwareDatetime, BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from gpubroker_server.core.domain.task import Dependency, OnFailure, Task
from gpubroker_server.core.domain.units import Instant, Seconds, TaskId
from gpubroker_server.gateway.http.bodies import Body
from gpubroker_server.gateway.http.faults import invalid
from gpubroker_server.gateway.http.ids import is_task_id
from gpubroker_server.gateway.http.problems import Fault
from gpubroker_server.ports.store import StoredState, TaskStore

DAY_SECONDS = 24 * 3600
YEAR_SECONDS = 366 * DAY_SECONDS
HORIZON_SECONDS = 3650.0 * DAY_SECONDS
"""No time of a task may be further ahead."""


class After(Body):
    """A task that must have ended before another one starts."""

    task: Annotated[str, Field(max_length=100)]
    on_failure: Literal["fail", "ignore"] = "fail"


def _spelled_out(value: Any) -> Any:
    return {"task": value} if isinstance(value, str) else value


_AFTER = {
    "anyOf": [
        {"type": "string", "maxLength": 100},
        {"type": "integer", "minimum": 0},
        {
            "type": "object",
            "properties": {
                "task": {"anyOf": [{"type": "string", "maxLength": 100}, {"type": "integer", "minimum": 0}]},
                "on_failure": {"type": "string", "enum": ["fail", "ignore"], "default": "fail"},
            },
            "required": ["task"],
            "additionalProperties": False,
        },
    ]
}
NotBefore = Annotated[
    AwareDatetime, Field(description="It does not start earlier.", examples=["2026-11-21T22:00:00Z"])
]
QueueTtlSeconds = Annotated[
    float,
    Field(
        gt=0,
        le=YEAR_SECONDS,
        description="How long it may wait for its first start before it expires. Counted from when only room "
        "is missing: from `not_before`, and from the end of the tasks that it runs after.",
    ),
]
DeadlineAt = Annotated[
    AwareDatetime, Field(description="A waiting task expires then; a running task gets the stop notice.")
]


class Timed(Body):
    """Fields that say when a task runs."""

    after: Annotated[
        list[Annotated[After, BeforeValidator(_spelled_out), WithJsonSchema(_AFTER)]],
        Field(
            max_length=100,
            description="Your tasks that must have ended before it may start, by id; in a batch also tasks "
            "before it, by index (from 0) or by name. If one of them does not succeed it fails as well, "
            "unless `on_failure` is `ignore`.",
        ),
    ] = Field(default_factory=list)
    not_before: NotBefore | None = None
    queue_ttl_seconds: QueueTtlSeconds | None = None
    deadline_at: DeadlineAt | None = None
    deadline_seconds: (
        Annotated[float, Field(gt=0, le=YEAR_SECONDS, description="`deadline_at`, counted from the submit.")]
        | None
    ) = None
    expected_seconds: (
        Annotated[
            float,
            Field(gt=0, le=YEAR_SECONDS, description="How long one run takes. For forecasts; not a limit."),
        ]
        | None
    ) = None

    @model_validator(mode="after")
    def _one_deadline(self) -> Self:
        if self.deadline_at is not None and self.deadline_seconds is not None:
            raise PydanticCustomError("contradiction", "give deadline_at or deadline_seconds, not both")
        return self


class ChangedTimes(Body):
    """Times to change. A null removes a time; what is left out stays."""

    not_before: NotBefore | None = None
    queue_ttl_seconds: (
        Annotated[QueueTtlSeconds, Field(description="Counted again, from the change or from `not_before`.")]
        | None
    ) = None
    deadline_at: DeadlineAt | None = None


CHANGEABLE_TIMES = frozenset(ChangedTimes.model_fields)


@dataclass(frozen=True, slots=True)
class Timing:
    not_before: Instant | None = None
    queue_ttl_seconds: Seconds | None = None
    expires_at: Instant | None = None
    deadline_at: Instant | None = None
    expected_seconds: Seconds | None = None


_UNTIMED = Timing()
_TIMES = frozenset({"not_before", "queue_ttl_seconds", "deadline_at", "deadline_seconds", "expected_seconds"})


def timing_of(body: Timed, now: Instant) -> Timing:
    """The times of a new task. The queue TTL begins when the task may start; with dependencies, when they
    have ended.

    A `not_before` in the past has no effect. Raises Problem for a deadline that leaves no time to run, and
    for a time too far ahead.
    """
    if body.model_fields_set.isdisjoint(_TIMES):
        return _UNTIMED
    faults: list[Fault] = []
    not_before = _ahead("not_before", body.not_before, now, faults)
    name, deadline_at = "deadline_at", _ahead("deadline_at", body.deadline_at, now, faults)
    if body.deadline_seconds is not None:
        name, deadline_at = "deadline_seconds", now + body.deadline_seconds
    earliest = max(now, not_before or now)
    _check_deadline(name, deadline_at, earliest, now, faults)
    if faults:
        raise invalid(*faults)
    ttl = None if body.queue_ttl_seconds is None else Seconds(body.queue_ttl_seconds)
    return Timing(
        not_before=Instant(not_before) if not_before is not None and not_before > now else None,
        queue_ttl_seconds=ttl,
        expires_at=None if ttl is None or body.after else Instant(earliest + ttl),
        deadline_at=None if deadline_at is None else Instant(deadline_at),
        expected_seconds=None if body.expected_seconds is None else Seconds(body.expected_seconds),
    )


def changed_times(body: ChangedTimes, task: Task, now: Instant) -> dict[str, float | None]:
    """The given times, nulls included. Raises Problem as `timing_of` does."""
    given = body.model_fields_set & CHANGEABLE_TIMES
    if given and task.external is not None:
        detail = f"an external lease has no such time; renew it instead: POST /leases/{task.id}/renew"
        raise invalid(
            *(Fault(pointer=f"/{name}", detail=detail, code="not-of-a-lease") for name in sorted(given))
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
        _check_deadline(name, times.get("deadline_at", task.deadline_at), earliest, now, faults)
    if faults:
        raise invalid(*faults)
    return times


def _check_deadline(
    name: str, deadline_at: float | None, earliest: float, now: Instant, faults: list[Fault]
) -> None:
    if deadline_at is not None and deadline_at <= earliest:
        start = "the task may start" if earliest > now else "it was sent"
        detail = f"the deadline is {_in_words(earliest - deadline_at)} before {start}; give it time to run"
        faults.append(Fault(pointer=f"/{name}", detail=detail, code="deadline-passed"))


def _in_words(seconds: float) -> str:
    units = (("days", DAY_SECONDS), ("hours", 3600), ("minutes", 60))
    name, size = next((unit for unit in units if seconds >= 2 * unit[1]), ("s", 1))
    return f"{seconds / size:.0f} {name}"


def _ahead(name: str, time: datetime | None, now: Instant, faults: list[Fault]) -> float | None:
    if time is None:
        return None
    at = time.timestamp()
    if at > now + HORIZON_SECONDS:
        days, most = (at - now) / DAY_SECONDS, HORIZON_SECONDS / DAY_SECONDS
        detail = f"is {days:.0f} days ahead; at most {most:.0f} are allowed"
        faults.append(Fault(pointer=f"/{name}", detail=detail, code="too-far-ahead"))
        return None
    return at


async def stands_for(store: TaskStore, body: Timed) -> Mapping[TaskId, StoredState]:
    """The states of the tasks that it runs after, as far as they exist."""
    ids = {TaskId(wanted.task) for wanted in body.after if is_task_id(wanted.task)}
    return await store.states(sorted(ids)) if ids else {}


def dependencies_of(body: Timed, stands: Mapping[TaskId, StoredState], tenant: str) -> tuple[Dependency, ...]:
    """Raises Problem for a task that the tenant does not have, and for one that is named twice.

    Whether a dependency has ended is not checked: the leader does that when the new task is committed.
    """
    if not body.after:
        return ()
    ids = [TaskId(wanted.task) for wanted in body.after]
    faults: list[Fault] = []
    for at, id in enumerate(ids):
        if id not in stands or stands[id].tenant != tenant:
            detail = f'there is no task "{id}"; GET /tasks lists yours'
            faults.append(Fault(pointer=f"/after/{at}/task", detail=detail, code="unknown-task"))
        elif id in ids[:at]:
            detail = f"task {id} is already at /after/{ids.index(id)}; name it once"
            faults.append(Fault(pointer=f"/after/{at}/task", detail=detail, code="named-twice"))
    if faults:
        raise invalid(*faults)
    return tuple(
        Dependency(id, OnFailure(wanted.on_failure)) for id, wanted in zip(ids, body.after, strict=True)
    )
