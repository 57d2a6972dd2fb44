"""The times of a task in a body: its start times, its deadline, and the tasks that it runs after."""

from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from gpubroker_server.core.admission.facts import INVALID, Refused
from gpubroker_server.core.admission.times import changed_times as change_times
from gpubroker_server.core.domain.reasons import Refusal
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import DAY_SECONDS, Instant
from gpubroker_server.http.bodies import Body
from gpubroker_server.http.faults import problem_of
from gpubroker_server.http.times import GivenTime

YEAR_SECONDS = 366 * DAY_SECONDS


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
    GivenTime, Field(description="It does not start earlier.", examples=["2026-11-21T22:00:00Z"])
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
    GivenTime, Field(description="A waiting task expires then; a running task gets the stop notice.")
]


class Timed(Body):
    """Fields that say when a task runs."""

    after: Annotated[
        list[Annotated[After, BeforeValidator(_spelled_out), WithJsonSchema(_AFTER)]],
        Field(
            max_length=100,
            description="Your tasks that must have ended before it may start, by id; in a batch also tasks "
            "before it, by index (from 0) or by name. If one of them does not succeed it fails as well, "
            "unless `on_failure` is `ignore`. The id of an array or a worker set means all of it; an array "
            "succeeds if all its items do.",
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


def changed_times(body: ChangedTimes, task: Task, now: Instant) -> dict[str, float | None]:
    """Return the times that the body gives, including nulls, by field. Raises Problem for a deadline that
    leaves no time to run, for a time too far ahead, and for an external lease."""
    requested: dict[str, float | None] = {}
    for name in CHANGEABLE_TIMES & body.model_fields_set:
        value = getattr(body, name)
        requested[name] = value.timestamp() if isinstance(value, datetime) else value
    faults: list[Refusal] = []
    times = change_times(requested, task, now, faults)
    if faults:
        raise problem_of(Refused(INVALID, faults=tuple(faults)))
    return times
