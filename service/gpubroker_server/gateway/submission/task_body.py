"""What clients may send. Strict: an unknown field, a wrong type or a number that is none is refused."""

import base64
import binascii
import re
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    JsonValue,
    StringConstraints,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from gpubroker_server.core.domain.policy import BAND_NAMES
from gpubroker_server.gateway.http.bodies import Body, DeadlineAt, InPieces, NotBefore, QueueTtlSeconds, Timed
from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.text import LINE, Labels, Name, Text, line
from gpubroker_server.gateway.submission.resources import Resources

ENV_BYTES = 32 * 1024
RESERVED_ENV = ("CUDA_", "NVIDIA_", "RAY_", "GPUBROKER_", "LD_", "PYTHON")
"""Variables that decide which devices and which code a process sees; the broker sets them, nobody else."""

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
_ENTRYPOINT = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"
PATTERNS_IN_WORDS = {
    LINE: "must be one line without control characters",
    _ENTRYPOINT: "must be module:function",
    NAME: "must be letters, digits, dots, dashes and underscores, at most 63",
}
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DAY_SECONDS = 24 * 3600


def _band_value(value: Any) -> Any:
    if not isinstance(value, str) or value.isdecimal():
        return value
    if value not in BAND_NAMES:
        names = ", ".join(BAND_NAMES)
        raise PydanticCustomError(
            "priority", "must be a number from 0 to 100 or one of {names}", {"names": names}
        )
    return BAND_NAMES[value]


def _decoded(value: str) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise PydanticCustomError(
            "base64", "must be standard base64 with padding, without line breaks"
        ) from None


def _free_to_set(env: dict[str, str]) -> dict[str, str]:
    for name in env:
        if _ENV_NAME.fullmatch(name) is None:
            raise PydanticCustomError(
                "env_name", 'variable name "{name}" must be letters, digits and _', {"name": name}
            )
        if name.startswith(RESERVED_ENV):
            prefixes = ", ".join(f"{prefix}*" for prefix in RESERVED_ENV)
            raise PydanticCustomError(
                "env_reserved",
                'variable "{name}" is set by the broker alone (as all of {prefixes}); leave it out',
                {"name": name, "prefixes": prefixes},
            )
    size = sum(len(name.encode()) + len(value.encode()) for name, value in env.items())
    if size > ENV_BYTES:
        raise PydanticCustomError(
            "env_size",
            "names and values take {size} bytes; at most {most}",
            {"size": size, "most": ENV_BYTES},
        )
    return env


Priority = Annotated[
    int,
    Field(ge=0, le=100),
    BeforeValidator(_band_value),
    WithJsonSchema(
        {
            "description": "0 (least) to 100, or the name of a band, which stands for its middle value.",
            "anyOf": [
                {"type": "integer", "minimum": 0, "maximum": 100},
                {"type": "string", "enum": list(BAND_NAMES)},
            ],
        }
    ),
]
Placement = Annotated[
    Literal["pack", "spread"],
    Field(description="Where the operator's policy prefers it, or on the emptiest devices."),
]
GraceSeconds = Annotated[float, Field(ge=0, le=3600)]
Env = Annotated[dict[str, Text], Field(max_length=64), AfterValidator(_free_to_set)]


class Entrypoint(Body):
    """A function that the operator allows, by name."""

    tag: ClassVar = "entrypoint"
    entrypoint: Annotated[
        str,
        StringConstraints(max_length=500, pattern=_ENTRYPOINT),
        Field(description="`module:function`; may be `async def`.", examples=["myteam.training:train"]),
    ]
    args: Annotated[list[JsonValue], Field(max_length=10_000)] = Field(default_factory=list)
    kwargs: dict[str, JsonValue] = Field(default_factory=dict)


class Command(Body):
    """A program and its arguments, without a shell. Needs the scope `tasks:command`."""

    tag: ClassVar = "command"
    command: Annotated[
        list[Annotated[Text, Field(max_length=131_071)]],
        Field(min_length=1, max_length=1000, examples=[["python", "train.py", "--epochs", "3"]]),
    ]
    working_directory: (
        Annotated[
            str,
            StringConstraints(max_length=4095, pattern=r"^/[^\x00]*$"),
            Field(description="An absolute path."),
        ]
        | None
    ) = None


class Function(Body):
    """A pickled function, stored and handed on unopened. Needs the scope `tasks:code`."""

    tag: ClassVar = "function"
    function: Annotated[
        bytes,
        BeforeValidator(lambda value: _decoded(value) if isinstance(value, str) else value),
        Field(min_length=1, description="Base64 of the cloudpickle of `(callable, args, kwargs)`."),
        WithJsonSchema({"type": "string", "contentEncoding": "base64", "minLength": 4}),
    ]
    python: Annotated[
        str,
        StringConstraints(pattern=r"^[0-9]{1,2}\.[0-9]{1,3}$"),
        Field(description="The Python minor that pickled it.", examples=["3.11"]),
    ]
    cloudpickle: (
        Annotated[
            str,
            StringConstraints(pattern=r"^[0-9]{1,4}(\.[0-9A-Za-z]{1,10}){0,3}$"),
            Field(description="The cloudpickle that pickled it.", examples=["3.1"]),
        ]
        | None
    ) = None
    runtime: Annotated[Literal[1], Field(description="Version of the protocol inside the process.")] = 1


def _kind_of(run: Any) -> str | None:
    """The one of the three that is there; None if it is not exactly one."""
    named = _TAGS & run.keys() if isinstance(run, dict) else _TAGS
    return next(iter(named)) if len(named) == 1 else None


_TAGS = frozenset({Entrypoint.tag, Command.tag, Function.tag})


Run = Annotated[
    Annotated[Entrypoint, Tag(Entrypoint.tag)]
    | Annotated[Command, Tag(Command.tag)]
    | Annotated[Function, Tag(Function.tag)],
    Discriminator(
        _kind_of,
        custom_error_type="run_kind",
        custom_error_message="must have exactly one of entrypoint, command, function",
    ),
]


StreamName = Annotated[
    str,
    line(100),
    Field(description="The operator's work stream by whose weight tasks alike are ordered."),
]
TimeoutSeconds = Annotated[float, Field(gt=0, le=30 * _DAY_SECONDS)]


class SubmitTask(Timed):
    """One task. Only `run` is required."""

    run: Run
    name: Name = ""
    priority: Priority | None = None
    model_type: Annotated[
        str,
        line(100),
        Field(description="The operator may have set defaults for it: priority, sizes, timeout, retries."),
    ] = ""
    stream: StreamName = ""
    resources: Resources = Resources()
    placement: Placement = "pack"
    max_retries: Annotated[int, Field(ge=0, le=100)] | None = None
    timeout_seconds: TimeoutSeconds | None = None
    grace_seconds: GraceSeconds | None = None
    labels: Labels = Field(default_factory=dict)
    env: Env = Field(default_factory=dict)
    result_format: Literal["json", "cloudpickle"] = "json"


MOST_TASKS = 10_000


class SubmitBatch(InPieces):
    """Many tasks; `key`, `after` and all else are as if each came alone."""

    pieces: ClassVar = "tasks"
    tasks: Annotated[
        list[bytes],
        Field(min_length=1, max_length=MOST_TASKS),
        WithJsonSchema(
            {
                "type": "array",
                "minItems": 1,
                "maxItems": MOST_TASKS,
                "items": {"$ref": "#/components/schemas/SubmitTask"},
            }
        ),
    ]
    all_or_nothing: Annotated[bool, Field(description="Store all of them, or none if one is refused.")] = (
        False
    )


class SimulateTask(SubmitTask):
    """As a submit; without `run`, a bare demand."""

    run: Run | None = None  # type: ignore[assignment]  # what is asked about need not be runnable


class CancelTask(Body):
    grace_seconds: Annotated[
        GraceSeconds | None, Field(description="Time between notice and force; left out: the task's own.")
    ] = None
    reason: Annotated[str, line(500)] = ""


class ChangeTask(Body):
    """What to change; what is left out stays. A null takes a time away."""

    priority: Priority | None = None
    held: Annotated[bool | None, Field(description="A held task is not planned until it is released.")] = None

    not_before: NotBefore | None = None
    queue_ttl_seconds: Annotated[
        QueueTtlSeconds | None, Field(description="Counted anew, from the change or from `not_before`.")
    ] = None
    deadline_at: DeadlineAt | None = None

    @model_validator(mode="after")
    def _say_something(self) -> Self:
        if self.priority is None and self.held is None and not self.model_fields_set & CHANGEABLE_TIMES:
            raise PydanticCustomError(
                "nothing_to_change",
                "give one or more of priority, held, not_before, queue_ttl_seconds, deadline_at",
            )
        return self


CHANGEABLE_TIMES = frozenset({"not_before", "queue_ttl_seconds", "deadline_at"})


class CreateToken(Body):
    name: Annotated[str, StringConstraints(pattern=NAME)]
    scopes: Annotated[list[Scope], Field(min_length=1, description="`*` is every scope.")]
    tenant: Annotated[
        str | None,
        StringConstraints(pattern=NAME),
        Field(description="Left out: the tenant of the token that asks."),
    ] = None
    max_priority: Annotated[int, Field(ge=0, le=100)] | None = None
    expires_in_seconds: Annotated[float, Field(gt=0, le=3650 * _DAY_SECONDS)] | None = None


class ShutDown(Body):
    stop_cluster: Annotated[
        bool, Field(description="Stop the local Ray and everything that runs on it as well.")
    ] = False
