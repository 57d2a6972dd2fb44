"""Schema of a submitted task: what it runs, and all its options."""

import base64
import binascii
import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from gpubroker.wire.bounds import MOST_GRACE_SECONDS, MOST_PRIORITY, MOST_RETRIES
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

from gpubroker_server.core.control.idle_templates import NAME_PREFIX
from gpubroker_server.core.domain.policy import BAND_NAMES, PRIORITIES_IN_WORDS, priority_of
from gpubroker_server.core.domain.task import ON_FAILURE, RetryOn
from gpubroker_server.core.domain.units import DAY_SECONDS
from gpubroker_server.gateway.submission.resources import NamedResources, ProfileName
from gpubroker_server.gateway.submission.timing import Timed
from gpubroker_server.http.bodies import ENTRYPOINT, Body, Labels, Name, Text, line

ENV_BYTES = 32 * 1024
RESERVED_ENV = ("CUDA_", "NVIDIA_", "RAY_", "GPUBROKER_", "LD_", "PYTHON")
"""Prefixes of variables that only the broker sets, because they decide which devices and which code a process
uses."""

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _band_value(value: Any) -> Any:
    if not isinstance(value, str) or value.isdecimal():
        return value
    if (priority := priority_of(value)) is None:
        raise PydanticCustomError("priority", f"must be {PRIORITIES_IN_WORDS}")
    return priority


def decoded(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise PydanticCustomError(
            "base64", "must be standard base64 with padding, without line breaks"
        ) from None


def _check_env(env: dict[str, str]) -> dict[str, str]:
    for name in env:
        if _ENV_NAME.fullmatch(name) is None:
            raise PydanticCustomError(
                "env_name", 'variable name "{name}" must be letters, digits and _', {"name": name}
            )
        if name.startswith(RESERVED_ENV):
            prefixes = ", ".join(f"{prefix}*" for prefix in RESERVED_ENV)
            raise PydanticCustomError(
                "env_reserved",
                'only the broker sets variable "{name}" (and all of {prefixes}); leave it out',
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


def _not_reserved(name: str) -> str:
    if name.startswith(NAME_PREFIX):
        raise PydanticCustomError(
            "reserved_name", "only tasks of idle templates have names that begin with idle/"
        )
    return name


Priority = Annotated[
    int,
    Field(ge=0, le=MOST_PRIORITY),
    BeforeValidator(_band_value),
    WithJsonSchema(
        {
            "description": f"0 (lowest) to {MOST_PRIORITY}, or the name of a band, which means its middle "
            "value.",
            "anyOf": [
                {"type": "integer", "minimum": 0, "maximum": MOST_PRIORITY},
                {"type": "string", "enum": list(BAND_NAMES)},
            ],
        }
    ),
]
Placement = Annotated[
    Literal["pack", "spread"],
    Field(
        description="`pack`: as the operator's policy places; `spread`: on the devices with the fewest "
        "holders, then those of which the smallest share is taken, then on the node with the fewest runs."
    ),
]
GraceSeconds = Annotated[float, Field(ge=0, le=MOST_GRACE_SECONDS)]
TimeoutSeconds = Annotated[float, Field(gt=0, le=30 * DAY_SECONDS)]
MaxRetries = Annotated[int, Field(ge=0, le=MOST_RETRIES)]
RetryCauses = Annotated[
    list[RetryOn],
    Field(
        min_length=1,
        description="What uses a retry: `failure`, `timeout` (its time limit ended the run), or both. Left "
        "out: `failure`. Of an array it is about items and their limits, and left out it is both.",
    ),
]
StreamName = Annotated[
    str, line(100), Field(description="The operator's work stream; its weight orders otherwise equal tasks.")
]


class Entrypoint(Body):
    """A function that the operator allows, by name."""

    tag: ClassVar = "entrypoint"
    entrypoint: Annotated[
        str,
        StringConstraints(max_length=500, pattern=ENTRYPOINT),
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
    """A pickled function, which the service stores and never unpickles. Needs the scope `tasks:code`."""

    tag: ClassVar = "function"
    function: Annotated[
        bytes,
        BeforeValidator(decoded),
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
            Field(description="The cloudpickle version that pickled it.", examples=["3.1"]),
        ]
        | None
    ) = None
    objects: Annotated[
        list[Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]],
        Field(max_length=10_000, description="Ids of the objects that its arguments name."),
    ] = Field(default_factory=list)
    runtime: Annotated[Literal[1], Field(description="Version of the protocol inside the process.")] = 1


def causes_of(
    given: Sequence[RetryOn] | None, otherwise: Sequence[RetryOn] = ON_FAILURE
) -> tuple[RetryOn, ...]:
    """Return each cause once, in the order of RetryOn. `otherwise` holds if `given` is None."""
    wanted = otherwise if given is None else given
    if wanted is ON_FAILURE:
        return ON_FAILURE
    causes = tuple(cause for cause in RetryOn if cause in wanted)
    # An event leaves this field out only if it is the default object itself.
    return ON_FAILURE if causes == ON_FAILURE else causes


def _check_pattern(pattern: str) -> str:
    parts = pattern.split("/")
    if pattern.startswith("/") or ".." in parts or "" in parts[:-1]:
        raise PydanticCustomError(
            "output-pattern", "must be the path of files below the directory, such as runs/** or model.pt"
        )
    return pattern


_TAGS = frozenset({Entrypoint.tag, Command.tag, Function.tag})


def _run_kind(run: Any) -> str | None:
    """Return the kind of the run; None unless the run has exactly one of entrypoint, command and function."""
    named = _TAGS & run.keys() if isinstance(run, dict) else _TAGS
    return next(iter(named)) if len(named) == 1 else None


Run = Annotated[
    Annotated[Entrypoint, Tag(Entrypoint.tag)]
    | Annotated[Command, Tag(Command.tag)]
    | Annotated[Function, Tag(Function.tag)],
    Discriminator(
        _run_kind,
        custom_error_type="run_kind",
        custom_error_message="must have exactly one of entrypoint, command, function",
    ),
]


def _named_environment(given: Any) -> Any:
    return {"name": given} if isinstance(given, str) else given


class GivenEnvironment(Body):
    """The interpreter and the packages of the runs: one of python, conda, requirements, project and
    container. `python` beside requirements or project is a version. Needs the scope `tasks:code` or
    `tasks:command`."""

    name: Annotated[
        str, line(100), Field(description="An environment of the operator, in place of all other fields.")
    ] = ""
    python: Annotated[
        Text,
        Field(
            max_length=4095,
            description="The path of an interpreter, or of a virtual environment, on the nodes; or the "
            "version of the Python to install packages for. Left out: the version that pickled the function, "
            "or that of the service.",
            examples=["/opt/envs/rl/bin/python", "3.12"],
        ),
    ] = ""
    conda: Annotated[
        Text, Field(max_length=4095, description="The name or path of a conda environment on the nodes.")
    ] = ""
    requirements: Annotated[
        list[Annotated[Text, Field(max_length=2000)]],
        Field(
            max_length=1000,
            description="Packages that each node installs once, as lines of a requirements.txt.",
            examples=[["numpy>=2", "torch==2.8.0"]],
        ),
    ] = Field(default_factory=list)
    project: Annotated[
        str,
        StringConstraints(pattern="^[0-9a-f]{64}$"),
        Field(description="Id of the object with the archive (tar) of a pyproject.toml and its uv.lock."),
    ] = ""
    container: Annotated[
        Text, Field(max_length=500, description="A container image, where the operator allows containers.")
    ] = ""


class SubmitTask(Timed):
    """One task. Only `run` is required."""

    run: Run
    name: Annotated[Name, AfterValidator(_not_reserved)] = ""
    priority: Priority | None = None
    model_type: Annotated[
        str,
        line(100),
        Field(description="Selects the operator's defaults of priority, sizes, timeout and retries."),
    ] = ""
    profile: ProfileName = ""
    max_concurrency: Annotated[
        int | None,
        Field(ge=1, le=100_000),
        Field(description="For the task's own code, in GPUBROKER_MAX_CONCURRENCY. Left out: the profile's."),
    ] = None
    stream: StreamName = ""
    resources: NamedResources
    placement: Placement = "pack"
    max_retries: MaxRetries | None = None
    retry_on: RetryCauses | None = None
    timeout_seconds: TimeoutSeconds | None = None
    grace_seconds: GraceSeconds | None = None
    labels: Labels = Field(default_factory=dict)
    env: Annotated[dict[str, Text], Field(max_length=64), AfterValidator(_check_env)] = Field(
        default_factory=dict
    )
    result_format: Literal["json", "cloudpickle"] = "json"
    upload: Annotated[
        str,
        StringConstraints(pattern="^[0-9a-f]{64}$"),
        Field(
            description="Id of the object with the archive (tar) of a directory. Each run works in a copy of "
            "its own, which is also first on Python's path."
        ),
    ] = ""
    outputs: Annotated[
        tuple[Annotated[Text, Field(min_length=1, max_length=255), AfterValidator(_check_pattern)], ...],
        Field(
            max_length=64,
            description="Patterns of files below the directory of the run, such as `runs/**`, which are "
            "collected at the end of each attempt. `*` and `?` stand for characters of one name, `**` for "
            "any directories.",
        ),
    ] = ()
    environment: Annotated[
        GivenEnvironment | None,
        BeforeValidator(_named_environment),
        Field(
            description="The interpreter and the packages of its runs; a string is the name of an "
            "environment of the operator. Left out: that of the profile or the model type, or the service's."
        ),
    ] = None
    ray: Annotated[
        Literal["", "private", "shared"],
        Field(
            description="`private`: the task, or the whole gang, is a Ray cluster of what it leases, and its "
            "command runs once, as the driver. `shared`: the command may use the service's own Ray, if the "
            "operator allows that."
        ),
    ] = ""
    ray_dashboard: Annotated[
        bool, Field(description="The private Ray cluster has a dashboard, on the node of rank 0.")
    ] = False
    held: Annotated[
        bool, Field(description="It is not planned until it is released: `PATCH` with `held: false`.")
    ] = False

    @model_validator(mode="after")
    def _check_directory(self) -> Self:
        """Check that a run does not have two directories, and that it has one if its files are collected.
        Raises PydanticCustomError."""
        if not (self.upload or self.outputs):
            return self
        directory = self.run.working_directory if isinstance(self.run, Command) else None
        if self.upload and directory:
            raise PydanticCustomError(
                "contradiction", "give upload or working_directory, not both: a run works in one directory"
            )
        if self.outputs and not (self.upload or directory):
            raise PydanticCustomError(
                "contradiction",
                "outputs are files below a directory; give upload, or the working_directory of a command",
            )
        return self


class SimulateTask(SubmitTask):
    """A task as in a submit; without `run` it is only a demand."""

    run: Run | None = None  # type: ignore[assignment]  # A simulation needs no run.
