"""A server of models that is said to be where nothing is."""

import pytest
from gpubroker_server.adapters.triton.http_backend import HttpBackend, TritonServer
from gpubroker_server.http.problems import Problem
from gpubroker_server.inference.protocols.triton.checks import TRITON
from gpubroker_server.inference.server_choice import PlaceChecks
from gpubroker_server.inference.servers import Server
from msgspec.structs import replace
from structlog.testing import capture_logs

from tests.builders import a_node
from tests.gateway.harness import Gateway, problem
from tests.gateway.test_models import RULES
from tests.simulated_host import SimulatedHost, SimulatedModel


async def a_gateway(gateway: Gateway, **rules: object) -> None:
    host = SimulatedHost("main", (SimulatedModel("llm"),))
    server = Server(
        "main", HttpBackend(TritonServer("main", "localhost", 1, b"localhost:1")), TRITON, is_managed=True
    )
    gateway.change(servers=[server], served=[(replace(RULES, **rules), host)])
    gateway.admin = await gateway.client("boss")


async def test_a_model_says_that_the_node_of_its_server_has_not_joined() -> None:
    says = 'its node "n1e" has not joined the cluster; there are '
    async with Gateway() as gateway:
        await a_gateway(gateway, node="n1e")
        [listed] = (await gateway.admin.get("/models")).json()["items"]
        one = (await gateway.admin.get("/models/llm")).json()
        [server] = (await gateway.admin.get("/stats")).json()["model_servers"]
        assert server["node_fault"] == says + "n1"
        assert listed["reason"] == one["reason"] == says + "n1"
        problem(await gateway.admin.post("/models/llm/load", json={}), 422, "no-matching-device")


async def test_a_request_before_any_node_has_joined_says_so() -> None:
    async with Gateway() as gateway:
        await a_gateway(gateway, node="n1e", cold_seconds=0.0)
        for known in (gateway.world.nodes, gateway.world.ledgers, gateway.world.by_node):
            known.clear()
        asked = await gateway.admin.post("/models/llm/load", json={})
        says = 'its node "n1e" has not joined the cluster; there are no nodes yet'
        assert (asked.status_code, asked.json()["reason"]) == (202, says)
        assert gateway.residencies is not None
        assert not gateway.residencies.note_wanted("llm", None)
        with pytest.raises(Problem, match=says):
            await gateway.residencies.ready_if_known("llm", None)


async def test_a_gpu_that_its_node_does_not_have_is_named() -> None:
    async with Gateway() as gateway:
        await a_gateway(gateway, devices=("GPU-nowhere",))
        [listed] = (await gateway.admin.get("/models")).json()["items"]
        assert listed["reason"].startswith("its node n1 has no GPU GPU-nowhere; there are ")


async def test_a_missing_place_is_logged_once_when_it_persists() -> None:
    async with Gateway() as gateway:
        rules = [RULES, replace(RULES, name="lost", node="n1e"), replace(RULES, name="late", node="n2")]
        checks = PlaceChecks(gateway.world, rules)
        with capture_logs() as logs:
            checks.check()
            gateway.world.add_node(a_node("n2"))
            for _ in range(3):
                checks.check()
        [line] = logs
        assert (line["log_level"], line["server"]) == ("warning", "lost")
        assert line["fault"] == 'its node "n1e" has not joined the cluster; there are n1, n2'
