"""Models as resources: listed, loaded, unloaded, pinned."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from gpubroker import AsyncBroker
from gpubroker_server.core.domain.model_orders import IndexedModel, ModelState, ServerIndex
from gpubroker_server.core.domain.models import ModelKey, ModelRules
from gpubroker_server.core.domain.server_rules import ServerRules
from gpubroker_server.core.domain.task import Task, TaskState, model_of
from gpubroker_server.core.domain.units import Mib

from tests.builders import GIB
from tests.gateway.harness import Gateway, fault, problem
from tests.simulated_host import SimulatedHost, SimulatedModel

RULES = ServerRules("main", "n1", models={"llm": ModelRules(Mib(50 * GIB), priority=60)})


@asynccontextmanager
async def a_gateway() -> AsyncIterator[Gateway]:
    async with Gateway() as gateway:
        host = SimulatedHost("main", (SimulatedModel("llm"), SimulatedModel("bert", Mib(2 * GIB))))
        gateway.change(served=[(RULES, host)])
        gateway.admin = await gateway.client("boss")
        yield gateway


def holder(gateway: Gateway, model: str = "llm") -> Task:
    task = gateway.world.models.of(ModelKey("main", model))
    assert task is not None
    return task


async def index(gateway: Gateway, **stages: ModelState) -> None:
    models = {name: IndexedModel(name, stage) for name, stage in stages.items()}
    await gateway.hear(ServerIndex("main", gateway.clock.now(), models))


async def loaded(gateway: Gateway, model: str = "llm") -> Task:
    await gateway.plan(holder(gateway, model).id)
    await index(gateway, **{model: ModelState.READY})
    return holder(gateway, model)


async def test_a_model_is_loaded_and_listed() -> None:
    async with a_gateway() as gateway:
        asked = await gateway.admin.post("/models/llm/load", json={})
        assert asked.status_code == 202
        assert (asked.json()["state"], asked.json()["priority"]) == ("waiting", 60)
        task = await loaded(gateway)
        told = (await gateway.admin.get("/models/llm")).json()
        assert (told["state"], told["task"], told["gpu_mb"]) == ("resident", task.id, 50 * GIB)
        assert (await gateway.admin.post("/models/llm/load", json={})).status_code == 200
        items = (await gateway.admin.get("/models")).json()["items"]
        assert [(one["name"], one["state"]) for one in items] == [("llm", "resident"), ("bert", "cold")]
        for query, names in (
            ({"state": "cold"}, ["bert"]),
            ({"state": ["resident", "loading"]}, ["llm"]),
            ({"server": "main"}, ["llm", "bert"]),
            ({"server": "other"}, []),
        ):
            found = (await gateway.admin.get("/models", params=query)).json()["items"]
            assert [one["name"] for one in found] == names
        fault(await gateway.admin.get("/models", params={"state": "warm"}), "query:state")
        for sort, names in (
            ("-state", ["bert", "llm"]),
            ("name", ["bert", "llm"]),
            ("loaded", ["llm", "bert"]),
        ):
            found = (await gateway.admin.get("/models", params={"sort": sort})).json()["items"]
            assert [one["name"] for one in found] == names, sort


async def test_a_waiting_model_is_explained_like_a_task() -> None:
    async with a_gateway() as gateway:
        await gateway.admin.submit(resources={"gpus": 1})
        await gateway.admin.post("/models/llm/load", json={"priority": 10})
        answer = await gateway.admin.get(f"/tasks/{holder(gateway).id}/explain")
        assert answer.status_code == 200
        assert [one["reason"] for one in answer.json()["blockers"]] == ["PendingEvaluation"]
        assert [one["key"] for one in answer.json()["devices"]] == ["test/n1/gpu0"]


async def test_an_unloaded_model_is_loaded_again_on_request() -> None:
    async with a_gateway() as gateway:
        await gateway.admin.post("/models/llm/load", json={})
        await loaded(gateway)
        answer = await gateway.admin.post("/models/llm/unload")
        assert (answer.status_code, answer.json()["state"]) == (202, "draining")
        await index(gateway)
        answer = await gateway.admin.post("/models/llm/unload")
        assert (answer.status_code, answer.json()["state"]) == (200, "cold")
        assert (await gateway.admin.post("/models/llm/load", json={})).json()["state"] == "waiting"
        assert [note.action for note in gateway.store.audited()] == [
            "model.load",
            "model.unload",
            "model.load",
        ]


async def test_a_pinned_model_is_never_a_victim() -> None:
    async with a_gateway() as gateway:
        assert (await gateway.admin.post("/models/llm/pin", json={})).status_code == 202
        assert holder(gateway).expires_at is None
        await loaded(gateway)
        answer = await gateway.admin.post("/models/llm/pin", json={})
        assert (answer.status_code, answer.json()["pinned"], answer.json()["priority"]) == (200, True, 100)
        answer = await gateway.admin.post("/models/llm/pin", json={"pinned": False})
        assert answer.json()["priority"] == 60
        assert [note.action for note in gateway.store.audited()] == ["model.pin", "model.pin", "model.unpin"]
        gateway.clock.advance(1000.0)
        await gateway.turn()
        assert (await gateway.admin.get("/models/llm")).json()["priority"] == -1


async def test_a_gpu_shows_the_present_priority_of_its_models() -> None:
    async with a_gateway() as gateway:
        await gateway.admin.post("/models/llm/load", json={})
        await loaded(gateway)
        await gateway.admin.post("/models/llm/pin", json={})
        waits = await gateway.admin.submit(resources={"gpu_mb": 70 * GIB})
        [gpu] = (await gateway.admin.get("/gpus")).json()["items"]
        [device] = (await gateway.admin.get(f"/tasks/{waits}/explain")).json()["devices"]
        for [held] in (gpu["holders"], device["holders"]):
            assert (held["priority"], held["band"]) == (100, "critical"), "and not as when it was loaded"


async def test_the_models_of_an_unreachable_server_say_so() -> None:
    host = SimulatedHost("main", (SimulatedModel("llm"),))
    async with a_gateway() as gateway:
        gateway.change(served=[(RULES, host)])
        await gateway.admin.post("/models/llm/load", json={})
        await loaded(gateway)
        host.go_away()
        [told] = (await gateway.admin.get("/models")).json()["items"]
        assert (told["name"], told["state"]) == ("llm", "resident"), "nobody can say that it is gone"
        assert "server main does not answer" in told["reason"]


async def test_unpinning_a_cold_model_does_not_load_it() -> None:
    async with a_gateway() as gateway:
        answer = await gateway.admin.post("/models/llm/pin", json={"pinned": False})
        assert (answer.status_code, answer.json()["state"]) == (200, "cold")


async def test_a_model_that_no_server_has_is_not_found() -> None:
    async with a_gateway() as gateway:
        for answer in (
            await gateway.admin.get("/models/nothing"),
            await gateway.admin.post("/models/nothing/load", json={}),
            await gateway.admin.post("/models/nothing/pin", json={}),
            await gateway.admin.post("/models/nothing/unload"),
        ):
            problem(answer, 404, "not-found")


async def test_a_token_for_inferences_cannot_manage_models() -> None:
    async with a_gateway() as gateway:
        user = await gateway.client("user", "models:infer")
        assert (await user.get("/models/llm")).status_code == 200
        for deed in ("load", "unload", "pin"):
            problem(await user.post(f"/models/llm/{deed}", json={}), 403, "forbidden")
        modest = await gateway.client("modest", "models:manage", max_priority=50)
        problem(await modest.post("/models/llm/load", json={"priority": 80}), 403, "priority-not-allowed")
        low = await gateway.client("low", "models:manage", max_priority=5)
        assert (await low.post("/models/llm/load", json={})).status_code == 202
        assert gateway.world.models.of(ModelKey("main", "llm")) is not None


async def test_pinning_needs_a_token_for_the_highest_priority() -> None:
    async with a_gateway() as gateway:
        modest = await gateway.client("modest", "models:manage", max_priority=99)
        refused = await modest.post("/models/llm/pin", json={})
        found = problem(refused, 403, "priority-not-allowed")
        assert "a pinned model has priority 100, which is above 99" in found["detail"]
        assert found["errors"][0]["pointer"] == "/pinned"
        assert gateway.world.models.of(ModelKey("main", "llm")) is None, "nor was it brought"
        await gateway.admin.post("/models/llm/pin", json={})
        assert (await modest.post("/models/llm/pin", json={"pinned": False})).json()["pinned"] is False


async def test_the_use_of_models_is_reported_to_the_leader() -> None:
    async with a_gateway() as gateway:
        assert gateway.residencies is not None
        [residency] = gateway.residencies
        await gateway.admin.post("/models/llm/load", json={})
        await loaded(gateway)
        gateway.clock.advance(100.0)
        for _ in range(3):
            residency.note_use("llm", 70)
        residency.note_use("gone", 70)
        await residency.report_use()
        task = holder(gateway)
        assert (task.priority, task.expires_at) == (70, gateway.clock.now() + 300.0)
        assert model_of(task).usage.counts[0] > 1.0
        version = task.version
        await residency.report_use()
        assert holder(gateway).version == version, "there was nothing to tell"


async def test_the_sdk_lists_and_loads_models() -> None:
    async with a_gateway() as gateway:
        token = gateway.admin.headers["authorization"].removeprefix("Bearer ")
        transport = httpx.ASGITransport(gateway.app)
        async with AsyncBroker("http://127.0.0.1:8470", token, transport=transport) as broker:
            assert (await broker.load_model("llm", priority="batch")).state == "waiting"
            assert holder(gateway).priority == 54
            await loaded(gateway)
            assert [one.state for one in (await broker.models()).items] == ["resident", "cold"]
            assert (await broker.pin_model("llm")).pinned
            model = await broker.model("llm")
            assert model.loaded_at is not None
            assert (await broker.unload_model("llm")).state == "draining"
            assert holder(gateway).state is TaskState.STOPPING


async def test_without_a_model_server_there_are_no_models() -> None:
    async with Gateway() as gateway:
        gateway.admin = await gateway.client("boss")
        answered = await gateway.admin.get("/models")
        assert (answered.status_code, answered.json()["items"]) == (200, [])
        answer = await gateway.admin.post("/models/llm/load", json={})
        assert "triton.servers" in problem(answer, 404, "not-found")["detail"]
