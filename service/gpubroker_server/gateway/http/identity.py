"""Who is asking: bearer tokens, kept as hashes, held in memory and read again when they change."""

import asyncio
import base64
import contextlib
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import structlog

from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.ports.store import Clock, StoreUnavailable, TaskStore, TokenRow

log = structlog.get_logger("gpubroker.identity")

TOKEN_PREFIX = "gpb_"  # noqa: S105  # not a secret: it marks one, for people and for leak scanners
EVERY_SCOPE = "*"


MOST_REMEMBERED = 10_000
"""Headers: one token may be sent with any number of spaces."""


class Scope(StrEnum):
    """What a token may do. `*` stands for all of them."""

    TASKS_READ = "tasks:read"
    TASKS_WRITE = "tasks:write"
    TASKS_CODE = "tasks:code"
    """Submit pickled functions: any code, as the user that runs tasks."""
    TASKS_COMMAND = "tasks:command"
    """Submit commands: any program, as the user that runs tasks."""
    CLUSTER_READ = "cluster:read"
    CLUSTER_WRITE = "cluster:write"
    """State what is gone of what is in quarantine, and let go on what the leader has paused."""
    METRICS_READ = "metrics:read"
    MODELS_INFER = "models:infer"
    """Ask models, and read what there is of them."""
    MODELS_MANAGE = "models:manage"
    """Load and unload models, and change how their servers log and trace. A model may bring code with it."""
    ADMIN = "admin"
    """Tokens, shutdown, and the names of other tenants' holders."""
    EVERY = EVERY_SCOPE


@dataclass(frozen=True, slots=True)
class Identity:
    """The holder of a token, as far as the service knows."""

    name: str
    tenant: str
    scopes: frozenset[str]
    max_priority: int
    expires_at: Instant | None = None

    def may(self, scope: str) -> bool:
        return scope in self.scopes or EVERY_SCOPE in self.scopes


def new_secret() -> str:
    """`gpb_` and 32 random bytes in lowercase base32: 256 bit, no character that a shell or URL minds."""
    return TOKEN_PREFIX + base64.b32encode(secrets.token_bytes(32)).decode().rstrip("=").lower()


def hash_of(secret: str) -> str:
    """What is stored of a token. Plain SHA-256 is enough: 256 random bits cannot be guessed offline."""
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
    """The secret, which exists nowhere else, and the row to store."""
    secret = new_secret()
    row = TokenRow(name, hash_of(secret), tenant, tuple(sorted(scopes)), max_priority, now, expires_at)
    return secret, row


class Tokens:
    """All tokens of the store, by hash: how long a look-up takes says nothing about any secret."""

    def __init__(self, store: TaskStore, clock: Clock, *, refresh_seconds: Seconds = Seconds(5.0)) -> None:
        self._store = store
        self._clock = clock
        self._refresh_seconds = refresh_seconds
        self._by_hash: dict[str, Identity] = {}
        self._remembered: dict[bytes, Identity] = {}
        """By the header as it was sent: of those that were found since the rows were read last."""

    def tenants(self) -> set[str]:
        """Of all tokens, expired ones too."""
        return {identity.tenant for identity in self._by_hash.values()}

    async def load(self) -> None:
        """Read all rows; called at start and after a change."""
        rows = await self._store.tokens()
        self._by_hash = {
            row.sha256: Identity(
                row.name, row.tenant, frozenset(row.scopes), row.max_priority, row.expires_at
            )
            for row in rows
        }
        self._remembered.clear()

    async def keep_fresh(self, changed: asyncio.Event) -> None:
        """Follow the changes that other processes make, until cancelled: when they are told, and else often
        enough."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._refresh_seconds):
                    await changed.wait()
            changed.clear()
            try:
                await self.load()
            except StoreUnavailable as fault:
                log.warning("tokens not refreshed; those known stay valid", fault=str(fault))

    def identify(self, secret: str) -> Identity | None:
        """None if nobody has this token or it has expired."""
        found = hash_of(secret)
        identity = self._by_hash.get(found)
        return None if identity is None or self._has_expired(identity) else identity

    def remembered(self, authorization: bytes) -> Identity | None:
        """Whose header this was before; None says nothing. Most clients send the same one again and again."""
        identity = self._remembered.get(authorization)
        return None if identity is None or self._has_expired(identity) else identity

    def remember(self, authorization: bytes, identity: Identity) -> None:
        if len(self._remembered) >= MOST_REMEMBERED:
            self._remembered.clear()
        self._remembered[authorization] = identity

    def _has_expired(self, identity: Identity) -> bool:
        return identity.expires_at is not None and identity.expires_at <= self._clock.now()
