"""The models of all servers: the server of each model, and whether the model is in memory."""

from asyncio import gather
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated
from urllib.parse import unquote

from gpubroker.wire.answered import Time
from gpubroker.wire.models import ModelState, ServedModel
from msgspec import Struct
from msgspec.structs import replace

from gpubroker_server.core.domain.model_orders import IndexedModel
from gpubroker_server.core.domain.model_orders import ModelState as ServerState
from gpubroker_server.core.domain.task import Task, TaskState, model_of
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.core.world.model_index import is_unasked
from gpubroker_server.core.world.server_places import place_fault
from gpubroker_server.gateway.parts import AppParts
from gpubroker_server.http.problems import Problem
from gpubroker_server.http.routing import app_part
from gpubroker_server.ports.backends import NotFetched
from gpubroker_server.ports.model_servers import KnownServer, ModelResidencies, ModelResidency

_STATES: Mapping[TaskState, ModelState] = {
    TaskState.PENDING: "waiting",
    TaskState.ADMITTED: "loading",
    TaskState.RUNNING: "resident",
    TaskState.STOPPING: "draining",
}
_STATES_OUTSIDE: Mapping[ServerState, ModelState] = {
    ServerState.READY: "resident",
    ServerState.LOADING: "loading",
    ServerState.UNLOADING: "draining",
    ServerState.ABSENT: "cold",
}
"""State in a server's own list -> the state that answers show, for servers outside the ledger."""

_INDEX_SECONDS = Seconds(5.0)
"""How long a server may take to list its models."""

_LOAD_SECONDS = Seconds(300.0)
"""How long a server outside the ledger may take to load or unload a model. It answers when that is done."""

KEPT_OUTSIDE = "its server is outside the ledger, so nothing takes its memory: it stays until it is unloaded"


class ModelParts(Struct, frozen=True):
    """The models of servers in the ledger."""

    app: AppParts

    @property
    def residencies(self) -> ModelResidencies:
        """The servers in the ledger. Raises Problem not-found if there is none."""
        if self.app.residencies is None:
            raise Problem(
                "not-found", "no model server is in the ledger; give one of triton.servers its node"
            )
        return self.app.residencies

    def at(self, server: str) -> ModelResidency:
        """Return the models of one server. Raises Problem not-found if no such server is in the ledger."""
        residency = self.residencies.at(server)
        if residency is None:
            servers = ", ".join(residency.rules.name for residency in self.residencies)
            raise Problem("not-found", f'no server "{server[:100]}" is in the ledger; servers: {servers}')
        return residency

    def holding(self, name: str, server: str | None) -> ModelResidency | None:
        """Return the server on which the model is in memory or waits for memory; None if there is none.
        Raises Problem model-ambiguous if there are several."""
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

    async def want(self, name: str, server: str | None, priority: int) -> tuple[ModelResidency, Task]:
        """Ask for a model to be loaded, even if its last load has just failed. Returns its server and the
        task that holds its memory. Raises UnknownModel if there is no such model, and Problem if it cannot be
        loaded."""
        self.residencies.try_again(name)
        if server is None:
            return await self.residencies.want(name, priority)
        residency = self.at(server)
        return residency, await residency.want(name, priority)

    async def model(self, name: str, server: str | None) -> ServedModel:
        """Return the view of a model at the server that holds it, otherwise at the first server that has it
        in its repository. Raises Problem not-found if no server has it."""
        holding = self.holding(name, server)
        for residency in self.residencies if holding is None else [holding]:
            task, fault = residency.of(name), place_fault(self.app.world, residency.rules)
            if task is not None:
                return _shown(residency.rules.name, name, task, fault)
            if (ensemble := residency.ensemble_of(name)) is not None:
                return _step(residency.rules.name, name, ensemble)
            listed = await residency.repository()
            if name in (listed or ()) or name in residency.rules.models:
                return _shown(residency.rules.name, name, None, fault or _reason(residency, listed, name))
        raise no_such_model(name, "it is in no repository")

    async def outside_of(self, name: str, server: str | None) -> KnownServer | None:
        """Return the server outside the ledger to which a request about a model goes: the server that the
        request names, or the server that has the model if no server in the ledger has it. Returns None if the
        request is about a server in the ledger. Raises Problem not-found if no server has the model, and
        Problem model-ambiguous if several have it."""
        outside = [candidate for candidate in self.app.outside if server in (None, candidate.name)]
        if server is not None:
            return outside[0] if outside else None
        if not outside or (self.app.residencies is not None and await self._is_in_ledger(name)):
            return None
        rows = [
            row
            for models in await gather(*map(models_outside, outside))
            for row in models
            if row.name == name
        ]
        names = [row.server for row in rows if row.state != "cold"] or [row.server for row in rows]
        if len(names) > 1:
            raise Problem("model-ambiguous", model=name[:100], servers=", ".join(names), first=names[0])
        if not names and self.app.residencies is None:
            raise no_such_model(name, "it is in no repository")
        return next((candidate for candidate in outside if candidate.name in names), None)

    async def _is_in_ledger(self, name: str) -> bool:
        try:
            await self.model(name, None)
        except Problem as problem:
            return problem.code != "not-found"
        return True

    async def model_outside(self, server: KnownServer, name: str) -> ServedModel:
        """Return the view of a model on a server outside the ledger. Raises Problem not-found if the server
        does not list it."""
        for row in await models_outside(server):
            if row.name == name:
                return row
        raise no_such_model(name, f"server {server.name} has none in its repository, or does not answer")

    async def models(self, residency: ModelResidency) -> list[ServedModel]:
        """Return the views of all models of a server in the ledger, by name."""
        listed, held = await residency.repository(), {task.name: task for task in residency.holders()}
        names = sorted({*(listed or ()), *held, *residency.rules.models})
        fault = place_fault(self.app.world, residency.rules)
        models: list[ServedModel] = []
        for name in names:
            ensemble = None if name in held else residency.ensemble_of(name)
            if ensemble is not None:
                models.append(_step(residency.rules.name, name, ensemble))
            else:
                reason = fault or _reason(residency, listed, name)
                models.append(_shown(residency.rules.name, name, held.get(name), reason))
        return models


Parts = Annotated[ModelParts, app_part(ModelParts)]


async def models_outside(server: KnownServer) -> list[ServedModel]:
    """Return the views of the models of a server outside the ledger; empty if the server does not answer."""
    with suppress(NotFetched):
        listed = await server.index(_INDEX_SECONDS) or {}
        return [_outside(server.name, listed[name]) for name in sorted(listed)]
    return []


async def change_outside(server: KnownServer, model: str, *, loads: bool) -> ServedModel:
    """Have a server outside the ledger load or unload a model, and return the view of the model afterwards.
    Raises Problem if the server fails or refuses."""
    await server.change(model, loads=loads, within_seconds=_LOAD_SECONDS)
    state: ModelState = "resident" if loads else "cold"
    for row in await models_outside(server):
        if row.name == model:
            return row
    return replace(_shown(server.name, model, None), state=state)


def no_such_model(name: str, why: str) -> Problem:
    return Problem("not-found", f'there is no model "{unquote(name)[:100]}": {why}; GET /models lists them')


def _reason(residency: ModelResidency, known: Mapping[str, IndexedModel] | None, name: str) -> str:
    """Return a text that says why the model is in its state, in the words of the server."""
    if known is None:
        return f"server {residency.rules.name} does not answer; its models stay leased until it does"
    return known[name].reason if name in known else ""


def _shown(server: str, name: str, task: Task | None, reason: str = "") -> ServedModel:
    terms = None if task is None else model_of(task)
    return ServedModel(
        name=name,
        server=server,
        state="cold" if task is None or is_unasked(task) else _STATES.get(task.state, "cold"),
        task=None if task is None else task.id,
        priority=None if task is None else task.priority,
        pinned=terms is not None and terms.pinned,
        gpu_mb=None if task is None else task.demand.gpu_mb or 0,
        node=None if task is None else task.node,
        load_seconds=None if terms is None else terms.load_seconds,
        loaded_at=None if task is None else Time.at_or_none(task.started_at),
        wanted_until_at=None if task is None else Time.at_or_none(task.expires_at),
        reason=reason,
    )


def _step(server: str, name: str, ensemble: Task) -> ServedModel:
    """Return the view of a model that is in memory as a step of an ensemble. The task of the ensemble holds
    the memory of both."""
    reason = f"it is a step of the ensemble {ensemble.name}, which holds its memory"
    return replace(_shown(server, name, ensemble, reason), gpu_mb=0)


def _outside(server: str, model: IndexedModel) -> ServedModel:
    return replace(_shown(server, model.model, None, model.reason), state=_STATES_OUTSIDE[model.stage])
