"""Checks of the name under which a client addresses the service, and of bearer tokens, which are stored as
hashes."""

import asyncio
import base64
import contextlib
import hashlib
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from functools import lru_cache

import structlog
from gpubroker.wire.administration import Grant

from gpubroker_server.core.admission.permissions import CODE_SCOPE, COMMAND_SCOPE, SECRETS_SCOPE, lacks
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Fence, Instant, Seconds
from gpubroker_server.http.problems import Problem
from gpubroker_server.ports.store import Clock, StoreUnavailable, TaskStore, TokenRow

log = structlog.get_logger("gpubroker.identity")

TOKEN_PREFIX = "gpb_"  # noqa: S105  # not a secret: it marks one, for people and for leak scanners
EVERY_SCOPE = "*"
LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
_HOST = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<name>[^:\[\]]+))(?::\d{1,5})?")


class Scope(StrEnum):
    """A permission of a token. `*` stands for all permissions."""

    TASKS_READ = "tasks:read"
    TASKS_WRITE = "tasks:write"
    TASKS_CODE = CODE_SCOPE
    """The token may submit pickled functions, that is, run any code as the user that runs tasks."""
    TASKS_COMMAND = COMMAND_SCOPE
    """The token may submit commands, that is, run any program as the user that runs tasks."""
    CLUSTER_READ = "cluster:read"
    CLUSTER_WRITE = "cluster:write"
    """The token may cordon, drain and uncordon nodes, keep idle templates, state that the holder of
    quarantined memory is gone, and resume what the leader has paused."""
    METRICS_READ = "metrics:read"
    MODELS_INFER = "models:infer"
    """The token may send inferences, and list the models."""
    MODELS_MANAGE = "models:manage"
    """The token may load and unload models, and change how their servers log and trace. A model may contain
    code, which the server runs."""
    SECRETS_USE = SECRETS_SCOPE
    """The token may name secrets of its tenant in the `env` of tasks, whose code can then read them."""
    SECRETS_WRITE = "secrets:write"
    """The token may set and delete secrets of its tenant."""
    ADMIN = "admin"
    """The token may manage tokens, shut the service down, pause the queues of tenants and streams, and see
    tasks and names of other tenants."""
    EVERY = EVERY_SCOPE


class Identity(Grant, frozen=True):
    """The holder of a token, with its tenant and its permissions."""

    expires_at: Instant | None = None

    def may(self, scope: str) -> bool:
        return scope in self.scopes or EVERY_SCOPE in self.scopes

    def require(self, scope: str, purpose: str, *others: str) -> None:
        """Check that the token has `scope`, or one of `others`. `purpose` tells the client what the scope is
        needed for. Raises Problem forbidden."""
        refused = lacks(self, scope, purpose, *others)
        if refused is not None:
            raise Problem(refused.code, refused.detail)

    def whose(self, named: str | None, what: str) -> str | None:
        """Return the tenant whose `what` a list shows, or None for all tenants.

        `named` is the tenant in the query: `*` names all tenants, and None the token's own. Raises Problem
        forbidden.
        """
        if named is None or named == self.tenant:
            return self.tenant
        self.require(Scope.ADMIN, f"a list of other tenants' {what}")
        return None if named == "*" else named

    def may_see(self, tenant: str) -> bool:
        """Return True if answers may name what belongs to this tenant."""
        return self.tenant == tenant or self.may(Scope.ADMIN)


RUN_SCOPES = (Scope.TASKS_READ, Scope.TASKS_WRITE)
CODE_RUN_SCOPES = (*RUN_SCOPES, Scope.TASKS_CODE, Scope.TASKS_COMMAND)


def identity_of_run(task: Task | None, fence: Fence, *, brings_code: bool = False) -> Identity | None:
    """Return the identity of a run, which may read and submit tasks for its tenant up to its own priority;
    None if the run has ended. A run whose code came with its task may submit code as well: its submitter was
    allowed to run any code."""
    if task is None or task.fence != fence or not task.is_active:
        return None
    scopes = CODE_RUN_SCOPES if brings_code else RUN_SCOPES
    return Identity(f"task {task.id}", task.tenant, scopes, task.priority)


def new_secret() -> str:
    """Return a new secret: `gpb_`, and 32 random bytes (256 bits) in lowercase base32, which needs no quoting
    in a shell or a URL."""
    return TOKEN_PREFIX + base64.b32encode(secrets.token_bytes(32)).decode().rstrip("=").lower()


def hash_of(secret: str) -> str:
    """Return the hash of a token's secret, which alone is stored. Plain SHA-256 is enough: 256 random bits
    cannot be guessed offline."""
    return hashlib.sha256(secret.encode()).hexdigest()


def new_token(
    name: str,
    *,
    tenant: str,
    scopes: Sequence[str],
    max_priority: int,
    now: Instant,
    expires_at: Instant | None = None,
) -> tuple[str, TokenRow]:
    """Return the secret of a new token, which is stored nowhere, and the row to store."""
    secret = new_secret()
    granted = name, tenant, tuple(sorted(scopes)), max_priority
    return secret, TokenRow(*granted, sha256=hash_of(secret), created_at=now, expires_at=expires_at)


class Tokens:
    """All tokens of the store, by hash: the time that a look-up takes reveals nothing about a secret."""

    def __init__(
        self,
        store: TaskStore,
        clock: Clock,
        *,
        refresh_seconds: Seconds = Seconds(5.0),
        elsewhere: Callable[[str], Identity | None] = lambda _: None,
    ) -> None:
        """`elsewhere` returns the holder of a token that is not in the store: of a run, or a JWT. It may
        raise Problem."""
        self._store = store
        self._elsewhere = elsewhere
        self._clock = clock
        self._refresh_seconds = refresh_seconds
        self._by_hash: dict[str, Identity] = {}
        self._begun = self._shown = 0
        """The number of the load that began last, and the number of the load that `_by_hash` comes from."""
        self._drops = 0
        """The number of tokens dropped so far."""

    def tenants(self) -> set[str]:
        """Return the tenants of all tokens, including expired tokens."""
        return {identity.tenant for identity in self._by_hash.values()}

    async def load(self) -> None:
        """Read all tokens from the store. Call it at start and after a change. Loads may overlap: the load
        that began last counts, and no load brings back a token that was dropped while it read."""
        while True:
            drops = self._drops
            self._begun += 1
            number = self._begun
            rows = await self._store.tokens()
            if number < self._shown:
                return
            if drops == self._drops:
                break
        self._shown = number
        self._by_hash = {
            row.sha256: Identity(row.name, row.tenant, row.scopes, row.max_priority, row.expires_at)
            for row in rows
        }

    def drop(self, name: str) -> None:
        """Drop the token with this name. Call it once the store has deleted the token."""
        self._drops += 1
        self._by_hash = {key: identity for key, identity in self._by_hash.items() if identity.name != name}

    async def keep_fresh(self, changed: asyncio.Event) -> None:
        """Reload the tokens whenever `changed` is set, and at least every `refresh_seconds`, until cancelled.
        `changed` says that another process has changed tokens."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._refresh_seconds):
                    await changed.wait()
            changed.clear()
            try:
                await self.load()
            except StoreUnavailable as fault:
                log.warning("tokens not refreshed; the known ones stay valid", fault=str(fault))

    def identify(self, secret: str) -> Identity | None:
        """Return the holder of the token with this secret; None if there is no such token or it has
        expired. Raises Problem for a JWT that is not accepted."""
        return self.holder(hash_of(secret)) or self._elsewhere(secret)

    def holder(self, sha256: str) -> Identity | None:
        """Return the holder of the token with this hash; None if there is no such token or it has expired."""
        identity = self._by_hash.get(sha256)
        if identity is None or identity.expires_at is None or identity.expires_at > self._clock.now():
            return identity
        return None

    def hash_named(self, name: str) -> str:
        """Return the hash of the token with this name; empty if there is none."""
        return next((sha256 for sha256, identity in self._by_hash.items() if identity.name == name), "")


class Callers:
    """Checks the Host and Authorization headers of requests."""

    def __init__(self, tokens: Tokens, allowed_hosts: Iterable[str]) -> None:
        self._tokens = tokens
        self._hosts = LOOPBACK_NAMES | {host.strip("[]").lower() for host in allowed_hosts}

    def check_host(self, header: bytes) -> None:
        """Check the Host header, as a protection from DNS rebinding: a page in a browser may reach the
        service's address, but it cannot choose the Host header. Raises Problem host-not-allowed."""
        host = _without_port(header)
        if host not in self._hosts:
            raise Problem("host-not-allowed", host=host, known=", ".join(sorted(self._hosts)))

    def identify(self, authorization: bytes | None) -> Identity:
        """Return the holder of the token in an Authorization header. Raises Problem unauthenticated."""
        if authorization is None:
            raise unauthenticated("no token was sent")
        scheme, _, secret = authorization.decode("latin-1").partition(" ")
        if scheme.lower() != "bearer":
            raise unauthenticated(f'the Authorization scheme is "{scheme[:20]}"')
        identity = self._tokens.identify(secret.strip())
        if identity is None:
            raise unauthenticated("the token is unknown or has expired", ', error="invalid_token"')
        return identity


def unauthenticated(found: str, challenge: str = "") -> Problem:
    """Return the problem of a request without a valid token. `found` says what was found instead."""
    headers = {"WWW-Authenticate": f'Bearer realm="gpubroker"{challenge}'}
    return Problem("unauthenticated", headers=headers, found=found)


@lru_cache(256)
def _without_port(header: bytes) -> str:
    """Return the host without its port: `::1` for `[::1]:8470`, `localhost` for `localhost:8470`. A header
    that is not a host is returned unchanged."""
    host = header.decode("latin-1")
    parts = _HOST.fullmatch(host)
    return host if parts is None else (parts["six"] or parts["name"]).lower()
