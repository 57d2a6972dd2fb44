"""The servers of models, and which of them is asked."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from gpubroker_server.gateway.proxy.aims import Aim, Asked
from gpubroker_server.gateway.proxy.attempt import NOTHING_SENT, Attempt
from gpubroker_server.gateway.proxy.cold import Refusable
from gpubroker_server.gateway.proxy.gather import Gather
from gpubroker_server.gateway.proxy.residency.residencies import Residencies
from gpubroker_server.gateway.proxy.server import Server
from gpubroker_server.ports.backends import Asking, RequestHead, Trouble
from gpubroker_server.telemetry.metrics import ServerRow

IDEMPOTENT: Final = "x-idempotent"
"""A header, `true`: doing it twice does no harm, so that it may go to a second server when the first one
breaks off."""

_IDEMPOTENT = IDEMPOTENT.encode()
_UNCHANGING = frozenset({b"GET", b"HEAD"})
_AGAIN = NOTHING_SENT | {Trouble.BROKEN}
"""What may be done twice; but not while a server that says nothing may still be at it."""
_AT_WILL = _AGAIN | {Trouble.SILENT}
"""What changes nothing."""


class Fleet:
    def __init__(self, servers: Sequence[Server], residencies: Residencies | None = None) -> None:
        """`servers`: one at least. `residencies`: of those whose models are in the ledger."""
        self.servers = tuple(servers)
        self.only = servers[0] if len(servers) == 1 else None
        """There is no choice, and nothing to do for one."""
        self._residencies = residencies
        self._turns = 0
        if residencies is not None and self.only is None:
            residencies.is_up = self.is_up

    def is_up(self, name: str) -> bool:
        return any(server.is_up for server in self.servers if server.name == name)

    def is_outside(self, model: str) -> bool:
        """A server has it of whose models the ledger knows nothing."""
        if self.only is not None:
            return False
        key = model.encode()
        return any(
            server.is_up and server.contents is not None and key in server.contents.ready
            for server in self.servers
            if not server.is_managed
        )

    def ask(self, head: RequestHead, answer: Refusable, aim: Aim, to_us: Mapping[bytes, bytes]) -> Asking:
        """`to_us`: headers of the client for the service itself."""
        if self.only is not None:
            answer.server = self.only
            return self.only.backend.ask(head, answer)
        if aim.asked is not Asked.ONE:
            servers = self._concerned(aim)
            if len(servers) > 1 or (servers and aim.unloads):
                return Gather(servers, head, answer, aim)
        if head.method in _UNCHANGING:
            return Attempt(self, head, answer, aim, _AT_WILL)
        is_idempotent = to_us.get(_IDEMPOTENT, b"").lower() == b"true"
        return Attempt(self, head, answer, aim, _AGAIN if is_idempotent else NOTHING_SENT)

    def pick(
        self,
        model: bytes,
        version: bytes = b"",
        *,
        loads: bool = False,
        over_grpc: bool = False,
        tried: Collection[Server] = (),
    ) -> Server | None:
        """Where a request goes; None if all that come into question were `tried`. The first of these:

        1. of those that have the model and answer, who has least to do; of several the next in turn
        2. one that has the model, though it does not answer
        3. the same of those that do not say what they have
        4. where none has it, or it is about none: the first that answers, which says so itself
        5. the first
        """
        able = [server for server in self.servers if not over_grpc or server.calls is not None]
        having = self.having(able, model, version, loads=loads) if model else ()
        left = [server for server in having or able if server not in tried]
        up = [server for server in left if not server.way(over_grpc).breaker.is_open]
        if having and up:
            return self._least(up)
        if up:
            return up[0]
        return left[0] if left and not tried else None

    def _concerned(self, aim: Aim) -> list[Server]:
        servers = self.having(self.servers, aim.model, aim.version) if aim.model else self.servers
        return [server for server in servers if not server.http.breaker.is_open] or [*servers]

    def having(
        self, servers: Collection[Server], model: bytes, version: bytes, *, loads: bool = False
    ) -> list[Server]:
        """In memory; of a load, if there is none, in the repository. Where no server has it, those that tell
        nothing may."""
        key = b"%b/%b" % (model, version) if version else model
        name = model.decode(errors="replace") if self._residencies is not None else ""
        having = [server for server in servers if self._has(server, key, name)]
        if loads and not having:
            having = [one for one in servers if one.contents is not None and model in one.contents.known]
        if not having:
            having = [one for one in servers if one.contents is None and not one.is_managed]
            for server in servers:
                server.http.look_wanted.set()
        return having

    def _has(self, server: Server, key: bytes, name: str) -> bool:
        if server.is_managed and self._residencies is not None:
            residency = self._residencies.at(server.name)
            return residency is not None and residency.is_there(name)
        return server.contents is not None and key in server.contents.ready

    def _least(self, servers: Sequence[Server]) -> Server:
        self._turns += 1
        first = self._turns % len(servers)
        return min((*servers[first:], *servers[:first]), key=_in_flight)

    def rows(self) -> Iterator[ServerRow]:
        """For the metrics."""
        for server in self.servers:
            ways = [(way.protocol, not way.breaker.is_open, way.faults) for way in server.ways]
            yield ServerRow(server.name, ways, server.in_flight, server.passed_on)


def _in_flight(server: Server) -> int:
    return server.in_flight
