"""Routes that create, list and delete tokens."""

from collections.abc import Set
from typing import Annotated, Any

from fastapi import Response
from gpubroker.wire.administration import NewToken, Token
from gpubroker.wire.answered import Listed, Time
from pydantic import Field, StringConstraints

from gpubroker_server.core.admission.times import HORIZON_SECONDS
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.suggestions import did_you_mean
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.gateway.submission.task_body import Priority
from gpubroker_server.http.bodies import NAME, Body, JsonBody
from gpubroker_server.http.faults import invalid
from gpubroker_server.http.identity import Identity, Scope, new_token
from gpubroker_server.http.problems import Fault, Problem
from gpubroker_server.http.routing import Caller, Resource, answer
from gpubroker_server.ports.store import TokenRow

resource = Resource("administration")

MAX_NAMED = 5


class CreateToken(Body):
    name: Annotated[str, StringConstraints(pattern=NAME)]
    scopes: Annotated[list[Scope], Field(min_length=1, description="`*` is every scope.")]
    tenant: Annotated[
        str | None,
        StringConstraints(pattern=NAME),
        Field(description="Default: the tenant of the token that creates it."),
    ] = None
    new_tenant: Annotated[
        bool,
        Field(description="The tenant may be one that neither the settings nor any token names yet."),
    ] = False
    max_priority: Priority | None = None
    expires_in_seconds: Annotated[float, Field(gt=0, le=HORIZON_SECONDS)] | None = None


@resource.route("GET /tokens", "tokens_list", Scope.ADMIN, Listed[Token])
async def list_tokens(parts: Parts) -> Response:
    """List all tokens, without their secrets, which are not stored."""
    return answer(Listed(tuple(Token(**_shown(row)) for row in await parts.store.tokens())))


@resource.route(
    "POST /tokens",
    "tokens_create",
    Scope.ADMIN,
    NewToken,
    "malformed-json token-exists validation-failed",
    status_code=201,
)
async def create_token(creator: Caller, parts: Parts, body: JsonBody[CreateToken]) -> Response:
    """Create a token. Only this answer has its secret."""
    now, seconds = parts.clock.now(), body.expires_in_seconds
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
    created = NewToken(**_shown(row), token=secret)
    return answer(created, 201, {"Cache-Control": "no-store", "Location": f"/tokens/{row.name}"})


@resource.route("DELETE /tokens/{name}", "tokens_delete", Scope.ADMIN, None, "not-found", status_code=204)
async def delete_token(caller: Caller, parts: Parts, name: str) -> Response:
    """Delete a token. This process refuses it at once, others within seconds."""
    exists = any(row.name == name for row in await parts.store.tokens())
    if not exists or not await parts.store.drop_token(name, by=caller.name):
        raise Problem("not-found", f'there is no token "{name[:100]}"; GET /tokens lists them')
    parts.tokens.drop(name)
    return Response(status_code=204)


def _shown(row: TokenRow) -> dict[str, Any]:
    """Return the fields of the view of a token."""
    return {
        "name": row.name,
        "tenant": row.tenant,
        "scopes": row.scopes,
        "max_priority": row.max_priority,
        "created_at": Time.at(row.created_at),
        "expires_at": Time.at_or_none(row.expires_at),
    }


def _check_tenant(tenant: str, policy: Policy, others: Set[str]) -> None:
    """Check that the tenant of a new token is known. If tenants are configured, an unknown name is more
    likely a mistake than a new tenant; otherwise every name is accepted. Raises Problem validation-failed."""
    configured = {rule.name for rule in policy.tenants} - {"*"}
    tenants = configured | others
    if not configured or tenant in tenants:
        return
    suggestion = did_you_mean(
        tenant, tenants, otherwise=f"known are {', '.join(sorted(tenants)[:MAX_NAMED])}"
    )
    is_new = "For a new one send new_tenant: true (--new-tenant)"
    detail = f'nobody has configured a tenant "{tenant}"; {suggestion} {is_new}'
    raise invalid(Fault(pointer="/tenant", detail=detail, code="unknown-tenant"))


def _check_within(creator: Identity, body: CreateToken, max_priority: int) -> None:
    """Check that the creator grants no scope that it lacks, and no priority above its own cap. Raises Problem
    forbidden."""
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
        raise Problem("forbidden", f"{faults[0].detail}; ask with a token that has it", errors=faults)
