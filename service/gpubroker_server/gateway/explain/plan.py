"""What one asks of a fleet, and what the API answers."""

from collections.abc import Sequence
from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from gpubroker_server.gateway.explain.advice import PlacementView, RunHolder
from gpubroker_server.gateway.http.bodies import Body
from gpubroker_server.gateway.http.text import KindName, Labels, line
from gpubroker_server.gateway.submission.resources import Resources
from gpubroker_server.gateway.submission.task_body import NAME, Placement, Priority, SimulateTask

MOST_TASKS = 2000
"""Of all components together."""

MOST_MACHINES = 1000
MOST_GPUS = 10_000

_NAME = StringConstraints(pattern=NAME)


class PlannedComponent(Body):
    """So many tasks of one demand, all to run at once; with `resources.bundles` so many gangs, each of which
    has all its ranks or none."""

    name: Annotated[str, _NAME]
    count: Annotated[int, Field(ge=1, le=MOST_TASKS)] = 1
    priority: Priority | None = None
    model_type: Annotated[str, line(100), Field(description="What the operator says is usual for it.")] = ""
    resources: Resources = Resources()
    placement: Placement = "pack"
    labels: Annotated[Labels, Field(description="For limits of how many tasks of a label run.")] = Field(
        default_factory=dict
    )

    def as_task(self) -> SimulateTask:
        """One of them."""
        return SimulateTask(
            name=self.name,
            priority=self.priority,
            model_type=self.model_type,
            resources=self.resources,
            placement=self.placement,
            labels=self.labels,
        )


class PlannedGpus(Body):
    kind: KindName = "GPU"
    memory_mb: Annotated[int, Field(ge=1, le=16_777_216, description="What may be leased of each.")]
    count: Annotated[int, Field(ge=1, le=64)] = 1


class PlannedNodes(Body):
    """So many machines that are alike."""

    name: Annotated[str, _NAME] = "node"
    count: Annotated[int, Field(ge=1, le=1000)] = 1
    cpu: Annotated[float, Field(ge=0, le=100_000)]
    memory_mb: Annotated[int, Field(ge=0, le=1_073_741_824, description="Left out: as much as is asked.")] = (
        1_073_741_824
    )
    gpus: Annotated[list[PlannedGpus], Field(max_length=16)] = Field(default_factory=list)
    labels: Labels = Field(default_factory=dict)


class PlanFleet(Body):
    components: Annotated[list[PlannedComponent], Field(min_length=1, max_length=100)]
    fleet: (
        Annotated[
            list[PlannedNodes],
            Field(min_length=1, max_length=100, description="Left out: the fleet that is there, as it is."),
        ]
        | None
    ) = None
    tenant: (
        Annotated[
            str,
            line(63, 1),
            Field(
                description="By whose quota and limits; for another one than the token's it needs the scope "
                "admin. Left out: the token's, or nobody's on a `fleet` that is described."
            ),
        ]
        | None
    ) = None

    @model_validator(mode="after")
    def _tell_apart(self) -> Self:
        named: dict[str, Sequence[PlannedComponent | PlannedNodes]]
        named = {"components": self.components, "fleet": self.fleet or []}
        for what, items in named.items():
            if len({item.name for item in items}) < len(items):
                raise PydanticCustomError("same_name", "{what} must have different names", {"what": what})
        machines = sum(nodes.count for nodes in self.fleet or [])
        gpus = sum(nodes.count * sum(gpu.count for gpu in nodes.gpus) for nodes in self.fleet or [])
        if machines > MOST_MACHINES or gpus > MOST_GPUS:
            most = {"machines": MOST_MACHINES, "gpus": MOST_GPUS}
            raise PydanticCustomError(
                "fleet_too_large", "fleet must have at most {machines} nodes and {gpus} GPUs", most
            )
        return self


class ComponentView(TypedDict):
    name: str
    count: int
    placed: int
    missing: Annotated[int, Field(description="So many of it have no place.")]
    reason: Annotated[str | None, Field(description="Why the first of those has none; a stable token.")]
    message: str | None


class ComponentPlace(PlacementView):
    component: str
    number: Annotated[int, Field(description="Which of the component's tasks, from 0.")]
    rank: Annotated[int | None, Field(description="Of a gang, which of its ranks.")]
    displaces: Annotated[int, Field(description="Runs that would have to leave first, or give up ranks.")]


class DisplacedRun(RunHolder):
    ranks: Annotated[
        list[int] | None,
        Field(description="Of a gang that goes on, those that leave; null: it leaves."),
    ]


class MissingGpus(TypedDict):
    kinds: Annotated[list[str], Field(description="One of these, as asked for; empty: any.")]
    whole_gpus: int
    gpu_mb: Annotated[int, Field(description="For those that need not be whole.")]


class MissingView(TypedDict):
    """So much more there would have to be, at least: what has no place, less what is left. If that is
    nothing, and yet it does not fit, enough is left, but in pieces, or a limit or a quota is in the way."""

    gpus: list[MissingGpus]
    cpu: float
    memory_mb: int


class TotalsView(TypedDict):
    gpus: Annotated[int, Field(description="GPUs, whole or in part, one for each part.")]
    whole_gpus: int
    gpu_mb: Annotated[int, Field(description="Of those that are not whole.")]
    cpu: float
    memory_mb: int


class FleetPlanView(TypedDict):
    """Whether it fits, what is missing, and what it would displace."""

    fits: bool
    message: str
    components: list[ComponentView]
    places: list[ComponentPlace]
    displaced: list[DisplacedRun]
    missing: MissingView
    totals: TotalsView
    totals_without_colocation: Annotated[
        TotalsView, Field(description="If each role ran by itself that now takes turns with others.")
    ]
