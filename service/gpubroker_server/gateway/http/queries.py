"""What clients may ask for behind the question mark."""

import re
from typing import Annotated, ClassVar, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.gateway.http.bodies import LABEL_KEY
from gpubroker_server.gateway.http.text import LabelValue, Name
from gpubroker_server.gateway.leases.leases import LeaseStanding
from gpubroker_server.gateway.submission.task_body import Priority


class Query(BaseModel):
    """Query parameters. Unknown names are refused, except those that match `open_names`."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, frozen=True)
    open_names: ClassVar[re.Pattern[str] | None] = None


class PageQuery(Query):
    limit: Annotated[int, Field(ge=1, description="Above the server's maximum: so many as that.")] = 100
    cursor: Annotated[str | None, Field(max_length=200, description="`next_cursor` of the page before.")] = (
        None
    )


class TaskQuery(PageQuery):
    open_names: ClassVar = re.compile(rf"label\.{LABEL_KEY}")
    __pydantic_extra__: dict[str, LabelValue]

    state: Annotated[
        list[TaskState], Field(description="One or more states, repeated or separated by commas.")
    ] = []
    kind: Annotated[
        Literal["entrypoint", "command", "function", "external", "inference", "model"] | None,
        Field(
            description="Of what is run; `inference`: what a model is asked, `model`: what holds its memory, "
            "`external`: leases of what the broker does not start."
        ),
    ] = None
    min_priority: Priority | None = None
    max_priority: Priority | None = None
    name: Annotated[Name | None, Field(description="The exact name.")] = None
    model_type: Annotated[Name | None, Field(description="The exact model type.")] = None
    stream: Annotated[Name | None, Field(description="The exact work stream.")] = None
    after: Annotated[
        str | None, Field(max_length=100, description="Only tasks that run after the one with this id.")
    ] = None
    submitted_from: AwareDatetime | None = None
    submitted_before: AwareDatetime | None = None
    finished_from: AwareDatetime | None = None
    finished_before: AwareDatetime | None = None

    @property
    def labels(self) -> dict[str, str]:
        extra: dict[str, str] = self.model_extra or {}
        return {name.removeprefix("label."): value for name, value in extra.items()}


class LeaseQuery(PageQuery):
    state: Annotated[
        list[LeaseStanding], Field(description="One or more states, repeated or separated by commas.")
    ] = []
    holder: Annotated[Name | None, Field(description="The exact name of the holder.")] = None


class EstimateQuery(Query):
    subject: Annotated[
        str | None, Field(max_length=500, description="Only of this model type, name or entrypoint.")
    ] = None


class ServerQuery(Query):
    server: Annotated[
        str | None,
        Field(max_length=100, description="Which server is meant, where several have the model."),
    ] = None


class EventQuery(Query):
    after: Annotated[int, Field(ge=0, le=2**63 - 1, description="`next_after` of the page before.")] = 0
    limit: Annotated[int, Field(ge=1)] = 100


class WaitQuery(Query):
    timeout_seconds: Annotated[
        float, Field(ge=0, description="At most 60 seconds are waited, whatever is asked.")
    ] = 30.0


class LeaseWaitQuery(WaitQuery):
    state: Annotated[
        Literal[LeaseStanding.PENDING, LeaseStanding.HELD, LeaseStanding.STOPPING],
        Field(description="Wait for as long as it is in this state."),
    ] = LeaseStanding.PENDING
