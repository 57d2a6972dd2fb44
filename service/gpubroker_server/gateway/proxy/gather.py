"""One request that several servers are asked, and one answer made of theirs."""

import asyncio
from collections.abc import Sequence
from typing import Final

from gpubroker_server.gateway.http.problems import Problem
from gpubroker_server.gateway.proxy.aims import Aim, Asked
from gpubroker_server.gateway.proxy.cold import HELD_BYTES, Refusable
from gpubroker_server.gateway.proxy.fetch import Fetched, NotFetched, fetch
from gpubroker_server.gateway.proxy.merging import merged_index, summed_statistics
from gpubroker_server.gateway.proxy.refusals import problem_of
from gpubroker_server.gateway.proxy.server import Server
from gpubroker_server.ports.backends import Asking, RequestHead, Trouble

GATHER_SECONDS: Final = 10.0
"""Whoever has not answered by then is left out."""

_WELL: Final = 200

_OURS: Final = frozenset({b"accept-encoding", b"if-none-match", b"if-modified-since", b"range"})
"""Headers of the client that would make of an answer what cannot be put together."""


class Gather(Asking):
    def __init__(self, servers: Sequence[Server], head: RequestHead, answer: Refusable, aim: Aim) -> None:
        kept = [header for header in head.headers if header[0].lower() not in _OURS]
        self._servers = servers
        self._head = head._replace(headers=kept)
        self._answer = answer
        self._aim = aim
        self._asked = aim.asked
        self._body: list[bytes] = []
        self._bytes = 0
        self._task: asyncio.Task[None] | None = None

    def write(self, data: bytes) -> None:
        self._bytes += len(data)
        if self._bytes <= HELD_BYTES:
            self._body.append(data)

    def flush(self) -> None:
        pass

    def end(self) -> None:
        self._task = asyncio.ensure_future(self._gather(b"".join(self._body)))

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def hold_answer(self) -> None:
        pass

    def go_on_with_answer(self) -> None:
        pass

    async def _gather(self, body: bytes) -> None:
        try:
            if self._bytes > HELD_BYTES:
                raise Problem("payload-too-large", f"a request about all servers may have {HELD_BYTES} bytes")
            found = await self._asked_all(body)
            told = self._made_of(found)
        except Exception as fault:
            self._answer.on_refused(fault)
            return
        answer = self._answer
        headers = [header for header in told.headers if header[0].lower() != b"content-length"]
        answer.on_head(told.status, headers, len(told.body))
        answer.on_body(told.body)
        answer.on_end()

    async def _asked_all(self, body: bytes) -> list[Fetched]:
        """Of those that answered, in the order of the servers. Raises Problem if none has."""
        if self._asked is Asked.EACH:
            each = [await self._ask(server, body) for server in self._servers]
        else:
            each = await asyncio.gather(*(self._ask(server, body) for server in self._servers))
        found = [one for one in each if isinstance(one, Fetched)]
        if self._asked is Asked.EACH:
            for one in each:
                if isinstance(one, Problem):
                    raise one
        if not found:
            raise next(one for one in each if isinstance(one, Problem))
        return found

    async def _ask(self, server: Server, body: bytes) -> Fetched | Problem:
        try:
            found = await fetch(server.backend, self._head, body, GATHER_SECONDS)
        except NotFetched as failed:
            if failed.trouble is not Trouble.SILENT:  # its connections may all be in use
                server.http.failed(failed.trouble, str(failed))
            return problem_of(failed.trouble, server.name, str(failed))
        server.http.answered()
        if self._aim.unloads and found.status == _WELL:
            server.note_unload(self._aim.model)
        return found

    def _made_of(self, found: Sequence[Fetched]) -> Fetched:
        well = [one for one in found if one.status == _WELL]
        if self._asked is Asked.EACH:
            return next((one for one in found if one.status != _WELL), found[0])
        if len(well) < 2 or self._asked is Asked.ANY:
            return well[0] if well else found[0]
        join = merged_index if self._asked is Asked.INDEX else summed_statistics
        try:
            return well[0]._replace(body=join([one.body for one in well]))
        except (ValueError, KeyError, TypeError) as fault:
            servers = ", ".join(server.name for server in self._servers)
            raise problem_of(
                Trouble.BROKEN, servers, f"what came cannot be put together: {fault!r}"
            ) from None
