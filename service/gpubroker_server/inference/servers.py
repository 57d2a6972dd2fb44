"""The model servers as the data plane sees them: which answer, what they have, and which one is asked."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import structlog

from gpubroker_server.core.domain.model_orders import IndexedModel, ModelState
from gpubroker_server.core.domain.units import MonotonicSeconds, Seconds
from gpubroker_server.core.serving.circuit_breaker import Breaker, BreakerRules
from gpubroker_server.http.problems import Problem
from gpubroker_server.inference.operation import Target
from gpubroker_server.inference.refusals import problem_of
from gpubroker_server.inference.server_choice import Residencies
from gpubroker_server.ports.backends import CallBackend, ModelBackend, NotFetched, Trouble
from gpubroker_server.telemetry.table import ServerRow

log = structlog.get_logger("gpubroker.inference")

_FAULTS = frozenset({Trouble.UNREACHABLE, Trouble.BROKEN, Trouble.SILENT})
"""Others are no fault of the server."""

_CHECK_SECONDS: Final = Seconds(3.0)
"""How long a server may take to say what it has, for a request that waits for that."""


class Contents(NamedTuple):
    """What a server says that it has. A version of a model is listed as `model/version` as well."""

    known: frozenset[bytes] = frozenset()
    """In its repository."""
    ready: frozenset[bytes] = frozenset()


def contents_of(models: Mapping[str, IndexedModel]) -> Contents:
    known, ready = {name.encode() for name in models}, set[bytes]()
    for name, model in models.items():
        if model.stage is ModelState.READY:
            ready |= {name.encode(), *(f"{name}/{version}".encode() for version in model.versions)}
    return Contents(frozenset(known), frozenset(ready))


class ServerChecks(Protocol):
    """How a kind of model server is asked about itself. All methods raise NotFetched."""

    async def check(self, server: "Server", endpoint: "Endpoint", within_seconds: Seconds) -> None:
        """Return if the server answers at that endpoint as it should."""

    async def index(self, server: "Server", within_seconds: Seconds) -> Mapping[str, IndexedModel] | None:
        """Return the models of its repository, or None if its answer is no index."""

    async def change(self, server: "Server", model: str, *, loads: bool, within_seconds: Seconds) -> str:
        """Have it load or unload the model. Return why it did not; empty if it did."""


class Endpoint:
    """One of the protocols over which a server is asked, each on a port of its own."""

    __slots__ = ("_is_closed", "_now", "_server", "breaker", "check_wanted", "faults", "protocol", "refusal")

    def __init__(
        self, server: str, protocol: str, rules: BreakerRules | None, now: Callable[[], float]
    ) -> None:
        self.protocol = protocol
        self.breaker = Breaker(rules)
        self.faults = 0
        """Since the start."""
        self.check_wanted = asyncio.Event()
        """There is reason to check at once whether it answers, and what it has."""
        self.refusal = ""
        """How the server last refused the service's credentials; empty after an answer about a model."""
        self._server = server
        self._now = now
        self._is_closed = False

    def refused(self, why: str) -> None:
        """The server does not accept the service's credentials: it answers, so it is not down."""
        if not self.refusal and not self._is_closed:
            log.warning(
                "a model server refuses the service", server=self._server, way=self.protocol, fault=why
            )
        self.refusal = why

    def close(self) -> None:
        """Failures from now on are not the server's."""
        self._is_closed = True

    def failed(self, trouble: Trouble, why: str) -> None:
        if self._is_closed or trouble not in _FAULTS:
            return
        self.faults += 1
        self.check_wanted.set()
        if self.breaker.failed(MonotonicSeconds(self._now()), why):
            log.warning("a model server does not answer", server=self._server, way=self.protocol, fault=why)

    def answered(self) -> None:
        breaker = self.breaker
        if breaker.fault and breaker.answered(MonotonicSeconds(self._now())):
            log.warning("a model server answers again", server=self._server, way=self.protocol)


class Server:
    def __init__(
        self,
        name: str,
        backend: ModelBackend,
        checks: ServerChecks,
        *,
        is_managed: bool = False,
        rules: BreakerRules | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_managed`: its models are in the ledger, which says what it has."""
        self.name = name
        self.backend = backend
        self._checks = checks
        self.calls: CallBackend | None = None
        """Set if the proxy speaks gRPC, and the server has a port for it."""
        self.is_managed = is_managed
        self.http = Endpoint(name, "http", rules, now)
        self.grpc = Endpoint(name, "grpc", rules, now)
        self.in_flight = 0
        """Requests that were sent to it and are not answered."""
        self.passed_on = 0
        """Requests that went to another server when this one failed, since the start."""
        self.contents: Contents | None = None
        """None: it has not said."""

    @property
    def endpoints(self) -> list[Endpoint]:
        return [self.http] if self.calls is None else [self.http, self.grpc]

    def endpoint(self, over_grpc: bool) -> Endpoint:
        return self.grpc if over_grpc else self.http

    @property
    def is_up(self) -> bool:
        """Return True if at least one endpoint answers."""
        return not all(endpoint.breaker.is_open for endpoint in self.endpoints)

    def note_load(self, model: bytes) -> None:
        """It has loaded the model; the next check tells which versions."""
        if self.contents is not None:
            known, ready = self.contents
            self.contents = Contents(known | {model}, ready | {model})
        self.http.check_wanted.set()

    def note_unload(self, model: bytes) -> None:
        if self.contents is not None:
            known, ready = self.contents
            prefix = model + b"/"
            left = frozenset(key for key in ready if key != model and not key.startswith(prefix))
            self.contents = Contents(known, left)

    async def check(self, endpoint: Endpoint, within_seconds: Seconds) -> None:
        """Return if it answers there as it should. Raises NotFetched."""
        await self._checks.check(self, endpoint, within_seconds)

    async def index(self, within_seconds: Seconds) -> Mapping[str, IndexedModel] | None:
        """Ask for its models. Returns None if the answer is no index. Raises NotFetched."""
        return await self._checks.index(self, within_seconds)

    async def change(self, model: str, *, loads: bool, within_seconds: Seconds) -> None:
        """Have it load or unload a model that the ledger does not know. Raises Problem."""
        try:
            fault = await self._checks.change(self, model, loads=loads, within_seconds=within_seconds)
        except NotFetched as failed:
            raise problem_of(failed.trouble, self.name, str(failed)) from None
        if fault:
            what = "load" if loads else "unload"
            detail = f"server {self.name} did not {what} model {model[:100]}: {fault}"
            raise Problem("model-not-loaded", detail)
        (self.note_load if loads else self.note_unload)(model.encode())

    def lists(self, model: str) -> bool:
        """Return whether its last index had the model."""
        return self.contents is not None and model.encode() in self.contents.known

    async def may_have(self, model: str) -> bool:
        """Ask for its models. Returns False only if the server says that its repository lacks this one."""
        try:
            models = await self.index(_CHECK_SECONDS)
        except NotFetched:
            return True
        return models is None or model in models

    async def close(self) -> None:
        for endpoint in self.endpoints:
            endpoint.close()
        await self.backend.close()
        if self.calls is not None:
            await self.calls.close()


class Fleet:
    """All model servers, and the choice among them."""

    def __init__(self, servers: Sequence[Server], residencies: Residencies | None = None) -> None:
        """`servers`: one at least. `residencies`: of those with models in the ledger."""
        self.servers = tuple(servers)
        self._only = servers[0] if len(servers) == 1 else None
        self._residencies = residencies
        self._turns = 0
        if residencies is not None and self._only is None:
            residencies.is_up = self.is_up

    def is_up(self, name: str) -> bool:
        return any(server.is_up for server in self.servers if server.name == name)

    def has_choice(self, over_grpc: bool) -> bool:
        return self._only is None and len(self._able(over_grpc)) > 1

    def is_outside_ledger(self, model: str) -> bool:
        """A server without models in the ledger has it ready."""
        if self._only is not None:
            return False
        key = model.encode()
        return any(
            server.is_up and server.contents is not None and key in server.contents.ready
            for server in self.servers
            if not server.is_managed
        )

    def pick(
        self,
        target: Target,
        *,
        over_grpc: bool = False,
        tried: Collection[Server] = (),
        before: Server | None = None,
    ) -> Server | None:
        """Where a request goes; None if all servers that could take it were `tried`. The first of these:

        1. of those that have the model and answer, the one that its stream was at `before`, or else the one
           with fewest requests in flight; of several the next in turn
        2. one that has the model, though it does not answer
        3. the same of those that do not say what they have
        4. where none has it, or the request names no model: the first that answers, which will say so
        5. the first
        """
        if self._only is not None:
            return None if tried else self._only
        able = self._able(over_grpc)
        if len(able) == 1:
            return None if tried else able[0]
        having = self._having(able, target) if target.model else []
        left = [server for server in having or able if server not in tried]
        up = [server for server in left if not server.endpoint(over_grpc).breaker.is_open]
        if having and up:
            return before if before in up else self._least_busy(up)
        if up:
            return up[0]
        return left[0] if left and not tried else None

    def another_has(self, target: Target, tried: Collection[Server], *, over_grpc: bool) -> bool:
        """Return whether a server that was not `tried` has the model in memory, and answers."""
        if self._only is not None:
            return False
        key, name = self._names_of(target)
        return any(
            self._has(server, key, name)
            for server in self._able(over_grpc)
            if server not in tried and not server.endpoint(over_grpc).breaker.is_open
        )

    def all_for(self, target: Target, over_grpc: bool) -> list[Server]:
        """The servers that a request goes to which is not for one server alone: those that have its model.
        Of those the ones that answer, if there are any. Empty where one server gets it, as it came."""
        if target.operation.fan_out is None or not self.has_choice(over_grpc):
            return []
        able = self._able(over_grpc)
        having = self._having(able, target) if target.model else able
        found = [one for one in having if not one.endpoint(over_grpc).breaker.is_open] or [*having]
        return found if len(found) > 1 or target.operation.unloads else []

    def _able(self, over_grpc: bool) -> Sequence[Server]:
        return [one for one in self.servers if one.calls is not None] if over_grpc else self.servers

    def _having(self, servers: Sequence[Server], target: Target) -> list[Server]:
        """Return the servers that have the model in memory; for a load, if there is none, in the repository.
        If no server has it, those that do not say what they have may."""
        model, (key, name) = target.model, self._names_of(target)
        having = [server for server in servers if self._has(server, key, name)]
        if target.operation.loads and not having:
            having = [one for one in servers if one.contents is not None and model in one.contents.known]
        if not having:
            having = [one for one in servers if one.contents is None and not one.is_managed]
            for server in servers:
                server.http.check_wanted.set()
        return having

    def _names_of(self, target: Target) -> tuple[bytes, str]:
        """Return the model's name in `Contents`, and in the ledger."""
        model, version = target.model, target.version
        key = b"%b/%b" % (model, version) if version else model
        return key, model.decode(errors="replace") if self._residencies is not None else ""

    def _has(self, server: Server, key: bytes, name: str) -> bool:
        if server.is_managed and self._residencies is not None:
            residency = self._residencies.at(server.name)
            return residency is not None and residency.is_there(name)
        return server.contents is not None and key in server.contents.ready

    def _least_busy(self, servers: Sequence[Server]) -> Server:
        self._turns += 1
        first = self._turns % len(servers)
        return min((*servers[first:], *servers[:first]), key=lambda server: server.in_flight)

    def rows(self) -> Iterator[ServerRow]:
        """Yield the rows of the metrics."""
        for server in self.servers:
            ways = [(one.protocol, not one.breaker.is_open, one.faults) for one in server.endpoints]
            yield ServerRow(server.name, ways, server.in_flight, server.passed_on)
