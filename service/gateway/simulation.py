"""What would become of a task, as the API tells it."""

from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from service.gateway.advice import AdviceFields, PlacementView, RunHolder
from service.gateway.demand_views import DemandView
from service.gateway.estimates import SizingView
from service.gateway.explanation import BlockerView, DeviceVerdictView
from service.gateway.problems import Fault
from service.gateway.views import Time


class RefusalView(TypedDict):
    """The problem with which a submit would be refused."""

    code: str
    detail: str
    errors: list[Fault]


class SimulationView(AdviceFields):
    """What would become of a task if it were submitted now."""

    verdict: Annotated[
        str,
        Field(
            description="refused; starts: there is room; preempts: these would be asked to leave; or waits."
        ),
    ]
    refusal: RefusalView | None
    reason: Annotated[str | None, Field(description="Of the most structural blocker, as in explain.")]
    message: str
    evaluated_at: Time
    priority: int | None
    resources: Annotated[DemandView | None, Field(description="With all defaults; null if refused early.")]
    sizing: Annotated[SizingView | None, Field(description="How `gpu_mb: learned` would be settled.")]
    places: Annotated[list[PlacementView], Field(description="Where it would start now.")]
    victims: Annotated[list[RunHolder], Field(description="Who would be asked to leave.")]
    position: Annotated[int | None, Field(description="The place in the queue it would have; 1 is next.")]
    queue_length: int
    blockers: list[BlockerView]
    devices: list[DeviceVerdictView]
    as_of: Time
    age_seconds: float
    log_position: Annotated[int, Field(description="Of the newest event that this answer knows.")]
