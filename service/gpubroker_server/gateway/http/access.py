"""Who may come in: whoever calls the service by one of its names, with a token that it knows."""

import re
from collections.abc import Iterable
from functools import lru_cache

from gpubroker_server.gateway.http.identity import Identity, Tokens
from gpubroker_server.gateway.http.problems import Problem

LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
_HOST = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<name>[^:\[\]]+))(?::\d{1,5})?")


class Callers:
    def __init__(self, tokens: Tokens, allowed_hosts: Iterable[str]) -> None:
        self._tokens = tokens
        self._hosts = LOOPBACK_NAMES | {host.strip("[]").lower() for host in allowed_hosts}

    def check_host(self, header: bytes) -> None:
        """A page that a browser was lured to may know our address, but it cannot fake this name. Raises
        Problem."""
        host = _without_port(header)
        if host not in self._hosts:
            known = ", ".join(sorted(self._hosts))
            raise Problem(
                "host-not-allowed",
                f'the service does not go by the name "{host}" but by {known}; '
                "use one of those, or have the operator add this one to allowed_hosts",
            )

    def identify(self, authorization: bytes | None) -> Identity:
        """Whose token it is. Raises Problem."""
        if authorization is None:
            raise _unauthenticated("no token was sent", "")
        if (known := self._tokens.remembered(authorization)) is not None:
            return known
        scheme, _, secret = authorization.decode("latin-1").partition(" ")
        if scheme.lower() != "bearer":
            raise _unauthenticated(f'the Authorization scheme is "{scheme[:20]}"', "")
        identity = self._tokens.identify(secret.strip())
        if identity is None:
            raise _unauthenticated("the token is unknown or has expired", ', error="invalid_token"')
        self._tokens.remember(authorization, identity)
        return identity


def _unauthenticated(found: str, challenge: str) -> Problem:
    return Problem(
        "unauthenticated",
        f"{found}; send Authorization: Bearer <token> "
        "(the first one is in client.json in the service's data directory)",
        headers={"WWW-Authenticate": f'Bearer realm="gpubroker"{challenge}'},
    )


@lru_cache(256)
def _without_port(header: bytes) -> str:
    """`[::1]:8470` -> `::1`, `localhost:8470` -> `localhost`; what is neither stays as it is."""
    host = header.decode("latin-1")
    parts = _HOST.fullmatch(host)
    return host if parts is None else (parts["six"] or parts["name"]).lower()
