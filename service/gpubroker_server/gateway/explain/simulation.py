"""What would become of a task, as the API tells it."""

from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.gateway.explain.advice import PlacementView, RunHolder
from gpubroker_server.gateway.explain.explanation import ExplainedFields
from gpubroker_server.gateway.http.problems import Fault
from gpubroker_server.gateway.status.views import Time
from gpubroker_server.gateway.submission.demand_views import DemandView
from gpubroker_server.gateway.tasks.estimates import SizingView


class RefusalView(TypedDict):
    """The problem with which a submit would be refused."""

    code: str
    detail: str
    errors: list[Fault]


class SimulationView(ExplainedFields):
    """What would become of a task if it were submitted now."""

    verdict: Annotated[
        str,
        Field(
            description="refused; starts: there is room; preempts: these would be asked to leave; or waits."
        ),
    ]
    refusal: RefusalView | None
    evaluated_at: Time
    priority: int | None
    resources: Annotated[DemandView | None, Field(description="With all defaults; null if refused early.")]
    sizing: Annotated[SizingView | None, Field(description="How `gpu_mb: learned` would be settled.")]
    places: Annotated[list[PlacementView], Field(description="Where it would start now.")]
    victims: Annotated[list[RunHolder], Field(description="Who would be asked to leave.")]
    queue_length: int
    as_of: Time
    age_seconds: float
    log_position: Annotated[int, Field(description="Of the newest event that this answer knows.")]
