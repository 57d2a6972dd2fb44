"""The model servers as the data plane sees them: their health, their models, and the choice among them."""

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
"""Troubles that are the server's fault."""

_CHECK_SECONDS: Final = Seconds(3.0)
"""The longest time that a server may take for its index while a request waits for it."""


class Contents(NamedTuple):
    """The models that a server says it has."""

    known: frozenset[bytes] = frozenset()
    """Names of the models in the server's repository."""
    ready: frozenset[bytes] = frozenset()
    """Names of the models in memory, and `model/version` for each version in memory."""


def contents_of(models: Mapping[str, IndexedModel]) -> Contents:
    known, ready = {name.encode() for name in models}, set[bytes]()
    for name, model in models.items():
        if model.stage is ModelState.READY:
            ready |= {name.encode(), *(f"{name}/{version}".encode() for version in model.versions)}
    return Contents(frozenset(known), frozenset(ready))


class ServerChecks(Protocol):
    """Questions to a kind of model server about itself. All methods raise NotFetched."""

    async def check(self, server: "Server", endpoint: "Endpoint", within_seconds: Seconds) -> None:
        """Check that the server answers at the endpoint as it should."""

    async def index(self, server: "Server", within_seconds: Seconds) -> Mapping[str, IndexedModel] | None:
        """Return the models of the server's repository, or None if the answer is no index."""

    async def change(self, server: "Server", model: str, *, loads: bool, within_seconds: Seconds) -> str:
        """Have the server load or unload the model. Returns the reason why the server did not; empty if it
        did."""


class Endpoint:
    """One of the protocols over which a server is asked. Each has its own port."""

    __slots__ = ("_is_closed", "_now", "_server", "breaker", "check_wanted", "faults", "protocol", "refusal")

    def __init__(
        self, server: str, protocol: str, rules: BreakerRules | None, now: Callable[[], float]
    ) -> None:
        self.protocol = protocol
        self.breaker = Breaker(rules)
        self.faults = 0
        """The number of faults since the start."""
        self.check_wanted = asyncio.Event()
        """Set if there is reason to check at once whether the server answers, and which models it has."""
        self.refusal = ""
        """The server's last refusal of the service's credentials; empty after an answer about a model."""
        self._server = server
        self._now = now
        self._is_closed = False

    @property
    def open_seconds(self) -> Seconds:
        return self.breaker.open_seconds(MonotonicSeconds(self._now()))

    def refused(self, why: str) -> None:
        """Note that the server does not accept the service's credentials. Such a server answers, so it is not
        down."""
        if not self.refusal and not self._is_closed:
            log.warning(
                "a model server refuses the service", server=self._server, way=self.protocol, fault=why
            )
        self.refusal = why

    def close(self) -> None:
        """Ignore failures from now on: they come from closing, not from the server."""
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
        """`is_managed` is True if the server's models are in the ledger, which then says which models the
        server has."""
        self.name = name
        self.backend = backend
        self._checks = checks
        self.calls: CallBackend | None = None
        """Set if the proxy speaks gRPC, and the server has a port for it."""
        self.is_managed = is_managed
        self.http = Endpoint(name, "http", rules, now)
        self.grpc = Endpoint(name, "grpc", rules, now)
        self.in_flight = 0
        """Number of requests that were sent to the server and are not answered."""
        self.passed_on = 0
        """The number of requests since the start that went to another server because this one had failed."""
        self.contents: Contents | None = None
        """The models that the server has; None if it has not said."""

    @property
    def endpoints(self) -> list[Endpoint]:
        return [self.http] if self.calls is None else [self.http, self.grpc]

    def endpoint(self, over_grpc: bool) -> Endpoint:
        return self.grpc if over_grpc else self.http

    @property
    def is_up(self) -> bool:
        """True if at least one endpoint answers."""
        return not all(endpoint.breaker.is_open for endpoint in self.endpoints)

    def note_load(self, model: bytes) -> None:
        """Note that the server has loaded the model. The next check finds out which versions."""
        if self.contents is not None:
            known, ready = self.contents
            self.contents = Contents(known | {model}, ready | {model})
        self.http.check_wanted.set()

    def note_unload(self, model: bytes) -> None:
        if self.contents is not None:
            known, ready = self.contents
            prefix = model + b"/"
            ready_now = frozenset(key for key in ready if key != model and not key.startswith(prefix))
            self.contents = Contents(known, ready_now)

    async def check(self, endpoint: Endpoint, within_seconds: Seconds) -> None:
        """Check that the server answers at the endpoint as it should. Raises NotFetched."""
        await self._checks.check(self, endpoint, within_seconds)

    async def index(self, within_seconds: Seconds) -> Mapping[str, IndexedModel] | None:
        """Ask the server for its models. Returns None if the answer is no index. Raises NotFetched."""
        return await self._checks.index(self, within_seconds)

    async def change(self, model: str, *, loads: bool, within_seconds: Seconds) -> None:
        """Have the server load or unload a model that the ledger does not know. Raises Problem."""
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
        """Return True if the server's last index had the model."""
        return self.contents is not None and model.encode() in self.contents.known

    async def may_have(self, model: str) -> bool:
        """Ask the server for its models. Returns False only if the server says that its repository lacks this
        model."""
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
        """`servers` has at least one server. `residencies` are the models of the servers that the ledger
        manages."""
        self.servers = tuple(servers)
        self._only = servers[0] if len(servers) == 1 else None
        self._residencies = residencies
        self._turns = 0
        if residencies is not None and self._only is None:
            residencies.answers = self.answers

    def answers(self, name: str, over_grpc: bool) -> bool:
        """Return True if the server of this name answers over gRPC, or else over HTTP."""
        return any(
            server.name == name and not server.endpoint(over_grpc).breaker.is_open
            for server in self._able(over_grpc)
        )

    def has_choice(self, over_grpc: bool) -> bool:
        return self._only is None and len(self._able(over_grpc)) > 1

    def is_outside_ledger(self, model: str, *, over_grpc: bool) -> bool:
        """Return True if a server whose models are not in the ledger has the model ready, and answers over
        gRPC, or else over HTTP."""
        if self._only is not None:
            return False
        key = model.encode()
        return any(
            server.contents is not None and key in server.contents.ready
            for server in self._able(over_grpc)
            if not server.is_managed and not server.endpoint(over_grpc).breaker.is_open
        )

    def pick(
        self,
        target: Target,
        *,
        over_grpc: bool = False,
        tried: Collection[Server] = (),
        before: Server | None = None,
    ) -> Server | None:
        """Return the server that a request goes to, or None if all servers that could take it were `tried`.
        It is the first of these:

        1. of the servers that have the model and answer: the one at which the stream was `before`, or else
           the one with fewest requests in flight, and of several such the next in turn
        2. a server that has the model, although it does not answer
        3. the same choice among the servers that have not said which models they have
        4. if no server has the model, or the request names none: the first that answers, which will say so
        5. the first server
        """
        if self._only is not None:
            return None if tried else self._only
        able = self._able(over_grpc)
        if len(able) == 1:
            return None if tried else able[0]
        having = self._having(able, target) if target.model else []
        untried = [server for server in having or able if server not in tried]
        up = [server for server in untried if not server.endpoint(over_grpc).breaker.is_open]
        if having and up:
            return before if before in up else self._least_busy(up)
        if up:
            return up[0]
        return untried[0] if untried and not tried else None

    def another_has(self, target: Target, tried: Collection[Server], *, over_grpc: bool) -> bool:
        """Return True if a server that was not `tried` has the model in memory and answers."""
        if self._only is not None:
            return False
        key, name = self._names_of(target)
        return any(
            self._has(server, key, name)
            for server in self._able(over_grpc)
            if server not in tried and not server.endpoint(over_grpc).breaker.is_open
        )

    def all_for(self, target: Target, over_grpc: bool) -> list[Server]:
        """Return the servers that get a request which is not for one server alone: the servers that have its
        model, without those that do not answer, unless none answers. Returns an empty list if one server gets
        the request as it came."""
        if target.operation.fan_out is None or not self.has_choice(over_grpc):
            return []
        able = self._able(over_grpc)
        having = self._having(able, target) if target.model else able
        up = [server for server in having if not server.endpoint(over_grpc).breaker.is_open]
        chosen = up or [*having]
        return chosen if len(chosen) > 1 or target.operation.unloads else []

    def _able(self, over_grpc: bool) -> Sequence[Server]:
        if not over_grpc:
            return self.servers
        return [server for server in self.servers if server.calls is not None]

    def _having(self, servers: Sequence[Server], target: Target) -> list[Server]:
        """Return the servers that have the model in memory or else, for a load, in the repository. If no
        server has the model, return those that have not said which models they have: they may have it."""
        model, (key, name) = target.model, self._names_of(target)
        having = [server for server in servers if self._has(server, key, name)]
        if target.operation.loads and not having:
            having = [
                server for server in servers if server.contents is not None and model in server.contents.known
            ]
        if not having:
            having = [server for server in servers if server.contents is None and not server.is_managed]
            # A server may have got the model since its last check.
            for server in servers:
                server.http.check_wanted.set()
        return having

    def _names_of(self, target: Target) -> tuple[bytes, str]:
        """Return the model's name in `Contents` and its name in the ledger."""
        model, version = target.model, target.version
        key = b"%b/%b" % (model, version) if version else model
        return key, model.decode(errors="replace") if self._residencies is not None else ""

    def _has(self, server: Server, key: bytes, name: str) -> bool:
        if server.is_managed and self._residencies is not None:
            residency = self._residencies.at(server.name)
            return residency is not None and residency.is_there(name)
        return server.contents is not None and key in server.contents.ready

    def _least_busy(self, servers: Sequence[Server]) -> Server:
        # Of servers with equally many requests `min` takes the first: a different server at each turn.
        self._turns += 1
        first = self._turns % len(servers)
        return min((*servers[first:], *servers[:first]), key=lambda server: server.in_flight)

    def rows(self) -> Iterator[ServerRow]:
        """Yield the rows of the metrics."""
        for server in self.servers:
            ways = [
                (endpoint.protocol, not endpoint.breaker.is_open, endpoint.faults)
                for endpoint in server.endpoints
            ]
            yield ServerRow(server.name, ways, server.in_flight, server.passed_on)
