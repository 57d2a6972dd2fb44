"""Regular checks of each model server: whether it answers over the connections that requests use, and which
models its repository has."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.inference.servers import Endpoint, Server, contents_of
from gpubroker_server.ports.backends import NotFetched


class CheckRules(NamedTuple):
    every_seconds: Seconds = Seconds(5.0)
    """Interval between checks of a server that answers."""
    rest_seconds: Seconds = Seconds(0.2)
    """The shortest time between two checks, even if a request has failed or has named a model that no server
    has."""
    doubt_seconds: Seconds = Seconds(1.0)
    """Interval between checks of a server that did not answer the last time."""
    answer_seconds: Seconds = Seconds(3.0)
    """The longest time that an answer may take."""


class HealthChecks:
    def __init__(self, servers: Sequence[Server], rules: CheckRules | None = None) -> None:
        self._servers = servers
        self._rules = rules or CheckRules()

    async def keep(self) -> None:
        """Check every endpoint of every server until cancelled."""
        async with asyncio.TaskGroup() as group:
            for server in self._servers:
                for endpoint in server.endpoints:
                    group.create_task(self._keep(server, endpoint))

    async def check_all(self) -> None:
        """Check every endpoint of every server once, all at the same time."""
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
        # The event is cleared before the check: what happens during the check is reason for another one.
        endpoint.check_wanted.clear()
        within = self._rules.answer_seconds
        try:
            await server.check(endpoint, within)
            # The ledger has the models of managed servers. Other servers are asked, once for both protocols.
            if endpoint is server.http and not server.is_managed:
                models = await server.index(within)
                server.contents = None if models is None else contents_of(models)
        except NotFetched as failed:
            endpoint.failed(failed.trouble, str(failed))
        else:
            endpoint.answered()
