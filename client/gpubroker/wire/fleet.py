"""What is wrong with the fleet, what fills it when it is idle, and what an autoscaler should know of it."""

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct

from gpubroker.wire.answered import Answered, AsOf, Time


class Diagnosis(Struct, frozen=True):
    """A fault of the fleet, or of a machine of it, with its cause and a remedy."""

    kind: Annotated[str, Meta(description="A stable token; clients must expect new ones.")]
    subject: Annotated[str, Meta(description="The device, node, task, model or part that it is about.")]
    severity: Annotated[str, Meta(description="`critical`, `warning` or `note`.")]
    cause: Annotated[str, Meta(description="A sentence.")]
    evidence: Annotated[Mapping[str, str | float], Meta(description="What was measured.")]
    remedy: Annotated[str, Meta(description="A command, or what to do where none helps.")]


class Finding(Diagnosis, Answered, frozen=True):
    """Something that is wrong with the fleet, or with a machine of it."""

    first_seen_at: Annotated[
        Time, Meta(description="Since when it is so; if that is not known, since the leader noticed.")
    ]


class IdleTemplate(Answered, frozen=True):
    """A task that is submitted again and again as long as devices are idle."""

    name: str
    tenant: str
    weight: int
    max_running: int
    made_by: Annotated[str, Meta(description="Name of the token that made it; its tasks are that token's.")]
    made_at: Time
    running: Annotated[int, Meta(description="How many of its tasks hold something now.")]
    waiting: int
    stopped: Annotated[
        str | None,
        Meta(
            description="Why nothing of it is submitted now, such as a deleted token, or a task that failed; "
            "null: it goes on."
        ),
    ]


class Capacity(Answered, frozen=True):
    gpus: Annotated[int, Meta(description="Whole ones, and as many as parts of GPUs fill.")]
    gpu_mb: int
    cpu: float
    memory_mb: int


class Unmet(Capacity, frozen=True):
    tasks: int
    waiting_seconds: Annotated[float, Meta(description="Of the task that has waited longest.")]


class UnmetGroup(Unmet, frozen=True):
    pool: Annotated[str, Meta(description="Empty: the tasks name none.")]
    kinds: Annotated[tuple[str, ...], Meta(description="Any of these; empty: any kind, or no GPU.")]


class SpareNode(Capacity, frozen=True):
    name: str
    kinds: tuple[str, ...]


class Spare(Capacity, frozen=True):
    """Nodes of which nothing is held, and which no waiting task could use."""

    nodes: tuple[SpareNode, ...]


class AutoscalingDemand(AsOf, frozen=True):
    """What waiting tasks lack, what all tasks need together, and what could be given back."""

    unmet: Annotated[
        Unmet, Meta(description="Of tasks that wait for room, each in full, and of missing ranks.")
    ]
    used: Annotated[Capacity, Meta(description="Held now: GPUs in whole or in part.")]
    needed: Annotated[Capacity, Meta(description="`used` and `unmet`: what the cluster should have.")]
    groups: Annotated[tuple[UnmetGroup, ...], Meta(description="`unmet` by pool and kinds.")]
    limited_tasks: Annotated[
        int, Meta(description="They wait for a quota or a limit, which no node would raise.")
    ]
    spare: Spare
