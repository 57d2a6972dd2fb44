"""Verifies JWTs of OpenID Connect issuers, whose keys are fetched in the background."""

import asyncio
import contextlib
import os
import ssl
from collections.abc import Mapping, Sequence
from typing import Any, Final

import httpx
import jwt
import structlog
from msgspec import Struct

from gpubroker_server.core.admission.claims import OidcIssuer
from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.ports.store import Clock

log = structlog.get_logger("gpubroker.oidc")

ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Signatures with public keys. A shared secret (HS256) is never accepted: every holder of the key could
sign."""
REFRESH_SECONDS: Final = Seconds(3600.0)
UNKNOWN_KEY_SECONDS: Final = Seconds(10.0)
"""The least time between two fetches that unknown keys cause, because anyone may name an unknown key."""
_FETCH_SECONDS: Final = 10.0
_LEEWAY_SECONDS: Final = 30.0
_MAX_KEY_BYTES: Final = 2**20


class Verified(Struct, frozen=True):
    """A JWT whose signature, times, issuer and audience are right; or, without claims, one whose key is being
    fetched from its issuer."""

    issuer: OidcIssuer
    claims: Mapping[str, Any] | None = None
    expires_at: Instant = Instant(0.0)


class JwtVerifier:
    """Verifies signatures, times, issuers and audiences of JWTs. Its keys are those that the issuers
    published when they were last fetched."""

    def __init__(self, issuers: Sequence[OidcIssuer], clock: Clock) -> None:
        self._issuers = {issuer.issuer: issuer for issuer in issuers}
        self._tls = {
            issuer.issuer: ssl.create_default_context(cafile=os.path.expanduser(issuer.ca_file) or None)
            for issuer in issuers
        }
        self._clock = clock
        self._keys: dict[tuple[str, str], jwt.PyJWK] = {}
        """Maps the issuer and the id of a key to the key."""
        self._fetched_at: dict[str, Instant] = {}
        """The time of the last fetch from each issuer, whether it succeeded or not."""
        self._key_missing = asyncio.Event()
        self.changes = 0
        """The number of times that keys have changed. A verification holds for the keys it was made with."""

    async def keep_fresh(self) -> None:
        """Fetch the keys now, every hour, and soon after an unknown key was named, until cancelled."""
        while True:
            self._key_missing.clear()
            await asyncio.gather(*map(self._fetch, self._issuers.values()))
            try:
                async with asyncio.timeout(REFRESH_SECONDS):
                    await self._key_missing.wait()
            except TimeoutError:
                continue
            latest = max(self._fetched_at.values())
            await asyncio.sleep(max(0.0, latest + UNKNOWN_KEY_SECONDS - self._clock.now()))

    def verify(self, token: str) -> Verified | str:
        """Return what a JWT says, without claims while its key is being fetched; or the reason why it is not
        accepted."""
        try:
            head = jwt.get_unverified_header(token)
            named = jwt.decode(token, options={"verify_signature": False}).get("iss")
        except jwt.InvalidTokenError as fault:
            return f"the token is no readable JWT ({fault})"
        issuer = self._issuers.get(str(named))
        if issuer is None:
            known = ", ".join(sorted(self._issuers))
            return f'the issuer of the JWT is "{str(named)[:200]}"; accepted are {known} (setting oidc)'
        key = self._keys.get((issuer.issuer, str(head.get("kid", ""))))
        if key is None:
            return self._without_key(issuer, str(head.get("kid", "")))
        try:
            claims = jwt.decode(
                token,
                key,
                algorithms=ALGORITHMS,
                audience=issuer.audience,
                issuer=issuer.issuer,
                leeway=_LEEWAY_SECONDS,
                options={"require": ["exp", "iss", "aud"]},
            )
        except jwt.InvalidTokenError as fault:
            return f"the JWT is not valid here: {fault}"
        return Verified(issuer, claims, Instant(float(claims["exp"]) + _LEEWAY_SECONDS))

    def _without_key(self, issuer: OidcIssuer, kid: str) -> Verified | str:
        fetched_at = self._fetched_at.get(issuer.issuer)
        if fetched_at is None or self._clock.now() - fetched_at >= UNKNOWN_KEY_SECONDS:
            self._key_missing.set()
            return Verified(issuer)
        return f'the JWT is signed with the key "{kid[:100]}", which {issuer.issuer} does not publish'

    async def _fetch(self, issuer: OidcIssuer) -> None:
        """Fetch the keys of an issuer. If that fails, the known ones stay valid."""
        try:
            published = await _published_keys(issuer, self._tls[issuer.issuer])
        except (httpx.HTTPError, OSError, ValueError, KeyError, TypeError, jwt.PyJWTError) as fault:
            log.warning(
                "keys of an issuer not fetched; the known ones stay", issuer=issuer.issuer, fault=str(fault)
            )
            published = None
        self._fetched_at[issuer.issuer] = self._clock.now()
        if published is None:
            return
        others = {at: key for at, key in self._keys.items() if at[0] != issuer.issuer}
        keys = {**others, **{(issuer.issuer, kid): key for kid, key in published.items()}}
        if keys.keys() != self._keys.keys():
            self.changes += 1
        self._keys = keys


async def _published_keys(issuer: OidcIssuer, tls: ssl.SSLContext) -> Mapping[str, jwt.PyJWK]:
    """Return the issuer's keys for signatures by id. Raises what httpx raises, ValueError, KeyError,
    TypeError and PyJWTError."""
    async with httpx.AsyncClient(timeout=_FETCH_SECONDS, verify=tls, follow_redirects=False) as http:
        address = issuer.jwks_url
        if not address:
            discovery = f"{issuer.issuer.rstrip('/')}/.well-known/openid-configuration"
            address = (await _json_at(http, discovery))["jwks_uri"]
        published = (await _json_at(http, address))["keys"]
    keys: dict[str, jwt.PyJWK] = {}
    for key in published:
        if key.get("use", "sig") == "sig" and key.get("kty") != "oct":
            with contextlib.suppress(jwt.PyJWTError):  # a kind of key that this PyJWT does not know
                keys[str(key.get("kid", ""))] = jwt.PyJWK(key)
    return keys


async def _json_at(http: httpx.AsyncClient, address: str) -> Any:
    answer = await http.get(address)
    answer.raise_for_status()
    if len(answer.content) > _MAX_KEY_BYTES:
        raise ValueError(f"{address} answered with {len(answer.content)} bytes")
    return answer.json()
