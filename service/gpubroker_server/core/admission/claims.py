"""The rights that the claims of a JWT give, as the operator maps them."""

from collections.abc import Collection, Mapping
from typing import Annotated, Any

from gpubroker.wire.administration import Grant
from gpubroker.wire.bounds import Priority
from msgspec import Meta, Struct, field

from gpubroker_server.core.domain.policy import DIRECT_PRIORITY
from gpubroker_server.core.domain.setting_marks import WORDS

_NAME_CHARS = 100


class OidcIssuer(Struct, frozen=True, kw_only=True):
    """An issuer of JWTs that are accepted as tokens."""

    issuer: Annotated[str, Meta(pattern="^https?://")]
    """The issuer's URL, as the claim `iss` has it."""
    audience: Annotated[str, Meta(min_length=1)]
    """The name that the claim `aud` must contain."""
    jwks_url: str = ""
    """The address of the issuer's keys; empty: as its discovery document says."""
    ca_file: str = ""
    """The file with the authority that signed the issuer's certificate; empty: those of the system."""
    name_claim: str = "sub"
    tenant_claim: str = "tenant"
    tenant: str = ""
    """The tenant of JWTs that lack the tenant claim; empty: they are refused."""
    scope_claim: str = "scope"
    scopes: Mapping[str, Annotated[tuple[str, ...], WORDS]] = field(default_factory=dict)
    """Maps values of the scope claim, such as names of groups, to scopes. If it is empty, the values are
    scopes themselves."""
    max_priority: Priority = DIRECT_PRIORITY


def grant_of(issuer: OidcIssuer, claims: Mapping[str, Any], known: Collection[str]) -> Grant | str:
    """Return the rights that the verified claims give, or the reason why they give none. `known` are the
    scopes that values of the claim may name without a mapping."""
    name, tenant = claims.get(issuer.name_claim), claims.get(issuer.tenant_claim, issuer.tenant)
    if not isinstance(name, str) or not name:
        return f'the JWT has no text in the claim "{issuer.name_claim}", which names its holder'
    if not isinstance(tenant, str) or not tenant:
        return f'the JWT has no text in the claim "{issuer.tenant_claim}", which names its tenant'
    values = _words(claims.get(issuer.scope_claim))
    if issuer.scopes:
        scopes = {scope for value in values for scope in issuer.scopes.get(value, ())}
    else:
        scopes = {value for value in values if value in known}
    if not scopes:
        found = ", ".join(values)[:_NAME_CHARS] or "nothing"
        return f'the claim "{issuer.scope_claim}" of the JWT has {found}, which gives no scope here'
    return Grant(name[:_NAME_CHARS], tenant, tuple(sorted(scopes)), issuer.max_priority)


def _words(value: Any) -> tuple[str, ...]:
    """Return the values of a claim that is one text with spaces, or a list."""
    if isinstance(value, str):
        return tuple(value.split())
    if isinstance(value, list):
        return tuple(word for word in value if isinstance(word, str))
    return ()
