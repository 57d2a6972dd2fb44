"""Models of servers: what is in memory, what waits; load, unload, pin."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from typing import Annotated
from urllib.parse import unquote

from fastapi import APIRouter, Query, Response

from gpubroker_server.core.domain.model_orders import IndexedModel
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.core.lifecycle.model_lifecycle import TOP_PRIORITY
from gpubroker_server.gateway.cluster.devices import as_of
from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.problems import Problem
from gpubroker_server.gateway.http.queries import ServerQuery
from gpubroker_server.gateway.http.routing import Call, DirectRoute, answer, needs, problems
from gpubroker_server.gateway.models.views import (
    LoadModel,
    ModelList,
    ModelView,
    PinModel,
    model_view,
    outside_view,
)
from gpubroker_server.gateway.proxy.fetch import NotFetched
from gpubroker_server.gateway.proxy.health_checks import index_of
from gpubroker_server.gateway.proxy.residency.residencies import Residencies
from gpubroker_server.gateway.proxy.residency.residency import DESCRIBE_SECONDS, Residency, UnknownModel
from gpubroker_server.gateway.proxy.residency.server_rules import place_fault
from gpubroker_server.gateway.proxy.servers import Server
from gpubroker_server.gateway.submission.permission import check_priority

router = APIRouter(route_class=DirectRoute, tags=["models"])

_REFUSED = ("unauthenticated", "forbidden", "not-found", "store-unavailable")
_ONE = ("model-ambiguous", "validation-failed")
_LOADING = (*_ONE, "malformed-json", "priority-not-allowed", "exceeds-capacity",
            "no-matching-device", "exceeds-maximum", "exceeds-quota", "model-not-loaded")  # fmt: skip


@router.get(
    "/models",
    operation_id="models_list",
    dependencies=[needs(Scope.MODELS_INFER)],
    response_model=ModelList,
    responses=problems(*_REFUSED, "follower-stale"),
)
async def list_models(call: Call) -> Response:
    """List the models of all servers, one after the other: those in memory, those that wait for it, and all
    others of the repository."""
    parts = call.parts
    outside = _outside(call)
    residencies = _residencies(call) if not outside else parts.residencies or ()
    held = [_rows(call, residency) for residency in residencies]
    each = await asyncio.gather(*held, *map(_outside_rows, outside))
    view: ModelList = {**as_of(parts), "items": [*chain(*each)]}
    return answer(view)


@router.get(
    "/models/{name}",
    operation_id="models_get",
    dependencies=[needs(Scope.MODELS_INFER)],
    response_model=ModelView,
    responses=problems(*_REFUSED, *_ONE),
)
async def get_model(call: Call, name: str, query: Annotated[ServerQuery, Query()]) -> Response:
    """Read a model: whether it is in memory, since when, and for whom it stays."""
    outside = [one for one in _outside(call) if query.server in (None, one.name)]
    if query.server is None or not outside:
        try:
            return answer(await _view(call, name, query.server))
        except Problem as problem:
            if problem.code != "not-found" or not outside:
                raise
    for row in chain(*await asyncio.gather(*map(_outside_rows, outside))):
        if row["name"] == name:
            return answer(row)
    raise _no_such(name, "it is in no repository")


@router.post(
    "/models/{name}/load",
    operation_id="models_load",
    dependencies=[needs(Scope.MODELS_MANAGE)],
    response_model=ModelView,
    response_description="It is resident.",
    responses={
        202: {"model": ModelView, "description": "It waits for its memory, or is being loaded."},
        **problems(*_REFUSED, *_LOADING),
    },
)
async def load_model(
    call: Call, name: str, query: Annotated[ServerQuery, Query()], body: LoadModel
) -> Response:
    """Have a model brought into memory, as a request for it would: it waits its turn, and may take the
    room of lower priorities. Nothing is loaded twice at one server."""
    priority = _priority_of(call, name, query.server, body.priority)
    check_priority(call, priority)
    try:
        residency, _ = await _want(call, name, query.server, priority)
        if body.wait_seconds:
            await residency.ready(name, priority, Seconds(body.wait_seconds))
    except UnknownModel as unknown:
        raise _no_such(name, str(unknown)) from None
    except Problem as problem:
        if problem.code != "model-not-ready":
            raise
    view = await _view(call, name, residency.rules.name)
    return answer(view, 200 if view["state"] == "resident" else 202)


@router.post(
    "/models/{name}/unload",
    operation_id="models_unload",
    dependencies=[needs(Scope.MODELS_MANAGE)],
    response_model=ModelView,
    response_description="It is out of memory.",
    responses={
        202: {"model": ModelView, "description": "It leaves when it has answered what it has."},
        **problems(*_REFUSED, *_ONE),
    },
)
async def unload_model(call: Call, name: str, query: Annotated[ServerQuery, Query()]) -> Response:
    """Have a model unloaded: it takes no more requests, answers those it has, and gives its memory back. The
    next request for it brings it back."""
    residency = _holding(call, name, query.server)
    task = None if residency is None else residency.of(name)
    if residency is not None and task is not None:
        await _noted(call, task, "model.unload")
        await residency.ask_leader(task, "cancel")
    view = await _view(call, name, query.server if residency is None else residency.rules.name)
    return answer(view, 200 if view["state"] == "cold" else 202)


@router.post(
    "/models/{name}/pin",
    operation_id="models_pin",
    dependencies=[needs(Scope.MODELS_MANAGE)],
    response_model=ModelView,
    response_description="Nobody takes its memory, or who asks for it may again.",
    responses={
        202: {"model": ModelView, "description": "Asked for; it is not in memory yet."},
        **problems(*_REFUSED, *_LOADING),
    },
)
async def pin_model(
    call: Call, name: str, query: Annotated[ServerQuery, Query()], body: PinModel
) -> Response:
    """Keep a model in memory whoever asks for its room, or no longer. One that is not there is brought.
    While it is pinned it has the highest priority, which the token must allow."""
    if body.pinned:
        check_priority(
            call, TOP_PRIORITY, at="/pinned", said=f"a pinned model has priority {TOP_PRIORITY}, which is"
        )
    residency = _holding(call, name, query.server)
    task = None if residency is None else residency.of(name)
    if body.pinned and task is None:
        try:
            residency, task = await _want(call, name, query.server, _priority_of(call, name, query.server))
        except UnknownModel as unknown:
            raise _no_such(name, str(unknown)) from None
    if residency is not None and task is not None:
        await residency.ask_leader(task, "pin", pinned=body.pinned, by=call.identity.name)
    view = await _view(call, name, query.server if residency is None else residency.rules.name)
    return answer(view, 200 if view["state"] == "resident" or not body.pinned else 202)


def _residencies(call: Call) -> Residencies:
    """Raises Problem not-found."""
    residencies = call.parts.residencies
    if residencies is None:
        raise Problem(
            "not-found",
            "no server of models is held in the ledger; give one of triton.servers its node",
        )
    return residencies


def _at(call: Call, server: str) -> Residency:
    """Raises Problem not-found."""
    residencies = _residencies(call)
    residency = residencies.at(server)
    if residency is None:
        known = ", ".join(residency.rules.name for residency in residencies)
        raise Problem("not-found", f'no server "{server[:100]}" is held in the ledger, but {known}')
    return residency


def _holding(call: Call, name: str, server: str | None) -> Residency | None:
    """Where the model is in memory, or waits for that. Raises Problem if that is not one server."""
    if server is not None:
        return _at(call, server)
    holding = _residencies(call).holding(name)
    if len(holding) > 1:
        servers = [residency.rules.name for residency in holding]
        raise Problem(
            "model-ambiguous",
            f'model "{name[:100]}" is at several servers ({", ".join(servers)}); say which is meant, as in '
            f"?server={servers[0]}",
        )
    return holding[0] if holding else None


def _priority_of(call: Call, name: str, server: str | None, asked: int | None = None) -> int:
    of = _residencies(call) if server is None else _at(call, server)
    return of.priority_of(name, asked)


async def _want(call: Call, name: str, server: str | None, priority: int) -> tuple[Residency, Task]:
    """Raises Problem, UnknownModel."""
    if server is None:
        return await _residencies(call).want(name, priority)
    residency = _at(call, server)
    return residency, await residency.want(name, priority)


async def _rows(call: Call, residency: Residency) -> list[ModelView]:
    known, held = await residency.repository(), {task.name: task for task in residency.holders()}
    names = sorted({*(known or ()), *held, *residency.rules.models})
    fault = place_fault(call.parts.world, residency.rules)
    return [
        model_view(residency, name, held.get(name), fault or _reason(residency, known, name))
        for name in names
    ]


def _reason(residency: Residency, known: Mapping[str, IndexedModel] | None, name: str) -> str:
    """Of its server, why it is as it is."""
    if known is None:
        return f"server {residency.rules.name} does not answer; what it had stays leased until it does"
    return known[name].reason if name in known else ""


def _outside(call: Call) -> list[Server]:
    """Servers whose models are not in the ledger."""
    return [server for server in call.parts.servers if not server.is_managed]


async def _outside_rows(server: Server) -> list[ModelView]:
    """None while it does not answer. Of several versions one that is ready counts."""
    with suppress(NotFetched):
        rows = await index_of(server, DESCRIBE_SECONDS) or []
        known = {row.get("name", ""): row for row in sorted(rows, key=_is_ready)}
        return [outside_view(server.name, name, known[name]) for name in sorted(known)]
    return []


def _is_ready(row: Mapping[str, str]) -> bool:
    return row.get("state") == "READY"


async def _view(call: Call, name: str, server: str | None) -> ModelView:
    """Where it is, else at the first server that has it in its repository. Raises Problem not-found."""
    holding = _holding(call, name, server)
    for residency in _residencies(call) if holding is None else [holding]:
        task, fault = residency.of(name), place_fault(call.parts.world, residency.rules)
        if task is not None:
            return model_view(residency, name, task, fault)
        known = await residency.repository()
        if name in (known or ()) or name in residency.rules.models:
            return model_view(residency, name, None, fault or _reason(residency, known, name))
    raise _no_such(name, "it is in no repository")


async def _noted(call: Call, task: Task, action: str) -> None:
    await call.parts.store.audit(
        by=call.identity.name, tenant=task.tenant, action=action, subject=f"{task.name} ({task.id})"
    )


def _no_such(name: str, why: str) -> Problem:
    return Problem("not-found", f'there is no model "{unquote(name)[:100]}": {why}; GET /models lists them')
