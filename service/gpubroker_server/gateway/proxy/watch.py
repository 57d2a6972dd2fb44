"""Each server is asked all the time whether it answers, over the connections that requests use, and what it
has."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.gateway.proxy.fetch import NotFetched, fetch, get
from gpubroker_server.gateway.proxy.server import Contents, Server, Way
from gpubroker_server.ports.backends import CallFailed, RequestHead, Trouble

LIVE: Final = "/inference.GRPCInferenceService/ServerLive"
INDEX: Final = RequestHead(b"POST", b"/v2/repository/index", (), 0)


class WatchRules(NamedTuple):
    look_seconds: Seconds = Seconds(5.0)
    """So often each server is asked."""
    rest_seconds: Seconds = Seconds(0.2)
    """And so soon again, at most, when something went wrong, or was asked for that no server has."""
    doubt_seconds: Seconds = Seconds(1.0)
    """So often one that did not answer the last time."""
    answer_seconds: Seconds = Seconds(3.0)
    """So long it may take."""


class Watch:
    def __init__(self, servers: Sequence[Server], rules: WatchRules | None = None) -> None:
        self._servers = servers
        self._rules = rules or WatchRules()
        self._reads_index = len(servers) > 1

    async def keep(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for server in self._servers:
                for way in server.ways:
                    group.create_task(self._keep(server, way))

    async def look_at_all(self) -> None:
        """Once, at all of them together."""
        await asyncio.gather(*(self._look(server, way) for server in self._servers for way in server.ways))

    async def _keep(self, server: Server, way: Way) -> None:
        rules = self._rules
        while True:
            await self._look(server, way)
            if way.breaker.fault:
                await asyncio.sleep(rules.doubt_seconds)
                continue
            await asyncio.sleep(rules.rest_seconds)
            with suppress(TimeoutError):
                async with asyncio.timeout(rules.look_seconds):
                    await way.look_wanted.wait()

    async def _look(self, server: Server, way: Way) -> None:
        way.look_wanted.clear()
        try:
            if way is server.grpc:
                await self._call(server)
            else:
                await self._ask(server)
        except NotFetched as failed:
            way.failed(failed.trouble, str(failed))
        else:
            way.answered()

    async def _ask(self, server: Server) -> None:
        """Raises NotFetched."""
        within = self._rules.answer_seconds
        found = await fetch(server.backend, get(b"/v2/health/live"), within_seconds=within, is_check=True)
        if found.status != 200:
            raise NotFetched(Trouble.BROKEN, f"GET /v2/health/live was answered {found.status}")
        if self._reads_index and not server.is_managed:
            rows = await index_of(server, within)
            server.contents = None if rows is None else _contents_of(rows)

    async def _call(self, server: Server) -> None:
        """Raises NotFetched."""
        assert server.calls is not None
        try:
            await server.calls.ask(LIVE, b"", (), self._rules.answer_seconds)
        except CallFailed as failed:
            raise NotFetched(failed.trouble or Trouble.BROKEN, failed.detail) from None


async def index_of(server: Server, within_seconds: float) -> list[dict[str, str]] | None:
    """What it says that it has, a row for each version of a model; None if that is no index. Raises
    NotFetched."""
    answer = await fetch(server.backend, INDEX, within_seconds=within_seconds, is_check=True)
    return rows_in(answer.body) if answer.status == 200 else None


def rows_in(index: bytes) -> list[dict[str, str]] | None:
    """As `POST /v2/repository/index` is answered; None if this is something else."""
    try:
        return msgspec.json.decode(index, type=list[dict[str, str]])
    except msgspec.DecodeError:
        return None


def _contents_of(rows: Sequence[Mapping[str, str]]) -> Contents:
    known: set[bytes] = set()
    ready: set[bytes] = set()
    for row in rows:
        name = row.get("name", "").encode()
        known.add(name)
        if row.get("state") == "READY":
            ready |= {name, b"%b/%b" % (name, row.get("version", "").encode())}
    return Contents(frozenset(known), frozenset(ready))
