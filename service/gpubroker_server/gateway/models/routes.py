"""Routes that list, read, load, unload and pin models."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, Final, Literal, get_args

from fastapi import Query, Response
from gpubroker.wire.answered import Overview
from gpubroker.wire.models import ModelState, ServedModel
from msgspec.structs import replace
from pydantic import Field

from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.core.lifecycle.model_lifecycle import TOP_PRIORITY
from gpubroker_server.gateway.models.models import (
    KEPT_OUTSIDE,
    Parts,
    change_outside,
    models_outside,
    no_such_model,
)
from gpubroker_server.gateway.submission.task_body import Priority
from gpubroker_server.http.bodies import Body, JsonBody, in_order
from gpubroker_server.http.bodies import Query as QueryModel
from gpubroker_server.http.faults import refuse
from gpubroker_server.http.identity import Scope
from gpubroker_server.http.problems import DEMAND_PROBLEMS, Problem
from gpubroker_server.http.routing import Caller, Resource, answer
from gpubroker_server.ports.model_servers import KnownServer, UnknownModel

resource = Resource("models")

_STATES: Final[Sequence[ModelState]] = get_args(ModelState)


class ServerQuery(QueryModel):
    server: Annotated[
        str | None, Field(max_length=100, description="A model server; needed if several have the model.")
    ] = None


class ModelsQuery(ServerQuery):
    state: Annotated[
        list[ModelState],
        Field(description="Only models in one of these states, repeated or separated by commas."),
    ] = []  # noqa: RUF012  # pydantic copies it

    sort: Annotated[
        Literal[
            "state", "-state", "name", "-name", "gpu_mb", "-gpu_mb", "priority", "-priority",
            "loaded", "-loaded",
        ],
        Field(
            description="The order of the list. `state`: models in memory first, then models that wait for "
            "memory. With `-`, the largest or the latest first. Models that are equal are sorted by state, "
            "server and name."
        ),
    ] = "state"  # fmt: skip


LOAD_PROBLEMS: Final = (
    "not-found store-unavailable model-ambiguous malformed-json model-not-loaded model-server-failed "
    "model-server-unavailable model-server-busy model-server-silent model-server-unauthorized "
    f"{DEMAND_PROBLEMS}"
)

_SORTED_BY: Final[Mapping[str, Callable[[ServedModel], Any]]] = {
    "state": lambda model: _STATES.index(model.state),
    "name": lambda model: model.name,
    "gpu_mb": lambda model: model.gpu_mb,
    "priority": lambda model: model.priority,
    "loaded": lambda model: model.loaded_at,
}


class LoadModel(Body):
    priority: Priority | None = None
    """The priority of the load. Default: the priority in the model's configuration."""
    wait_seconds: Annotated[float, Field(ge=0, le=300)] = 0.0
    """The longest time that the answer may wait until the model is in memory."""


class PinModel(Body):
    pinned: bool = True


@resource.route(
    "GET /models",
    "models_list",
    Scope.MODELS_INFER,
    Overview[ServedModel],
    "not-found store-unavailable follower-stale",
)
async def list_models(parts: Parts, query: Annotated[ModelsQuery, Query()]) -> Response:
    """List the models of all servers. Without `sort`, models in memory come first, then models that wait for
    memory, then all other models of the repositories."""
    outside = parts.app.outside
    residencies = parts.app.residencies or ()
    lists = await asyncio.gather(*map(parts.models, residencies), *map(models_outside, outside))
    selected = [
        model
        for model in chain(*lists)
        if query.server in (None, model.server) and (not query.state or model.state in query.state)
    ]
    selected.sort(key=lambda model: (_STATES.index(model.state), model.server, model.name))
    moment = parts.app.freshness.moment()
    return answer(Overview(**moment, items=tuple(in_order(selected, query.sort, _SORTED_BY))))


@resource.route(
    "GET /models/{name}",
    "models_get",
    Scope.MODELS_INFER,
    ServedModel,
    "not-found store-unavailable model-ambiguous",
)
async def get_model(parts: Parts, name: str, query: Annotated[ServerQuery, Query()]) -> Response:
    """Read a model: whether it is in memory, since when, and until when it stays."""
    outside = [server for server in parts.app.outside if query.server in (None, server.name)]
    if query.server is None or not outside:
        try:
            return answer(await parts.model(name, query.server))
        except Problem as problem:
            if problem.code != "not-found" or not outside:
                raise
    for row in chain(*await asyncio.gather(*map(models_outside, outside))):
        if row.name == name:
            return answer(row)
    raise no_such_model(name, "it is in no repository")


@resource.route(
    "POST /models/{name}/load",
    "models_load",
    Scope.MODELS_MANAGE,
    ServedModel,
    LOAD_PROBLEMS,
    accepted="The model waits for memory, or is being loaded.",
    response_description="The model is in memory.",
)
async def load_model(
    caller: Caller, parts: Parts, name: str, query: Annotated[ServerQuery, Query()], body: JsonBody[LoadModel]
) -> Response:
    """Load a model as a request for it would: the load waits in the queue, and may preempt lower priorities.
    A model is loaded only once on a server."""
    if (outside := await parts.outside_of(name, query.server)) is not None:
        await note_outside(caller, parts, outside, name, "model.load")
        return answer(await change_outside(outside, name, loads=True))
    permissions = parts.app.rules.permissions
    if body.priority is not None:
        refuse(permissions.check_priority(caller, body.priority))
    wanted = parts.priority_of(name, query.server, body.priority)
    priority = permissions.default_priority(caller, wanted)
    try:
        residency, task = await parts.want(name, query.server, priority)
        await note(caller, parts, task, "model.load")
        if body.wait_seconds:
            await residency.ready(name, priority, Seconds(body.wait_seconds))
    except UnknownModel as unknown:
        raise no_such_model(name, str(unknown)) from None
    except Problem as problem:
        if problem.code != "model-not-ready":
            raise
    model = await parts.model(name, residency.rules.name)
    return answer(model, 200 if model.state == "resident" else 202)


async def note(caller: Caller, parts: Parts, task: Task, action: str) -> None:
    """Write an audit record about the task that holds a model's memory. Raises StoreUnavailable."""
    subject = f"{task.name} ({task.id})"
    await parts.app.store.audit(by=caller.name, tenant=task.tenant, action=action, subject=subject)


async def note_outside(caller: Caller, parts: Parts, server: KnownServer, name: str, action: str) -> None:
    """Write an audit record about a model on a server outside the ledger. Raises StoreUnavailable."""
    subject = f"{name} on {server.name}"
    await parts.app.store.audit(by=caller.name, tenant=caller.tenant, action=action, subject=subject)


@resource.route(
    "POST /models/{name}/unload",
    "models_unload",
    Scope.MODELS_MANAGE,
    ServedModel,
    "not-found store-unavailable model-ambiguous model-is-step model-not-loaded model-server-failed "
    "model-server-unavailable model-server-busy model-server-silent model-server-unauthorized",
    accepted="The model is unloaded when it has answered its requests.",
    response_description="The model is not in memory any more.",
)
async def unload_model(
    caller: Caller, parts: Parts, name: str, query: Annotated[ServerQuery, Query()]
) -> Response:
    """Unload a model: it takes no more requests, answers those it has, and frees its memory. The next request
    for it loads it again."""
    if (outside := await parts.outside_of(name, query.server)) is not None:
        await note_outside(caller, parts, outside, name, "model.unload")
        return answer(await change_outside(outside, name, loads=False))
    residency = parts.holding(name, query.server)
    for server in parts.residencies if residency is None else [residency]:
        server.check_unload(name)
    task = None if residency is None else residency.of(name)
    if residency is not None and task is not None:
        await note(caller, parts, task, "model.unload")
        await residency.ask_leader(task, "cancel", by=caller.name)
    model = await parts.model(name, query.server if residency is None else residency.rules.name)
    return answer(model, 200 if model.state == "cold" else 202)


@resource.route(
    "POST /models/{name}/pin",
    "models_pin",
    Scope.MODELS_MANAGE,
    ServedModel,
    LOAD_PROBLEMS,
    accepted="The pin is stored; the model is not in memory yet.",
    response_description="The model is pinned and in memory, or it is no longer pinned.",
)
async def pin_model(
    caller: Caller, parts: Parts, name: str, query: Annotated[ServerQuery, Query()], body: JsonBody[PinModel]
) -> Response:
    """Pin a model, so that nothing takes its memory, or unpin it. Pinning loads a model that is not in
    memory. A pinned model has the highest priority, which the token must allow."""
    if body.pinned:
        subject = f"a pinned model has priority {TOP_PRIORITY}, which is"
        permissions = parts.app.rules.permissions
        refuse(permissions.check_priority(caller, TOP_PRIORITY, at="/pinned", subject=subject))
    if (outside := await parts.outside_of(name, query.server)) is not None:
        if not body.pinned:
            return answer(await parts.model_outside(outside, name))
        await note_outside(caller, parts, outside, name, "model.load")
        loaded = await change_outside(outside, name, loads=True)
        return answer(replace(loaded, reason=loaded.reason or KEPT_OUTSIDE))
    residency = parts.holding(name, query.server)
    task = None if residency is None else residency.of(name)
    if body.pinned and task is None:
        try:
            residency, task = await parts.want(name, query.server, parts.priority_of(name, query.server))
        except UnknownModel as unknown:
            raise no_such_model(name, str(unknown)) from None
    if residency is not None and task is not None:
        await residency.ask_leader(task, "pin", pinned=body.pinned, by=caller.name)
    model = await parts.model(name, query.server if residency is None else residency.rules.name)
    return answer(model, 200 if model.state == "resident" or not body.pinned else 202)
