"""Checks each server all the time: whether it answers, over the connections that requests use, and what is
in its repository."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.gateway.proxy.servers import Contents, Endpoint, Server
from gpubroker_server.ports.backends import CallFailed, RequestHead, Trouble
from gpubroker_server.ports.fetch import NotFetched, fetch

_LIVE_CALL: Final = "/inference.GRPCInferenceService/ServerLive"
_LIVE: Final = RequestHead(b"GET", b"/v2/health/live", (), 0)
_INDEX: Final = RequestHead(b"POST", b"/v2/repository/index", (), 0)


class CheckRules(NamedTuple):
    every_seconds: Seconds = Seconds(5.0)
    """How often each server is checked."""
    rest_seconds: Seconds = Seconds(0.2)
    """The shortest time between two checks, when something went wrong or a model was asked for that no server
    has."""
    doubt_seconds: Seconds = Seconds(1.0)
    """How often a server is checked that did not answer the last time."""
    answer_seconds: Seconds = Seconds(3.0)
    """How long the answer may take."""


class HealthChecks:
    def __init__(self, servers: Sequence[Server], rules: CheckRules | None = None) -> None:
        self._servers = servers
        self._rules = rules or CheckRules()

    async def keep(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for server in self._servers:
                for endpoint in server.endpoints:
                    group.create_task(self._keep(server, endpoint))

    async def check_all(self) -> None:
        """Once, all of them together."""
        checks = [self._check(server, endpoint) for server in self._servers for endpoint in server.endpoints]
        await asyncio.gather(*checks)

    async def _keep(self, server: Server, endpoint: Endpoint) -> None:
        rules = self._rules
        while True:
            await self._check(server, endpoint)
            if endpoint.breaker.fault:
                await asyncio.sleep(rules.doubt_seconds)
                continue
            await asyncio.sleep(rules.rest_seconds)
            with suppress(TimeoutError):
                async with asyncio.timeout(rules.every_seconds):
                    await endpoint.check_wanted.wait()

    async def _check(self, server: Server, endpoint: Endpoint) -> None:
        endpoint.check_wanted.clear()
        try:
            if endpoint is server.grpc:
                await self._call(server)
            else:
                await self._ask(server)
        except NotFetched as failed:
            endpoint.failed(failed.trouble, str(failed))
        else:
            endpoint.answered()

    async def _ask(self, server: Server) -> None:
        """Raises NotFetched."""
        within = self._rules.answer_seconds
        found = await fetch(server.backend, _LIVE, within_seconds=within, is_check=True)
        if found.status != 200:
            raise NotFetched(Trouble.BROKEN, f"GET /v2/health/live was answered {found.status}")
        if not server.is_managed:
            rows = await index_of(server, within)
            server.contents = None if rows is None else _contents_of(rows)

    async def _call(self, server: Server) -> None:
        """Raises NotFetched."""
        assert server.calls is not None
        try:
            await server.calls.ask(_LIVE_CALL, b"", (), self._rules.answer_seconds)
        except CallFailed as failed:
            raise NotFetched(failed.trouble or Trouble.BROKEN, failed.detail) from None


async def index_of(server: Server, within_seconds: float) -> list[dict[str, str]] | None:
    """The server's index, a row for each version of a model; None if the answer is no index. Raises
    NotFetched."""
    answer = await fetch(server.backend, _INDEX, within_seconds=within_seconds, is_check=True)
    return rows_in(answer.body) if answer.status == 200 else None


async def may_have(servers: Sequence[Server], model: str) -> bool:
    """Whether one of these has the model in its repository, or does not say what it has."""
    name = model.encode()
    if any(server.contents is not None and name in server.contents.known for server in servers):
        return True
    try:
        indexes = await asyncio.gather(*(index_of(server, CheckRules().answer_seconds) for server in servers))
    except NotFetched:
        return True
    return any(rows is None or any(row.get("name") == model for row in rows) for rows in indexes)


def rows_in(index: bytes) -> list[dict[str, str]] | None:
    """Of the answer to `POST /v2/repository/index`; None if this is something else."""
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
