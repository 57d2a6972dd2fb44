"""The rights that claims of JWTs give."""

from typing import Any

import pytest
from gpubroker_server.core.admission.claims import OidcIssuer, grant_of

KNOWN = frozenset({"tasks:read", "tasks:write"})
CLAIMS = {"sub": "ada", "tenant": "acme", "scope": "openid tasks:read tasks:write admin"}


def an_issuer(**more: Any) -> OidcIssuer:
    return OidcIssuer(issuer="https://login.lab", audience="gpubroker", **more)


def test_values_of_the_claim_are_scopes_without_a_mapping() -> None:
    grant = grant_of(an_issuer(max_priority=60), CLAIMS, KNOWN)
    assert not isinstance(grant, str)
    assert (grant.name, grant.tenant, grant.scopes, grant.max_priority) == (
        ("ada", "acme", ("tasks:read", "tasks:write"), 60)
    )


def test_a_mapping_gives_scopes_by_group_and_nothing_else() -> None:
    issuer = an_issuer(scope_claim="groups", scopes={"ops": ("*",), "users": ("tasks:read",)})
    given = {"sub": "ada", "tenant": "acme", "groups": ["users", "others", 7, "tasks:write"]}
    assert grant_of(issuer, given, KNOWN).scopes == ("tasks:read",)  # type: ignore[union-attr]  # else it fails
    assert grant_of(issuer, {**given, "groups": ["ops"]}, KNOWN).scopes == ("*",)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("issuer", "changes", "why"),
    [
        (an_issuer(), {"sub": ""}, 'no text in the claim "sub"'),
        (an_issuer(name_claim="email"), {}, 'no text in the claim "email"'),
        (an_issuer(), {"tenant": None}, 'no text in the claim "tenant"'),
        (an_issuer(), {"tenant": ["acme"]}, 'no text in the claim "tenant"'),
        (an_issuer(), {"scope": "openid"}, "has openid, which gives no scope here"),
        (an_issuer(), {"scope": 7}, "has nothing, which gives no scope here"),
    ],
)
def test_claims_that_give_no_rights_are_refused_with_the_reason(
    issuer: OidcIssuer, changes: dict[str, Any], why: str
) -> None:
    assert why in str(grant_of(issuer, {**CLAIMS, **changes}, KNOWN))


def test_the_operator_names_the_tenant_of_jwts_without_one() -> None:
    claims = {"sub": "ada", "scope": "tasks:read"}
    assert grant_of(an_issuer(tenant="guests"), claims, KNOWN).tenant == "guests"  # type: ignore[union-attr]
