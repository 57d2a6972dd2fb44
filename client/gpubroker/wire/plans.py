"""The answer whether components fit a fleet: places, missing amounts, and runs that would have to leave."""

from typing import Annotated

from msgspec import Meta

from gpubroker.wire.answered import Answered
from gpubroker.wire.explanations import OtherRun, Place
from gpubroker.wire.fleet import Capacity


class ComponentPlan(Answered, frozen=True):
    """The number of tasks of a component that have a place."""

    name: str
    count: int
    placed: int
    missing: Annotated[int, Meta(description="The number of them that have no place.")]
    reason: Annotated[
        str | None, Meta(description="The reason why the first of those has none; a stable token.")
    ]
    message: str | None


class ComponentPlace(Place, frozen=True):
    """The place where one task of a component, or one rank of it, would run."""

    component: str
    number: Annotated[int, Meta(description="The number of the task in its component, from 0.")]
    rank: Annotated[int | None, Meta(description="The rank of a gang.")]
    displaces: Annotated[
        int, Meta(description="The number of runs that would have to leave, or give up ranks, first.")
    ]


class DisplacedRun(OtherRun, frozen=True):
    """A run that would have to leave, or some ranks of a gang that goes on."""

    ranks: Annotated[
        tuple[int, ...] | None,
        Meta(description="The ranks that leave a gang that goes on; null if all of it leaves."),
    ]


class MissingGpus(Answered, frozen=True):
    kinds: Annotated[tuple[str, ...], Meta(description="The kinds of which any will do; empty for any kind.")]
    whole_gpus: int
    gpu_mb: Annotated[int, Meta(description="The memory for demands of less than whole GPUs.")]


class Missing(Answered, frozen=True):
    """The least that would have to be added: the amounts without a place, minus those left. If all are zero
    although the plan does not fit, enough is left but in pieces, or a limit or a quota prevents it."""

    gpus: tuple[MissingGpus, ...]
    cpu: float
    memory_mb: int


class Totals(Capacity, frozen=True):
    """The amounts that all components ask for together."""

    gpus: Annotated[int, Meta(description="The number of GPUs, whole or in part, one for each part.")]
    gpu_mb: Annotated[
        int,
        Meta(description="The memory of those that are not whole; fractions are of the largest usable GPU."),
    ]
    whole_gpus: int


class FleetPlan(Answered, frozen=True):
    """The verdict on a plan: whether it fits, what is missing, and which runs it would displace."""

    fits: bool
    message: str
    components: tuple[ComponentPlan, ...]
    places: tuple[ComponentPlace, ...]
    displaced: tuple[DisplacedRun, ...]
    missing: Missing
    totals: Totals
    totals_without_colocation: Annotated[
        Totals, Meta(description="The totals if roles did not share a process, but each ran by itself.")
    ]
