"""Models of all servers: where each is, and whether it is in memory."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Literal, get_args
from urllib.parse import unquote

from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.core.domain.model_orders import IndexedModel
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.lifecycle.model_lifecycle import is_unasked
from gpubroker_server.gateway.http.problems import Problem
from gpubroker_server.gateway.http.routing import PARTS
from gpubroker_server.gateway.http.times import AsOf, Time, rfc3339_or_none
from gpubroker_server.gateway.parts import AppParts
from gpubroker_server.gateway.proxy.health_checks import index_of
from gpubroker_server.gateway.proxy.residency.residency import DESCRIBE_SECONDS, Residency
from gpubroker_server.gateway.proxy.residency.server_choice import Residencies
from gpubroker_server.gateway.proxy.residency.server_rules import place_fault
from gpubroker_server.gateway.proxy.servers import Server
from gpubroker_server.ports.fetch import NotFetched

ModelState = Literal["resident", "loading", "draining", "waiting", "cold"]
STATES: Sequence[ModelState] = get_args(ModelState)
"""In the order of a list: what has memory comes first."""

_STATES: Mapping[TaskState, ModelState] = {
    TaskState.PENDING: "waiting",
    TaskState.ADMITTED: "loading",
    TaskState.RUNNING: "resident",
    TaskState.STOPPING: "draining",
}
_STATES_OUTSIDE: Mapping[str, ModelState] = {
    "READY": "resident",
    "LOADING": "loading",
    "UNLOADING": "draining",
}
"""By the words of a server without models in the ledger."""


class ModelView(TypedDict):
    """A model on a server, and what it holds or waits for."""

    name: str
    server: str
    state: Annotated[
        ModelState,
        Field(
            description="cold: not in memory, and no request needs it; waiting: for room; loading; resident: "
            "it answers requests; draining: it answers the requests that it has, and is then unloaded."
        ),
    ]
    task: Annotated[
        str | None,
        Field(
            description="The task that holds its memory; `/tasks/{id}/explain` says why it waits. Null for a "
            "cold model, and on a server outside the ledger."
        ),
    ]
    priority: Annotated[int | None, Field(description="Higher ones may take its memory; 100 if pinned.")]
    pinned: bool
    gpu_mb: int | None
    node: str | None
    load_seconds: Annotated[float | None, Field(description="How long its last load took.")]
    loaded_at: Time | None
    wanted_until_at: Annotated[Time | None, Field(description="Null while it is pinned, or cold.")]
    reason: Annotated[str, Field(description="Why it cannot be loaded, or did not load; else empty.")]


class ModelList(AsOf):
    items: list[ModelView]


@dataclass(frozen=True, slots=True)
class ModelParts:
    """The models of servers in the ledger."""

    app: AppParts

    @property
    def residencies(self) -> Residencies:
        """Raises Problem not-found."""
        if self.app.residencies is None:
            raise Problem(
                "not-found", "no model server is in the ledger; give one of triton.servers its node"
            )
        return self.app.residencies

    def at(self, server: str) -> Residency:
        """Raises Problem not-found."""
        residency = self.residencies.at(server)
        if residency is None:
            known = ", ".join(residency.rules.name for residency in self.residencies)
            raise Problem("not-found", f'no server "{server[:100]}" is in the ledger; servers: {known}')
        return residency

    def holding(self, name: str, server: str | None) -> Residency | None:
        """Where the model is in memory, or waits for it. Raises Problem if that is more than one server."""
        if server is not None:
            return self.at(server)
        holding = self.residencies.holding(name)
        if len(holding) > 1:
            servers = [residency.rules.name for residency in holding]
            listed = ", ".join(servers)
            raise Problem("model-ambiguous", model=name[:100], servers=listed, first=servers[0])
        return holding[0] if holding else None

    def priority_of(self, name: str, server: str | None, asked: int | None = None) -> int:
        if asked is not None:
            return asked
        return (self.residencies if server is None else self.at(server)).priority_of(name)

    async def want(self, name: str, server: str | None, priority: int) -> tuple[Residency, Task]:
        """By hand, so it is loaded even if that has just failed. Raises Problem, UnknownModel."""
        self.residencies.try_again(name)
        if server is None:
            return await self.residencies.want(name, priority)
        residency = self.at(server)
        return residency, await residency.want(name, priority)

    async def view(self, name: str, server: str | None) -> ModelView:
        """At the server that holds it, else at the first one that has it in its repository. Raises Problem
        not-found."""
        holding = self.holding(name, server)
        for residency in self.residencies if holding is None else [holding]:
            task, fault = residency.of(name), place_fault(self.app.world, residency.rules)
            if task is not None:
                return _view(residency.rules.name, name, task, fault)
            known = await residency.repository()
            if name in (known or ()) or name in residency.rules.models:
                return _view(residency.rules.name, name, None, fault or _reason(residency, known, name))
        raise no_such_model(name, "it is in no repository")

    async def views(self, residency: Residency) -> list[ModelView]:
        known, held = await residency.repository(), {task.name: task for task in residency.holders()}
        names = sorted({*(known or ()), *held, *residency.rules.models})
        fault = place_fault(self.app.world, residency.rules)
        return [
            _view(residency.rules.name, name, held.get(name), fault or _reason(residency, known, name))
            for name in names
        ]


Parts = Annotated[ModelParts, PARTS]


async def outside_views(server: Server) -> list[ModelView]:
    """Empty while the server does not answer. If a model has several versions, a ready one counts."""
    with suppress(NotFetched):
        rows = await index_of(server, DESCRIBE_SECONDS) or []
        rows = sorted(rows, key=lambda row: row.get("state") == "READY")
        known = {row.get("name", ""): row for row in rows}
        return [_outside_view(server.name, name, known[name]) for name in sorted(known)]
    return []


def no_such_model(name: str, why: str) -> Problem:
    return Problem("not-found", f'there is no model "{unquote(name)[:100]}": {why}; GET /models lists them')


def _reason(residency: Residency, known: Mapping[str, IndexedModel] | None, name: str) -> str:
    """Why the model is in its state, in the server's words."""
    if known is None:
        return f"server {residency.rules.name} does not answer; its models stay leased until it does"
    return known[name].reason if name in known else ""


def _view(server: str, name: str, task: Task | None, reason: str = "") -> ModelView:
    terms = None if task is None else task.model
    return {
        "name": name,
        "server": server,
        "state": "cold" if task is None or is_unasked(task) else _STATES.get(task.state, "cold"),
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


def _outside_view(server: str, name: str, row: Mapping[str, object]) -> ModelView:
    """`row` is from the server's index."""
    view = _view(server, name, None, str(row.get("reason", "")))
    return {**view, "state": _STATES_OUTSIDE.get(str(row.get("state")), "cold")}
