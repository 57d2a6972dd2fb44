"""Tokens: make, list, withdraw."""

from fastapi import APIRouter, Response

from gpubroker_server.core.domain.units import Instant
from gpubroker_server.gateway.http.identity import Identity, Scope, new_token
from gpubroker_server.gateway.http.problems import Fault, Problem
from gpubroker_server.gateway.http.routing import Call, DirectRoute, answer, needs, problems
from gpubroker_server.gateway.status.task_view import rfc3339, rfc3339_or_none
from gpubroker_server.gateway.status.views import NewToken, TokenList, TokenView
from gpubroker_server.gateway.submission.task_body import CreateToken
from gpubroker_server.ports.store import TokenRow

router = APIRouter(route_class=DirectRoute, tags=["administration"])


@router.get(
    "/tokens",
    operation_id="tokens_list",
    dependencies=[needs(Scope.ADMIN)],
    response_model=TokenList,
    responses=problems("unauthenticated", "forbidden"),
)
async def list_tokens(call: Call) -> Response:
    """List all tokens, without their secrets, which nobody has."""
    view: TokenList = {"items": [_view(row) for row in await call.parts.store.tokens()]}
    return answer(view)


@router.post(
    "/tokens",
    operation_id="tokens_create",
    dependencies=[needs(Scope.ADMIN)],
    status_code=201,
    response_model=NewToken,
    responses=problems("malformed-json", "unauthenticated", "forbidden", "token-exists", "validation-failed"),
)
async def create_token(call: Call, body: CreateToken) -> Response:
    """Make a token. Its secret is in this answer and nowhere else."""
    parts = call.parts
    cap = call.identity.max_priority if body.max_priority is None else body.max_priority
    _check_gift(call.identity, body, cap)
    now = parts.clock.now()
    lasts = body.expires_in_seconds
    secret, row = new_token(
        body.name,
        tenant=body.tenant or call.identity.tenant,
        scopes=sorted({scope.value for scope in body.scopes}),
        max_priority=cap,
        now=now,
        expires_at=None if lasts is None else Instant(now + lasts),
    )
    if not await parts.store.put_token(row, by=call.identity.name):
        raise Problem(
            "token-exists", f'a token "{body.name}" exists; withdraw it first, or choose another name'
        )
    await parts.identity.load()
    view: NewToken = {**_view(row), "token": secret}
    return answer(view, 201, {"Cache-Control": "no-store", "Location": f"/tokens/{row.name}"})


@router.delete(
    "/tokens/{name}",
    operation_id="tokens_delete",
    dependencies=[needs(Scope.ADMIN)],
    status_code=204,
    responses=problems("unauthenticated", "forbidden", "not-found"),
)
async def delete_token(call: Call, name: str) -> Response:
    """Withdraw a token. This process refuses it at once, others within seconds."""
    known = any(row.name == name for row in await call.parts.store.tokens())
    if not known or not await call.parts.store.drop_token(name, by=call.identity.name):
        raise Problem("not-found", f'there is no token "{name[:100]}"; GET /tokens lists them')
    await call.parts.identity.load()
    return Response(status_code=204)


def _check_gift(giver: Identity, body: CreateToken, cap: int) -> None:
    """Nobody gives what he has not."""
    faults = [
        Fault(
            pointer="/scopes",
            detail=f'token "{giver.name}" has no scope {scope.value} to give',
            code="not-yours",
        )
        for scope in body.scopes
        if not giver.may(scope)
    ]
    if cap > giver.max_priority:
        detail = f'the cap of token "{giver.name}" is {giver.max_priority}'
        faults.append(Fault(pointer="/max_priority", detail=detail, code="not-yours"))
    if faults:
        raise Problem("forbidden", f"{faults[0]['detail']}; ask with a token that has it", errors=faults)


def _view(row: TokenRow) -> TokenView:
    return {
        "name": row.name,
        "tenant": row.tenant,
        "scopes": list(row.scopes),
        "max_priority": row.max_priority,
        "created_at": rfc3339(row.created_at),
        "expires_at": rfc3339_or_none(row.expires_at),
    }
