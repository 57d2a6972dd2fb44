"""Findings about the fleet, the templates that fill it when it is idle, and the demand that an autoscaler
should know."""

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct

from gpubroker.wire.answered import Answered, AsOf, Time


class Diagnosis(Struct, frozen=True):
    """A fault of the fleet or of one of its machines, with its cause and a remedy."""

    kind: Annotated[str, Meta(description="A stable token; clients must expect new ones.")]
    subject: Annotated[str, Meta(description="The device, node, task, model or part that it is about.")]
    severity: Annotated[str, Meta(description="`critical`, `warning` or `note`.")]
    cause: Annotated[str, Meta(description="The cause in one sentence.")]
    evidence: Annotated[Mapping[str, str | float], Meta(description="The measured values.")]
    remedy: Annotated[str, Meta(description="A command, or advice where no command helps.")]


class Finding(Diagnosis, Answered, frozen=True):
    """A fault that was found in the fleet or on one of its machines."""

    first_seen_at: Annotated[
        Time,
        Meta(
            description="The time at which the fault began; if that is unknown, the time at which the leader "
            "noticed it."
        ),
    ]


class IdleTemplate(Answered, frozen=True):
    """A task that is submitted again and again as long as devices are idle."""

    name: str
    tenant: str
    weight: int
    max_running: int
    made_by: Annotated[
        str,
        Meta(description="The name of the token that made the template. The tasks belong to this token."),
    ]
    made_at: Time
    running: Annotated[int, Meta(description="The number of its tasks that hold resources now.")]
    waiting: int
    stopped: Annotated[
        str | None,
        Meta(
            description="The reason why no task of it is submitted now, such as a deleted token, or a task "
            "that failed; null while tasks are submitted."
        ),
    ]


class Capacity(Answered, frozen=True):
    """An amount of GPUs, CPU and host memory."""

    gpus: Annotated[
        int,
        Meta(description="The number of GPUs. Parts of GPUs are added up and rounded up to whole GPUs."),
    ]
    gpu_mb: int
    cpu: float
    memory_mb: int


class Unmet(Capacity, frozen=True):
    """The demand of tasks that wait for room."""

    tasks: int
    waiting_seconds: Annotated[float, Meta(description="The time that the longest waiting task has waited.")]


class UnmetGroup(Unmet, frozen=True):
    """The part of the demand that asks for the same pool and kinds of GPU."""

    pool: Annotated[str, Meta(description="The pool that the tasks name; empty if they name none.")]
    kinds: Annotated[
        tuple[str, ...],
        Meta(
            description="The kinds of GPU of which any would do; empty if any kind would, or if no GPU is "
            "asked for."
        ),
    ]


class SpareNode(Capacity, frozen=True):
    """A node on which nothing is held, and its capacity."""

    name: str
    kinds: tuple[str, ...]


class Spare(Capacity, frozen=True):
    """Nodes on which nothing is held, and which no waiting task could use."""

    nodes: tuple[SpareNode, ...]


class AutoscalingDemand(AsOf, frozen=True):
    """The demand that waiting tasks lack, the capacity that all tasks need together, and the capacity that
    could be given back."""

    unmet: Annotated[
        Unmet,
        Meta(description="The demands of tasks that wait for room, each in full, and of missing ranks."),
    ]
    used: Annotated[Capacity, Meta(description="The capacity that is held now: GPUs in whole or in part.")]
    needed: Annotated[
        Capacity, Meta(description="The capacity that the cluster should have: `used` and `unmet`.")
    ]
    groups: Annotated[tuple[UnmetGroup, ...], Meta(description="The demands of `unmet`, by pool and kinds.")]
    limited_tasks: Annotated[
        int,
        Meta(
            description="The number of tasks that wait for a quota or a limit, which another node would not "
            "help."
        ),
    ]
    spare: Spare
