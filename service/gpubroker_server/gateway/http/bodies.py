"""What every JSON body has in common, and the parts of one that say when a task runs."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

YEAR_SECONDS = 366 * 24 * 3600

LABEL_KEY = "[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?"
LabelKey = Annotated[str, StringConstraints(pattern=f"^{LABEL_KEY}$")]


class Body(BaseModel):
    """Defaults are immutable or made by a factory: pydantic would copy a `{}` for each request."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class InPieces(Body):
    """A body with a long list, whose pieces its route reads one by one: here they are JSON text."""

    pieces: ClassVar[str]
    """The name of the list."""


class BytesBehind(Body):
    """A body behind whose JSON other bytes may follow; a header says how long the JSON is then."""


class After(Body):
    """A task whose end another one waits for."""

    task: Annotated[str, Field(max_length=100)]
    on_failure: Literal["fail", "ignore"] = "fail"


NotBefore = Annotated[
    AwareDatetime, Field(description="It is not started earlier.", examples=["2026-11-21T22:00:00Z"])
]
QueueTtlSeconds = Annotated[
    float,
    Field(
        gt=0,
        le=YEAR_SECONDS,
        description="So long it waits for its first start, counted from when nothing but room is missing: "
        "from `not_before`, and from the end of what it runs after. Then it expires.",
    ),
]
DeadlineAt = Annotated[
    AwareDatetime,
    Field(description="If it still waits then it expires; if it runs it hears the stop notice."),
]
DeadlineSeconds = Annotated[
    float, Field(gt=0, le=YEAR_SECONDS, description="`deadline_at`, counted from the submit.")
]
ExpectedSeconds = Annotated[
    float,
    Field(gt=0, le=YEAR_SECONDS, description="How long one run takes. For forecasts; it limits nothing."),
]


def _spelled_out(value: Any) -> Any:
    return {"task": value} if isinstance(value, str) else value


_AFTER = {
    "anyOf": [
        {"type": "string", "maxLength": 100},
        {
            "type": "object",
            "properties": {
                "task": {"type": "string", "maxLength": 100},
                "on_failure": {"type": "string", "enum": ["fail", "ignore"], "default": "fail"},
            },
            "required": ["task"],
            "additionalProperties": False,
        },
    ]
}
Afters = Annotated[
    list[Annotated[After, BeforeValidator(_spelled_out), WithJsonSchema(_AFTER)]],
    Field(
        max_length=100,
        description="Tasks of yours that must have ended before it may start, by id. If one of them does not "
        "succeed it fails as well, unless `on_failure` is `ignore`.",
    ),
]


class Timed(Body):
    """A task as it is submitted: after which others it runs, when, and how long it waits for that."""

    after: Afters = Field(default_factory=list)
    not_before: NotBefore | None = None
    queue_ttl_seconds: QueueTtlSeconds | None = None
    deadline_at: DeadlineAt | None = None
    deadline_seconds: DeadlineSeconds | None = None
    expected_seconds: ExpectedSeconds | None = None

    @model_validator(mode="after")
    def _one_deadline(self) -> Self:
        if self.deadline_at is not None and self.deadline_seconds is not None:
            raise PydanticCustomError("contradiction", "give deadline_at or deadline_seconds, not both")
        return self
