"""The servers of models over gRPC: which of them is called, and what becomes of a call that one does not
answer."""

import asyncio
from collections.abc import Sequence
from time import monotonic
from typing import Final

from gpubroker_server.gateway.proxy.aims import Asked
from gpubroker_server.gateway.proxy.calls import CallAim, about, changes_settings
from gpubroker_server.gateway.proxy.fleet import Fleet
from gpubroker_server.gateway.proxy.gather import GATHER_SECONDS
from gpubroker_server.gateway.proxy.merging_calls import chosen_live, merged_index, summed_statistics
from gpubroker_server.gateway.proxy.server import Server
from gpubroker_server.ports.backends import Call, CallAnswer, CallFailed, Metadata, Trouble

UNAVAILABLE: Final = 14
"""As numbered by gRPC: a connection that was lost, or the server's own word."""

_OF_THE_CLIENT: Final = frozenset({1, 4})
"""CANCELLED and DEADLINE_EXCEEDED say nothing of the server."""


class CallFleet:
    def __init__(self, fleet: Fleet) -> None:
        """One server of it at least speaks gRPC."""
        self._fleet = fleet
        self.servers = [server for server in fleet.servers if server.calls is not None]
        self.has_choice = len(self.servers) > 1

    async def ask(
        self,
        aim: CallAim,
        method: str,
        message: bytes,
        metadata: Metadata,
        seconds: float | None,
        *,
        is_idempotent: bool = False,
    ) -> CallAnswer:
        """Raises CallFailed. `is_idempotent`: the client says that doing it twice does no harm."""
        if not self.has_choice:
            return await _ask(self.servers[0], method, message, metadata, seconds)
        if aim.asked is not Asked.ONE and not (aim.sets and not changes_settings(message)):
            servers = self._concerned(aim, message)
            if len(servers) > 1 or (servers and aim.unloads):
                return await _gather(aim, servers, method, message, metadata, seconds)
        until = None if seconds is None else monotonic() + seconds
        model, version = about(aim, message)
        tried: list[Server] = []
        server = self._fleet.pick(model, version, loads=aim.loads, over_grpc=True)
        while True:
            assert server is not None  # of the first there always is one
            left = None if until is None else max(0.0, until - monotonic())
            try:
                answer = await _ask(server, method, message, metadata, left)
            except CallFailed as failed:
                tried.append(server)
                server = None
                if _goes_on(failed, reads=aim.reads, is_idempotent=is_idempotent):
                    server = self._fleet.pick(model, version, loads=aim.loads, over_grpc=True, tried=tried)
                if server is None:
                    raise
                tried[-1].passed_on += 1
            else:
                if aim.loads:
                    server.note_load(model)
                return answer

    def open(
        self, aim: CallAim, method: str, first: bytes, metadata: Metadata, seconds: float | None
    ) -> tuple[Server, Call]:
        """Where the model is that the first message names. A stream is never opened again."""
        server: Server | None = self.servers[0]
        if self.has_choice:
            server = self._fleet.pick(*about(aim, first), over_grpc=True)
        assert server is not None  # nothing was tried
        assert server.calls is not None
        return server, server.calls.open(method, metadata, seconds)

    def _concerned(self, aim: CallAim, message: bytes) -> list[Server]:
        model, version = about(aim, message)
        servers = self._fleet.having(self.servers, model, version) if model else self.servers
        return [server for server in servers if not server.grpc.breaker.is_open] or [*servers]


async def _ask(
    server: Server, method: str, message: bytes, metadata: Metadata, seconds: float | None
) -> CallAnswer:
    assert server.calls is not None
    server.in_flight += 1
    try:
        answer = await server.calls.ask(method, message, metadata, seconds)
    except CallFailed as failed:
        note(server, failed)
        raise
    finally:
        server.in_flight -= 1
    server.grpc.answered()
    return answer


def note(server: Server, failed: CallFailed) -> None:
    """What this says of the server."""
    if failed.trouble is not None:
        server.grpc.failed(failed.trouble, failed.detail)
    elif failed.code == UNAVAILABLE:
        server.grpc.look_wanted.set()  # whose word it is, nobody can tell
    elif failed.code not in _OF_THE_CLIENT:
        server.grpc.answered()


def _goes_on(failed: CallFailed, *, reads: bool, is_idempotent: bool) -> bool:
    """To another server."""
    if failed.trouble is Trouble.UNREACHABLE:
        return True
    if failed.code == UNAVAILABLE and (reads or is_idempotent):
        return True
    return failed.trouble is Trouble.SILENT and reads


async def _gather(
    aim: CallAim,
    servers: Sequence[Server],
    method: str,
    message: bytes,
    metadata: Metadata,
    seconds: float | None,
) -> CallAnswer:
    """Raises CallFailed: of `EACH` the first, of all others if none has answered."""
    if aim.asked is Asked.EACH:
        told: list[CallAnswer] = []
        for server in servers:
            told.append(await _ask(server, method, message, metadata, seconds))
            if aim.unloads:
                server.note_unload(about(aim, message)[0])
        return told[0]
    within = GATHER_SECONDS if seconds is None else min(seconds, GATHER_SECONDS)
    each = await asyncio.gather(
        *(_ask(server, method, message, metadata, within) for server in servers), return_exceptions=True
    )
    found = [one for one in each if isinstance(one, CallAnswer)]
    for fault in each:
        if isinstance(fault, BaseException) and not (found and isinstance(fault, CallFailed)):
            raise fault
    join = {Asked.INDEX: merged_index, Asked.STATISTICS: summed_statistics}.get(aim.asked, chosen_live)
    return found[0]._replace(message=join([answer.message for answer in found]))
