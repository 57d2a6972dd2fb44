"""Models that no server has, or has had for a moment only."""

import asyncio

import pytest
from gpubroker_server.adapters.triton.http_backend import HttpBackend, TritonServer
from gpubroker_server.core.domain.policy import InferenceServers

from tests.gateway.harness import problem
from tests.gateway.test_inferences_queued import OPEN, a_body, a_gateway, ask
from tests.gateway.test_several_servers import INFER, Heard, a_stage, answering, have

BOTH = InferenceServers(ledger=("main",), others=("lab",))


@pytest.mark.parametrize("serving", [OPEN, BOTH])
async def test_a_model_that_no_server_has_is_refused_where_servers_outside_the_ledger_say_so_too(
    serving: InferenceServers,
) -> None:
    indexed = answering(b'[{"name":"by-hand"}]')
    async with a_gateway(serving=serving) as gateway:
        await ask(gateway, 1, model="lab-only")
        await ask(gateway, 1, model="unheard")  # the server does not answer now, and may have it
        [lab] = gateway.parts.servers
        answers = await asyncio.start_server(indexed, "localhost", 0)
        port = answers.sockets[0].getsockname()[1]
        lab.backend = HttpBackend(TritonServer("lab", "localhost", port, b"localhost:8000"))
        await ask(gateway, 1, model="by-hand")
        unknown = await gateway.admin.post("/inferences", json=a_body(1, model="unheard"))
        assert '"unheard"' in problem(unknown, 404, "not-found")["detail"]
        await lab.close()
        answers.close()


async def test_a_model_that_was_loaded_a_moment_ago_is_found_before_the_next_check() -> None:
    unknown = answering(b'{"error":"Request for unknown model: \'any\' is not found"}', b"404 Not Found")
    async with a_stage(unknown, others=[b := Heard(), Heard()]) as stage:
        have(stage, set(), set(), set())
        assert (await stage.ask("POST", INFER, b"{}"))[0] == 200
        assert (len(unknown.heads), b.bodies) == (1, [b"{}"])
    async with a_stage(unknown, others=[unknown]) as stage:
        have(stage, set(), set())
        status, _, body = await stage.ask("POST", INFER, b"{}")
        assert (status, b"unknown model" in body) == (404, True), "neither has it"
        assert [one.in_flight for one in stage.fleet.servers] == [0, 0]
    assert len(unknown.heads) == 3
