"""Models of several servers in the ledger: where one is brought, and which server is meant."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from gpubroker_server.core.domain.model_orders import IndexedModel, ModelState, ServerIndex
from gpubroker_server.core.domain.models import ModelKey, ModelRules
from gpubroker_server.core.domain.policy import InferenceServers
from gpubroker_server.core.domain.server_rules import ServerRules
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Mib
from gpubroker_server.inference.holders import AGAIN_SECONDS, QueuedModels
from gpubroker_server.inference.server_choice import Residencies
from msgspec.structs import replace

from tests.builders import GIB, a_device, a_node, a_sample, key
from tests.gateway.harness import Gateway, problem
from tests.simulated_host import SimulatedHost, SimulatedModel

LARGE = {"llm": ModelRules(Mib(50 * GIB))}


def a_server(name: str, node: str, *models: str, **rules: Any) -> tuple[ServerRules, SimulatedHost]:
    return ServerRules(name, node, **rules), SimulatedHost(name, [SimulatedModel(model) for model in models])


@asynccontextmanager
async def a_gateway(*served: tuple[ServerRules, SimulatedHost]) -> AsyncIterator[Gateway]:
    """Two nodes with a device of 80 GiB each."""
    async with Gateway() as gateway:
        device = a_device("gpu9", node="n2")
        await gateway.join(device, node=a_node("n2"))
        gateway.world.measure([a_sample(key("gpu9", "n2"))])
        gateway.change(served=served)
        gateway.admin = await gateway.client("boss")
        yield gateway


def at(gateway: Gateway, server: str, model: str = "llm") -> Task | None:
    return gateway.world.models.of(ModelKey(server, model))


def residencies(gateway: Gateway) -> Residencies:
    assert gateway.residencies is not None
    return gateway.residencies


async def loaded(gateway: Gateway, server: str, model: str = "llm") -> None:
    task = at(gateway, server, model)
    assert task is not None
    await gateway.plan(task.id)
    models = {model: IndexedModel(model, ModelState.READY)}
    await gateway.hear(ServerIndex(server, gateway.clock.now(), models))


async def test_a_model_is_brought_to_the_server_that_has_it() -> None:
    async with a_gateway(a_server("a", "n1"), a_server("b", "n2", "bert")) as gateway:
        asked = await gateway.admin.post("/models/bert/load", json={})
        assert (asked.status_code, asked.json()["server"]) == (202, "b")
        assert at(gateway, "a", "bert") is None


async def test_a_model_that_several_have_is_brought_where_a_gpu_is_emptiest() -> None:
    async with a_gateway(a_server("a", "n1", "llm"), a_server("b", "n2", "llm")) as gateway:
        task = await gateway.admin.submit(resources={"gpus": 1, "gpu_mb": 30 * GIB})
        await gateway.plan(task)
        holder = gateway.task(task).node
        asked = await gateway.admin.post("/models/llm/load", json={})
        assert asked.json()["server"] == ("b" if holder == "n1" else "a")


async def test_a_model_that_is_wanted_already_is_brought_nowhere_else() -> None:
    async with a_gateway(a_server("a", "n1", "llm"), a_server("b", "n2", "llm")) as gateway:
        await gateway.admin.post("/models/llm/load?server=b", json={})
        asked = await gateway.admin.post("/models/llm/load", json={})
        assert asked.json()["server"] == "b"
        assert at(gateway, "a") is None


async def test_a_server_that_is_away_is_asked_last_for_a_model() -> None:
    async with a_gateway(a_server("a", "n1", "llm"), a_server("b", "n2", "llm")) as gateway:
        await residencies(gateway).want("llm", 50)
        assert at(gateway, "a") is not None
        await loaded(gateway, "a")
        assert residencies(gateway).note_wanted("llm", None)
        residencies(gateway).answers = lambda server, _over_grpc: server != "a"
        assert not residencies(gateway).note_wanted("llm", None)
        await residencies(gateway).want("llm", 50)
        assert at(gateway, "b") is not None


async def test_a_server_whose_gpus_are_too_small_is_passed_over() -> None:
    huge = {"llm": ModelRules(Mib(200 * GIB))}
    served = a_server("a", "n1", "llm", models=huge), a_server("b", "n2", "llm", models=LARGE)
    async with a_gateway(*served) as gateway:
        asked = await gateway.admin.post("/models/llm/load", json={})
        assert asked.json()["server"] == "b"
        refused = await gateway.admin.post("/models/llm/load?server=a", json={})
        problem(refused, 422, "exceeds-capacity")


async def test_a_request_must_name_the_server_if_two_have_the_model() -> None:
    async with a_gateway(a_server("a", "n1", "llm"), a_server("b", "n2", "llm")) as gateway:
        for server in ("a", "b"):
            await gateway.admin.post("/models/llm/load", json={}, params={"server": server})
            await loaded(gateway, server)
        for answer in (
            await gateway.admin.get("/models/llm"),
            await gateway.admin.post("/models/llm/unload"),
            await gateway.admin.post("/models/llm/pin", json={}),
        ):
            assert "a, b" in problem(answer, 409, "model-ambiguous")["detail"]
        pinned = await gateway.admin.post("/models/llm/pin?server=b", json={})
        assert (pinned.json()["server"], pinned.json()["pinned"]) == ("b", True)
        left = await gateway.admin.post("/models/llm/unload?server=a")
        assert (left.json()["server"], left.json()["state"]) == ("a", "draining")
        items = (await gateway.admin.get("/models")).json()["items"]
        assert [(one["server"], one["state"]) for one in items] == [("b", "resident"), ("a", "draining")]


async def test_an_unknown_server_is_reported_with_those_that_exist() -> None:
    async with a_gateway(a_server("a", "n1", "llm"), a_server("b", "n2", "llm")) as gateway:
        for answer in (
            await gateway.admin.get("/models/llm?server=c"),
            await gateway.admin.post("/models/llm/load?server=c", json={}),
        ):
            assert problem(answer, 404, "not-found")["detail"].endswith("servers: a, b")
        problem(await gateway.admin.get("/models/none"), 404, "not-found")


async def test_use_is_reported_for_each_copy() -> None:
    async with a_gateway(a_server("a", "n1", "llm"), a_server("b", "n2", "llm")) as gateway:
        for server in ("a", "b"):
            await gateway.admin.post("/models/llm/load", json={}, params={"server": server})
            await loaded(gateway, server)
        gateway.clock.advance(100.0)
        assert residencies(gateway).note_wanted("llm", 90)
        for residency in residencies(gateway):
            await residency.report_use()
        tasks = [at(gateway, server) for server in ("a", "b")]
        assert [task.priority for task in tasks if task is not None] == [90, 90]


async def held_up(gateway: Gateway, node: str, gpu_mb: int) -> str:
    """A critical run without an end in sight has this much of the node's GPU."""
    task = await gateway.admin.submit(
        priority="critical", resources={"gpus": 1, "gpu_mb": gpu_mb, "nodes": {"node": [node]}}
    )
    await gateway.plan(task)
    assert gateway.task(task).node == node
    return task


async def test_model_that_no_server_has_is_denied_in_the_name_of_all() -> None:
    async with a_gateway(a_server("a", "n1", "llm"), a_server("b", "n2", "llm")) as gateway:
        refused = await gateway.admin.post("/models/nosuch/load", json={})
        assert "none of the servers a, b has it" in problem(refused, 404, "not-found")["detail"]


async def test_model_is_loaded_where_idle_models_leave_not_where_a_run_stays() -> None:
    """Server b has more free memory, but less of it than the model needs, and for hours."""
    models = {**LARGE, "bert": ModelRules(Mib(70 * GIB))}
    served = a_server("a", "n1", "llm", "bert", models=models), a_server("b", "n2", "llm", models=LARGE)
    async with a_gateway(*served) as gateway:
        await gateway.admin.post("/models/bert/load", json={})
        await loaded(gateway, "a", "bert")
        await held_up(gateway, "n2", 40 * GIB)
        gateway.clock.advance(60.0)
        residency, _ = await residencies(gateway).want("llm", 50)
        assert residency.rules.name == "a"


async def test_model_that_waits_in_vain_is_loaded_at_a_server_with_room() -> None:
    served = a_server("a", "n1", "llm", models=LARGE), a_server("b", "n2", "llm", models=LARGE)
    async with a_gateway(*served) as gateway:
        runs = [await held_up(gateway, node, 60 * GIB) for node in ("n1", "n2")]
        first, _ = await residencies(gateway).want("llm", 50)
        again, _ = await residencies(gateway).want("llm", 50)
        assert again is first
        other = next(residency for residency in residencies(gateway) if residency is not first)
        await gateway.end(runs[0 if other.rules.node == "n1" else 1])
        assert (await residencies(gateway).want("llm", 50))[0] is other


async def test_model_that_only_inferences_wait_for_moves_to_a_server_with_room() -> None:
    served = a_server("a", "n1", "llm", models=LARGE), a_server("b", "n2", "llm", models=LARGE)
    async with a_gateway(*served) as gateway:
        serving = InferenceServers(ledger=("a", "b"))
        gateway.change(policy=replace(gateway.policy, serving=serving))
        runs = {node: await held_up(gateway, node, 60 * GIB) for node in ("n1", "n2")}
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}
        asked = await gateway.admin.post("/inferences", json={"model": "llm", "inputs": [tensor]})
        assert asked.status_code == 202, asked.text
        queued_models = QueuedModels(residencies(gateway))
        waits_at = "a" if at(gateway, "a") else "b"
        other, node = ("b", "n2") if waits_at == "a" else ("a", "n1")
        await gateway.end(runs[node])
        await queued_models.check()
        assert at(gateway, other) is None
        gateway.clock.advance(AGAIN_SECONDS)
        await queued_models.check()
        assert at(gateway, other) is not None


async def test_uses_keep_no_copy_wanted_that_is_not_in_memory() -> None:
    served = a_server("a", "n1", "llm", models=LARGE), a_server("b", "n2", "llm", models=LARGE)
    async with a_gateway(*served) as gateway:
        for server in ("a", "b"):
            await gateway.admin.post("/models/llm/load", json={}, params={"server": server})
        await loaded(gateway, "a")
        assert residencies(gateway).note_wanted("llm", 90)
        for residency in residencies(gateway):
            await residency.report_use()
        await gateway.turn()
        tasks = [at(gateway, server) for server in ("a", "b")]
        assert [task.priority for task in tasks if task is not None] == [90, 79]
