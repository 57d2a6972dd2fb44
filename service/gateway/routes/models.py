"""Models of servers: what is in memory, what waits; load, unload, pin."""

from collections.abc import Mapping
from urllib.parse import unquote

from fastapi import APIRouter, Response

from service.core.model_orders import Indexed
from service.core.task import Task
from service.core.units import Seconds
from service.gateway.direct import Call, DirectRoute, answer, needs, problems
from service.gateway.identity import Scope
from service.gateway.models import LoadModel, ModelList, ModelView, PinModel, model_view
from service.gateway.overview import as_of
from service.gateway.permission import check_priority
from service.gateway.problems import Problem
from service.gateway.residency import Residency, UnknownModel

router = APIRouter(route_class=DirectRoute, tags=["models"])

_REFUSED = ("unauthenticated", "forbidden", "not-found", "store-unavailable")
_LOADING = ("malformed-json", "validation-failed", "priority-not-allowed", "exceeds-capacity",
            "no-matching-device", "exceeds-maximum", "exceeds-quota", "model-not-loaded")  # fmt: skip


@router.get(
    "/models",
    operation_id="models_list",
    dependencies=[needs(Scope.MODELS_INFER)],
    response_model=ModelList,
    responses=problems(*_REFUSED, "follower-stale"),
)
async def list_models(call: Call) -> Response:
    """List the models of the servers whose memory is in the ledger: those in memory, those that wait for it,
    and all others of the repository."""
    residency = _residency(call)
    known, held = await residency.repository(), {task.name: task for task in residency.holders()}
    names = sorted({*known, *held, *residency.rules.models})
    items = [model_view(residency, name, held.get(name), known.get(name)) for name in names]
    view: ModelList = {**as_of(call.parts), "items": items}
    return answer(view)


@router.get(
    "/models/{name}",
    operation_id="models_get",
    dependencies=[needs(Scope.MODELS_INFER)],
    response_model=ModelView,
    responses=problems(*_REFUSED),
)
async def get_model(call: Call, name: str) -> Response:
    """Read a model: whether it is in memory, since when, and for whom it stays."""
    return answer(await _view(call, name))


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
async def load_model(call: Call, name: str, body: LoadModel) -> Response:
    """Have a model brought into memory, as a request for it would: it waits its turn, and may take the
    room of lower priorities. Nothing is loaded twice."""
    residency = _residency(call)
    priority = residency.priority_of(name, body.priority)
    check_priority(call, priority)
    try:
        await residency.want(name, priority)
        if body.wait_seconds:
            await residency.ready(name, priority, Seconds(body.wait_seconds))
    except UnknownModel as unknown:
        raise _no_such(name, str(unknown)) from None
    except Problem as problem:
        if problem.code != "model-not-ready":
            raise
    view = await _view(call, name)
    return answer(view, 200 if view["state"] == "resident" else 202)


@router.post(
    "/models/{name}/unload",
    operation_id="models_unload",
    dependencies=[needs(Scope.MODELS_MANAGE)],
    response_model=ModelView,
    response_description="It is out of memory.",
    responses={
        202: {"model": ModelView, "description": "It leaves when it has answered what it has."},
        **problems(*_REFUSED),
    },
)
async def unload_model(call: Call, name: str) -> Response:
    """Have a model unloaded: it takes no more requests, answers those it has, and gives its memory back. The
    next request for it brings it back."""
    residency = _residency(call)
    task = residency.of(name)
    if task is not None:
        await _noted(call, task, "model.unload")
        await residency.ask_leader(task, "cancel")
    view = await _view(call, name)
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
async def pin_model(call: Call, name: str, body: PinModel) -> Response:
    """Keep a model in memory whoever asks for its room, or no longer. One that is not there is brought."""
    residency = _residency(call)
    priority = residency.priority_of(name)
    try:
        task = await residency.want(name, priority) if body.pinned else residency.of(name)
    except UnknownModel as unknown:
        raise _no_such(name, str(unknown)) from None
    if task is not None:
        await residency.ask_leader(task, "pin", pinned=body.pinned, by=call.identity.name)
    view = await _view(call, name)
    return answer(view, 200 if view["state"] == "resident" or not body.pinned else 202)


def _residency(call: Call) -> Residency:
    """Raises Problem not-found."""
    residency = call.parts.residency
    if residency is None:
        raise Problem(
            "not-found",
            "no server of models is held in the ledger; give one of triton.servers its node",
        )
    return residency


async def _view(call: Call, name: str) -> ModelView:
    """Raises Problem not-found."""
    residency = _residency(call)
    task = residency.of(name)
    known: Mapping[str, Indexed] = {} if task is not None else await residency.repository()
    if task is None and name not in known and name not in residency.rules.models:
        raise _no_such(name, "it is in no repository")
    return model_view(residency, name, task, known.get(name))


async def _noted(call: Call, task: Task, action: str) -> None:
    await call.parts.store.audit(
        by=call.identity.name, tenant=task.tenant, action=action, subject=f"{task.name} ({task.id})"
    )


def _no_such(name: str, why: str) -> Problem:
    return Problem("not-found", f'there is no model "{unquote(name)[:100]}": {why}; GET /models lists them')
