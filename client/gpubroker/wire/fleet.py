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
        Time, Meta(description="Since when it is so; if that is not known, since the leader noticed.")
    ]


class IdleTemplate(Answered, frozen=True):
    """A task that is submitted again and again as long as devices are idle."""

    name: str
    tenant: str
    weight: int
    max_running: int
    made_by: Annotated[
        str, Meta(description="The name of the token that made it; its tasks are that token's.")
    ]
    made_at: Time
    running: Annotated[int, Meta(description="The number of its tasks that hold something now.")]
    waiting: int
    stopped: Annotated[
        str | None,
        Meta(
            description="The reason why no task of it is submitted now, such as a deleted token, or a task "
            "that failed; null while it goes on."
        ),
    ]


class Capacity(Answered, frozen=True):
    gpus: Annotated[int, Meta(description="The number of whole GPUs, and of GPUs that parts fill.")]
    gpu_mb: int
    cpu: float
    memory_mb: int


class Unmet(Capacity, frozen=True):
    tasks: int
    waiting_seconds: Annotated[float, Meta(description="The time that the longest waiting task has waited.")]


class UnmetGroup(Unmet, frozen=True):
    pool: Annotated[str, Meta(description="The pool that the tasks name; empty if they name none.")]
    kinds: Annotated[
        tuple[str, ...], Meta(description="The kinds of which any will do; empty for any kind, or no GPU.")
    ]


class SpareNode(Capacity, frozen=True):
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
        Meta(description="The number of tasks that wait for a quota or a limit, which no node would raise."),
    ]
    spare: Spare
