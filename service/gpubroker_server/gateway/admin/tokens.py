"""Tokens: create, list, delete."""

from collections.abc import Set
from difflib import get_close_matches
from typing import Annotated

from fastapi import Response
from pydantic import Field, StringConstraints
from typing_extensions import TypedDict

from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.gateway.http.bodies import NAME, Body
from gpubroker_server.gateway.http.faults import invalid
from gpubroker_server.gateway.http.identity import Identity, Scope, new_token
from gpubroker_server.gateway.http.problems import Fault, Problem
from gpubroker_server.gateway.http.routing import Call, Resource, answer, view_of
from gpubroker_server.gateway.http.times import Time
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.gateway.submission.task_body import Priority

resource = Resource("administration")

MOST_NAMED = 5
_MAX_SECONDS = 3650 * 24 * 3600


class CreateToken(Body):
    name: Annotated[str, StringConstraints(pattern=NAME)]
    scopes: Annotated[list[Scope], Field(min_length=1, description="`*` is every scope.")]
    tenant: Annotated[
        str | None,
        StringConstraints(pattern=NAME),
        Field(description="Left out: the tenant of the token that creates it."),
    ] = None
    new_tenant: Annotated[
        bool,
        Field(description="The tenant may be one that neither the settings nor any token names yet."),
    ] = False
    max_priority: Priority | None = None
    expires_in_seconds: Annotated[float, Field(gt=0, le=_MAX_SECONDS)] | None = None


class TokenView(TypedDict):
    name: str
    tenant: str
    scopes: list[str]
    max_priority: int
    created_at: Time
    expires_at: Time | None


class NewToken(TokenView):
    token: Annotated[str, Field(description="The secret. Only this answer has it.")]


class TokenList(TypedDict):
    items: list[TokenView]


@resource.route("GET /tokens", "tokens_list", Scope.ADMIN, TokenList)
async def list_tokens(parts: Parts) -> Response:
    """List all tokens, without their secrets, which are not stored."""
    view: TokenList = {"items": [view_of(TokenView, row) for row in await parts.store.tokens()]}
    return answer(view)


@resource.route(
    "POST /tokens",
    "tokens_create",
    Scope.ADMIN,
    NewToken,
    "malformed-json token-exists validation-failed",
    status_code=201,
)
async def create_token(call: Call, parts: Parts, body: CreateToken) -> Response:
    """Create a token. Only this answer has its secret."""
    creator, now, seconds = call.identity, parts.clock.now(), body.expires_in_seconds
    max_priority = creator.max_priority if body.max_priority is None else body.max_priority
    _check_within(creator, body, max_priority)
    if body.tenant is not None and not body.new_tenant:
        others = {row.tenant for row in await parts.store.tokens()}
        _check_tenant(body.tenant, parts.policy, others)
    secret, row = new_token(
        body.name,
        tenant=body.tenant or creator.tenant,
        scopes=sorted({scope.value for scope in body.scopes}),
        max_priority=max_priority,
        now=now,
        expires_at=None if seconds is None else Instant(now + seconds),
    )
    if not await parts.store.put_token(row, by=creator.name):
        raise Problem("token-exists", name=body.name)
    await parts.tokens.load()
    view: NewToken = {**view_of(TokenView, row), "token": secret}
    return answer(view, 201, {"Cache-Control": "no-store", "Location": f"/tokens/{row.name}"})


@resource.route("DELETE /tokens/{name}", "tokens_delete", Scope.ADMIN, None, "not-found", status_code=204)
async def delete_token(call: Call, parts: Parts, name: str) -> Response:
    """Delete a token. This process refuses it at once, others within seconds."""
    known = any(row.name == name for row in await parts.store.tokens())
    if not known or not await parts.store.drop_token(name, by=call.identity.name):
        raise Problem("not-found", f'there is no token "{name[:100]}"; GET /tokens lists them')
    parts.tokens.drop(name)
    return Response(status_code=204)


def _check_tenant(tenant: str, policy: Policy, others: Set[str]) -> None:
    """Where tenants are configured, an unknown name is likelier a slip than a new tenant. Raises Problem."""
    configured = {known.name for known in policy.tenants} - {"*"}
    known = configured | others
    if not configured or tenant in known:
        return
    near = get_close_matches(tenant, sorted(known), n=1)
    meant = f'did you mean "{near[0]}"?' if near else f"known are {', '.join(sorted(known)[:MOST_NAMED])}"
    detail = f'nobody has configured a tenant "{tenant}"; {meant} For a new one send new_tenant: true'
    raise invalid(Fault(pointer="/tenant", detail=detail, code="unknown-tenant"))


def _check_within(creator: Identity, body: CreateToken, max_priority: int) -> None:
    """A token cannot grant scopes it lacks, or a priority above its cap. Raises Problem."""
    faults = [
        Fault(
            pointer="/scopes",
            detail=f'token "{creator.name}" lacks the scope {scope.value}',
            code="not-yours",
        )
        for scope in body.scopes
        if not creator.may(scope)
    ]
    if max_priority > creator.max_priority:
        detail = f'the cap of token "{creator.name}" is {creator.max_priority}'
        faults.append(Fault(pointer="/max_priority", detail=detail, code="not-yours"))
    if faults:
        raise Problem("forbidden", f"{faults[0]['detail']}; ask with a token that has it", errors=faults)
