"""Models that no server has, or has had for a moment only."""

import asyncio

import pytest
from gpubroker_server.adapters.triton.http_backend import HttpBackend, TritonServer
from gpubroker_server.core.domain.policy import InferenceServers
from gpubroker_server.inference.servers import Server

from tests.gateway.harness import problem
from tests.gateway.test_inferences_queued import OPEN, a_body, a_gateway, ask
from tests.gateway.test_several_servers import answering

BOTH = InferenceServers(ledger=("main",), others=("lab",))


@pytest.mark.parametrize("serving", [OPEN, BOTH])
async def test_model_no_server_has_is_refused_where_all_servers_can_say_so(
    serving: InferenceServers,
) -> None:
    """Servers outside the ledger are asked for their index too."""
    indexed = answering(b'[{"name":"by-hand"}]')
    async with a_gateway(serving=serving) as gateway:
        await ask(gateway, 1, model="lab-only")
        await ask(gateway, 1, model="unheard")  # the server does not answer now, and may have it
        [lab] = gateway.parts.servers
        assert isinstance(lab, Server)
        answers = await asyncio.start_server(indexed, "localhost", 0)
        port = answers.sockets[0].getsockname()[1]
        lab.backend = HttpBackend(TritonServer("lab", "localhost", port, b"localhost:8000"))
        await ask(gateway, 1, model="by-hand")
        unknown = await gateway.admin.post("/inferences", json=a_body(1, model="unheard"))
        assert '"unheard"' in problem(unknown, 404, "not-found")["detail"]
        await lab.close()
        answers.close()
