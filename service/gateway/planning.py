"""What one asks of a fleet, and what the API answers."""

from collections.abc import Sequence
from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from service.gateway.advice import PlacementView, RunHolder
from service.gateway.body import Body, LabelKey
from service.gateway.schemas import SimulateTask

MOST_TASKS = 2000
"""Of all components together."""

MOST_MACHINES = 1000
MOST_GPUS = 10_000

_NAME = StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")


class PlannedComponent(SimulateTask):
    """So many tasks of one demand, all to run at once. As a submit; `run` may be left out."""

    name: Annotated[str, _NAME]
    count: Annotated[int, Field(ge=1, le=MOST_TASKS)] = 1


class PlannedGpus(Body):
    kind: Annotated[str, StringConstraints(min_length=1, max_length=100)] = "GPU"
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
    labels: Annotated[dict[LabelKey, str], Field(max_length=32)] = Field(default_factory=dict)


class PlanFleet(Body):
    components: Annotated[list[PlannedComponent], Field(min_length=1, max_length=100)]
    fleet: (
        Annotated[
            list[PlannedNodes],
            Field(min_length=1, max_length=100, description="Left out: the fleet that is there, as it is."),
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


class ComponentPlace(PlacementView):
    component: str
    displaces: Annotated[int, Field(description="Runs that would have to leave first.")]


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
    displaced: list[RunHolder]
    totals: TotalsView
    totals_without_colocation: Annotated[
        TotalsView, Field(description="If each role ran by itself that now takes turns with others.")
    ]
