"""One server of models as the data plane sees it: whether it answers, how much it has to do, what it has."""

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

import structlog

from gpubroker_server.core.domain.units import Ticks
from gpubroker_server.core.serving.circuit_breaker import Breaker, BreakerRules
from gpubroker_server.ports.backends import CallBackend, ModelBackend, Trouble

log = structlog.get_logger("gpubroker.inference")

HTTP = "http"
GRPC = "grpc"

_FAULTS = frozenset({Trouble.UNREACHABLE, Trouble.BROKEN, Trouble.SILENT})
"""Others are no fault of the server."""


class Contents(NamedTuple):
    """What a server said that it has. Models of which a version is named are there under `model/version` as
    well."""

    known: frozenset[bytes] = frozenset()
    """In its repository."""
    ready: frozenset[bytes] = frozenset()


class Way:
    """One of the protocols in which a server is asked, each on a port of its own."""

    __slots__ = ("_is_over", "_now", "_server", "breaker", "faults", "look_wanted", "protocol")

    def __init__(
        self, server: str, protocol: str, rules: BreakerRules | None, now: Callable[[], float]
    ) -> None:
        self.protocol = protocol
        self.breaker = Breaker(rules)
        self.faults = 0
        """Since the start."""
        self.look_wanted = asyncio.Event()
        """There is reason to look at once whether it answers, and what it has."""
        self._server = server
        self._now = now
        self._is_over = False

    def close(self) -> None:
        """What fails from here on is our own doing."""
        self._is_over = True

    def failed(self, trouble: Trouble, why: str) -> None:
        if self._is_over or trouble not in _FAULTS:
            return
        self.faults += 1
        self.look_wanted.set()
        if self.breaker.failed(Ticks(self._now()), why):
            log.warning("a model server does not answer", server=self._server, way=self.protocol, fault=why)

    def answered(self) -> None:
        breaker = self.breaker
        if breaker.fault and breaker.answered(Ticks(self._now())):
            log.info("a model server answers again", server=self._server, way=self.protocol)


class Server:
    def __init__(
        self,
        name: str,
        backend: ModelBackend,
        *,
        is_managed: bool = False,
        rules: BreakerRules | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_managed`: its models are in the ledger, which says what it has."""
        self.name = name
        self.backend = backend
        self.calls: CallBackend | None = None
        """Set where gRPC is spoken, and the server has a port for it."""
        self.is_managed = is_managed
        self.http = Way(name, HTTP, rules, now)
        self.grpc = Way(name, GRPC, rules, now)
        self.in_flight = 0
        """Requests that have been sent to it, and are not over."""
        self.passed_on = 0
        """Requests that went to another server when this one failed, since the start."""
        self.contents: Contents | None = None
        """None: it has not said."""

    @property
    def ways(self) -> list[Way]:
        """Those that are in use."""
        return [self.http] if self.calls is None else [self.http, self.grpc]

    def way(self, over_grpc: bool) -> Way:
        return self.grpc if over_grpc else self.http

    @property
    def is_up(self) -> bool:
        """By one of its ways at least."""
        return not all(way.breaker.is_open for way in self.ways)

    def note_load(self, model: bytes) -> None:
        """It has loaded it a moment ago; which versions, it tells when it is asked the next time."""
        if self.contents is not None:
            known, ready = self.contents
            self.contents = Contents(known | {model}, ready | {model})
        self.http.look_wanted.set()

    def note_unload(self, model: bytes) -> None:
        if self.contents is not None:
            known, ready = self.contents
            begins = model + b"/"
            left = frozenset(key for key in ready if key != model and not key.startswith(begins))
            self.contents = Contents(known, left)

    async def close(self) -> None:
        for way in self.ways:
            way.close()
        await self.backend.close()
        if self.calls is not None:
            await self.calls.close()
