"""Models of a server as the API answers them."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.gateway.proxy.residency.residency import Residency
from gpubroker_server.gateway.status.quarantine_views import Time
from gpubroker_server.gateway.status.task_view import rfc3339_or_none
from gpubroker_server.gateway.status.views import AsOf
from gpubroker_server.gateway.submission.task_body import Priority

Standing = Literal["cold", "waiting", "loading", "resident", "draining"]

_OUTSIDE: Mapping[str, Standing] = {"READY": "resident", "LOADING": "loading", "UNLOADING": "draining"}
"""By what a server says whose models are not in the ledger."""

_STANDINGS: Mapping[TaskState, Standing] = {
    TaskState.PENDING: "waiting",
    TaskState.ADMITTED: "loading",
    TaskState.RUNNING: "resident",
    TaskState.STOPPING: "draining",
}


class ModelView(TypedDict):
    """A model on a server, and what it holds or waits for."""

    name: str
    server: str
    state: Annotated[
        Standing,
        Field(
            description="cold: not in memory, and nobody wants it; waiting: for room; loading; resident: it "
            "answers; draining: it answers what it has, and leaves."
        ),
    ]
    task: Annotated[
        str | None,
        Field(
            description="Holds its memory; `/tasks/{id}/explain` says why it waits. Null for a model that is "
            "cold, and for one of a server whose memory is not in the ledger."
        ),
    ]
    priority: Annotated[
        int | None, Field(description="Who has a higher one may have its memory; 100 if pinned.")
    ]
    pinned: bool
    gpu_mb: int | None
    node: str | None
    load_seconds: Annotated[float | None, Field(description="How long its last load took.")]
    loaded_at: Time | None
    wanted_until_at: Annotated[Time | None, Field(description="Null while it is pinned, or cold.")]
    reason: Annotated[
        str,
        Field(description="Why it cannot be loaded, or why its last load failed; else empty."),
    ]


class ModelList(AsOf):
    items: list[ModelView]


class LoadModel(BaseModel):
    model_config = ConfigDict(extra="forbid")

    priority: Priority | None = None
    """Left out: that of its configuration."""
    wait_seconds: Annotated[float, Field(ge=0, le=300)] = 0.0
    """So long the answer may take, if it is not there before."""


class PinModel(BaseModel):
    model_config = ConfigDict(extra="forbid")

    pinned: bool = True


def model_view(residency: Residency, name: str, task: Task | None, reason: str = "") -> ModelView:
    terms = None if task is None else task.model
    return {
        "name": name,
        "server": residency.rules.name,
        "state": "cold" if task is None else _STANDINGS.get(task.state, "cold"),
        "task": None if task is None else task.id,
        "priority": None if task is None else task.priority,
        "pinned": terms is not None and terms.pinned,
        "gpu_mb": None if task is None else task.demand.gpu_mb or 0,
        "node": None if task is None else task.node,
        "load_seconds": None if terms is None else terms.load_seconds,
        "loaded_at": None if task is None else rfc3339_or_none(task.started_at),
        "wanted_until_at": None if task is None else rfc3339_or_none(task.expires_at),
        "reason": reason,
    }


def outside_view(server: str, name: str, row: Mapping[str, object]) -> ModelView:
    """Of a server whose models are not in the ledger; `row` as in its index."""
    return {
        "name": name,
        "server": server,
        "state": _OUTSIDE.get(str(row.get("state")), "cold"),
        "task": None,
        "priority": None,
        "pinned": False,
        "gpu_mb": None,
        "node": None,
        "load_seconds": None,
        "loaded_at": None,
        "wanted_until_at": None,
        "reason": str(row.get("reason", "")),
    }
