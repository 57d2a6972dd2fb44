"""Gives the holders of JWTs the rights that the operator maps to their claims."""

from collections import OrderedDict
from typing import TYPE_CHECKING

from gpubroker_server.bootstrap.start_checks import StartRefused
from gpubroker_server.core.admission.claims import grant_of
from gpubroker_server.http.identity import EVERY_SCOPE, Identity, Scope, hash_of, unauthenticated
from gpubroker_server.http.problems import Problem
from gpubroker_server.ports.store import Clock
from gpubroker_server.settings.loading import Settings

if TYPE_CHECKING:
    from gpubroker_server.adapters.oidc import JwtVerifier

MAX_CACHED = 4096
KEY_RETRY_SECONDS = "1"
_SCOPES = frozenset({scope.value for scope in Scope} - {EVERY_SCOPE, Scope.ADMIN})
"""The scopes that a claim may name itself. The others need a mapping in the settings."""


def jwt_access_of(settings: Settings, clock: Clock) -> "JwtAccess | None":
    """Return the access of JWTs; None if the settings name no issuer. PyJWT is loaded only then. Raises
    StartRefused if a file of certificates cannot be read."""
    if not settings.oidc:
        return None
    from gpubroker_server.adapters.oidc import JwtVerifier

    try:
        return JwtAccess(JwtVerifier(settings.oidc, clock), clock)
    except OSError as fault:
        files = ", ".join(issuer.ca_file for issuer in settings.oidc if issuer.ca_file)
        raise StartRefused(
            f"oidc: a ca_file ({files}) cannot be read: {fault}; name a file with certificates in PEM form"
        ) from None


class JwtAccess:
    """Finds the identity of a JWT. Verified JWTs are cached, because a signature costs much more than a
    look-up."""

    def __init__(self, verifier: "JwtVerifier", clock: Clock) -> None:
        self._verifier = verifier
        self._clock = clock
        self._cache: OrderedDict[str, Identity] = OrderedDict()
        """Identities by the hash of their JWT, the one that was used last at the end."""
        self._changes = 0

    def identity_of(self, secret: str) -> Identity | None:
        """Return the holder of a JWT; None for another kind of token. Raises Problem unauthenticated for a
        JWT that is not accepted, and identity-provider-unavailable while its key is being fetched."""
        if secret.count(".") != 2:
            return None
        if self._changes != self._verifier.changes:
            self._changes = self._verifier.changes
            self._cache.clear()
        key, now = hash_of(secret), self._clock.now()
        known = self._cache.get(key)
        if known is not None and known.expires_at is not None and known.expires_at > now:
            self._cache.move_to_end(key)
            return known
        identity = self._verified(secret)
        self._cache[key] = identity
        if len(self._cache) > MAX_CACHED:
            self._cache.popitem(last=False)
        return identity

    async def keep_keys_fresh(self) -> None:
        """Fetch the keys of the issuers now and again, until cancelled."""
        await self._verifier.keep_fresh()

    def _verified(self, secret: str) -> Identity:
        verified = self._verifier.verify(secret)
        if isinstance(verified, str):
            raise unauthenticated(verified, ', error="invalid_token"')
        if verified.claims is None:
            raise Problem(
                "identity-provider-unavailable",
                headers={"Retry-After": KEY_RETRY_SECONDS},
                issuer=verified.issuer.issuer,
            )
        grant = grant_of(verified.issuer, verified.claims, _SCOPES)
        if isinstance(grant, str):
            raise unauthenticated(grant, ', error="insufficient_scope"')
        return Identity(grant.name, grant.tenant, grant.scopes, grant.max_priority, verified.expires_at)
