"""The filter of tasks that the list of tasks and the cancelling of many tasks share."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.gateway.status.records import TaskRecords
from gpubroker_server.gateway.submission.task_body import Priority
from gpubroker_server.http.bodies import Name
from gpubroker_server.http.identity import Identity
from gpubroker_server.http.times import GivenTime

MAX_STANDS = 1000
"""The largest number of rows that are read in one query."""


class TaskSelection(BaseModel):
    """A task must match all that are given."""

    state: Annotated[
        list[TaskState], Field(description="One or more states; in a query repeated or separated by commas.")
    ] = []
    kind: Annotated[
        Literal["entrypoint", "command", "function", "external", "inference", "model"] | None,
        Field(
            description="What it runs; `inference`: a request to a model, `external`: a lease for what the "
            "broker does not start, `model`: the holder of a model's memory, which is listed only so, as "
            "`GET /models` shows models. Left out: all tasks."
        ),
    ] = None
    min_priority: Priority | None = None
    max_priority: Priority | None = None
    name: Annotated[Name | None, Field(description="The exact name.")] = None
    tenant: Annotated[
        str | None,
        Field(
            max_length=100,
            description="Another tenant's tasks, or `*` for those of all: needs the scope `admin`.",
        ),
    ] = None
    model_type: Annotated[Name | None, Field(description="The exact model type.")] = None
    stream: Annotated[Name | None, Field(description="The exact work stream.")] = None
    after: Annotated[str | None, Field(max_length=100, description="Only tasks that run after this one.")] = (
        None
    )
    submitted_from: GivenTime | None = None
    submitted_before: GivenTime | None = None
    finished_from: GivenTime | None = None
    finished_before: GivenTime | None = None

    async def filters(self, records: TaskRecords, identity: Identity) -> dict[str, Any]:
        """Return the fields of a TaskFilter, without its labels. Raises Problem not-found if there is no task
        `after`, and Problem forbidden if the token may not list the tenant's tasks."""
        runs_after = None if self.after is None else (await records.find(identity, self.after)).task.id
        return {
            "tenant": identity.whose(self.tenant, "tasks"),
            "states": tuple(self.state),
            "kind": self.kind,
            "min_priority": self.min_priority,
            "max_priority": self.max_priority,
            "name": self.name,
            "model_type": self.model_type,
            "stream": self.stream,
            "runs_after": runs_after,
            "submitted_from": _instant(self.submitted_from),
            "submitted_before": _instant(self.submitted_before),
            "finished_from": _instant(self.finished_from),
            "finished_before": _instant(self.finished_before),
        }


def _instant(time: datetime | None) -> Instant | None:
    return None if time is None else Instant(time.timestamp())
