"""Routes that set, list and delete the secrets of a tenant. No answer contains the text of a secret."""

from typing import Any

from fastapi import Response
from gpubroker.wire.administration import Secret
from gpubroker.wire.answered import Listed

from gpubroker_server.gateway.parts import Parts
from gpubroker_server.http.bodies import is_name
from gpubroker_server.http.faults import invalid
from gpubroker_server.http.identity import Identity, Scope
from gpubroker_server.http.problems import Fault, Problem
from gpubroker_server.http.routing import Call, Caller, Resource, answer

resource = Resource("administration")

MAX_BYTES = 32 * 1024
"""The largest size of a secret, which becomes an environment variable."""
MAX_SECRETS = 1000
"""The largest number of secrets of a tenant."""

_TEXT: dict[str, Any] = {"text/plain": {"schema": {"type": "string", "minLength": 1}}}


@resource.route(
    "PUT /secrets/{name}",
    "secrets_set",
    Scope.SECRETS_WRITE,
    None,
    "payload-too-large validation-failed store-unavailable",
    status_code=204,
    openapi_extra={"requestBody": {"required": True, "content": _TEXT}},
)
async def set_secret(call: Call, parts: Parts, name: str) -> Response:
    """Set a secret of the token's tenant; the body is its text.

    A run that names it in its `env` (`secret:NAME`) gets this text from its next start on.
    """
    text = _checked(name, await call.body())
    tenant = call.identity.tenant
    names = await parts.secrets.names(tenant)
    if name not in names and len(names) >= MAX_SECRETS:
        detail = f"your tenant has {len(names)} secrets, and may have {MAX_SECRETS}; delete some"
        raise invalid(Fault(pointer="", detail=detail, code="too-many-secrets"))
    await _note(call.identity, parts, "secret.set", name)
    await parts.secrets.put(tenant, name, text)
    return Response(status_code=204)


@resource.route("GET /secrets", "secrets_list", Scope.SECRETS_USE, Listed[Secret], "store-unavailable")
async def list_secrets(caller: Caller, parts: Parts) -> Response:
    """List the names of the secrets of the token's tenant."""
    return answer(Listed(tuple(map(Secret, await parts.secrets.names(caller.tenant)))))


@resource.route(
    "DELETE /secrets/{name}",
    "secrets_delete",
    Scope.SECRETS_WRITE,
    None,
    "not-found store-unavailable",
    status_code=204,
)
async def delete_secret(caller: Caller, parts: Parts, name: str) -> Response:
    """Delete a secret. Tasks that name it and have not started fail at their start."""
    tenant = caller.tenant
    if name not in await parts.secrets.names(tenant):
        raise Problem("not-found", f'tenant "{tenant}" has no secret "{name[:100]}"; GET /secrets lists them')
    await _note(caller, parts, "secret.deleted", name)
    await parts.secrets.drop(tenant, name)
    return Response(status_code=204)


async def _note(caller: Identity, parts: Parts, action: str, name: str) -> None:
    await parts.store.audit(by=caller.name, tenant=caller.tenant, action=action, subject=name)


def _checked(name: str, body: bytes) -> str:
    """Return the text of a secret. Raises Problem validation-failed, which never quotes the text."""
    if not is_name(name):
        detail = "the name of a secret has letters, digits, dots, dashes and underscores, at most 63"
        raise invalid(Fault(pointer="path:name", detail=detail, code="bad-name"))
    try:
        text = body.decode()
    except UnicodeDecodeError:
        text = ""
    if not text or "\0" in text or len(body) > MAX_BYTES:
        detail = (
            f"the body has to be the text of the secret in UTF-8, 1 to {MAX_BYTES} bytes without NUL; it "
            f"has {len(body)} bytes"
        )
        raise invalid(Fault(pointer="", detail=detail, code="bad-secret"))
    return text
