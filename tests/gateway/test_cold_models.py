"""Requests for models that are not in memory: they wait for the ledger, or are told when to come again."""

import asyncio
import gc
import json
import re

import pytest
from gpubroker_server.core.domain.decisions import Request
from gpubroker_server.core.domain.model_orders import ModelsInUse
from gpubroker_server.core.domain.models import ModelRules
from gpubroker_server.core.domain.orders import Ended, Ending, Failure
from gpubroker_server.core.domain.task import TaskState, model_of
from gpubroker_server.core.domain.units import Mib, Seconds
from gpubroker_server.core.lifecycle.learning import topic_of
from gpubroker_server.ports.store import StoreUnavailable

from tests.builders import GIB, a_sample, a_sketch
from tests.gateway.harness import until
from tests.gateway.inference_stage import INFER, Heard
from tests.gateway.resident_models import ResidentModels, resident_models
from tests.simulated_host import SimulatedModel


async def test_request_for_a_cold_model_waits_for_the_load_and_is_sent_unchanged() -> None:
    async with resident_models(heard := Heard()) as there:
        client = await there.stage.connect()
        client.ask("POST", INFER, b"xyz")
        task = await there.load()
        assert (await client.answer())[0] == 200
        assert heard.bodies == [b"xyz"]
        assert (task.priority, task.demand.gpu_mb, task.tenant) == (79, 50 * GIB, "default")
        assert task.demand.where.nodes == (("node", ("n1",)),)


async def test_many_requests_for_a_model_share_one_load() -> None:
    async with resident_models(heard := Heard()) as there:
        clients = [await there.stage.connect() for _ in range(3)]
        for client in clients:
            client.ask("POST", INFER, b"x")
        await there.load()
        assert [(await client.answer())[0] for client in clients] == [200, 200, 200]
        assert len(heard.bodies) == 3
        assert len(list(there.gateway.world.models.live())) == 1


@pytest.mark.parametrize("path", [INFER, "/v2/repository/models/any/unload"])
async def test_want_of_a_model_that_fails_without_the_database_may_be_retried(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(_given: object) -> None:
        raise StoreUnavailable("connection refused")

    async with resident_models(heard := Heard()) as there:
        if path != INFER:
            assert there.gateway.residencies is not None
            await there.gateway.residencies.want("any", 50)
        for what in ("submit", "request"):
            monkeypatch.setattr(there.gateway.store, what, away)
        status, _, body = await there.stage.ask("POST", path, b"{}")
        told = json.loads(body)
        assert (status, told["code"], told["retryable"]) == (503, "store-unavailable", True)
        assert heard.bodies == []


async def test_a_large_body_is_held_up_while_its_model_is_loaded() -> None:
    body = bytes(range(256)) * 4096 * 6
    async with resident_models(heard := Heard()) as there:
        client = await there.stage.connect()
        client.ask("POST", INFER, body)
        await there.load()
        assert (await client.answer())[0] == 200
        assert heard.bodies == [body]


async def test_request_that_waited_long_enough_is_told_to_retry() -> None:
    """The model stays wanted."""
    async with resident_models(Heard(), cold_seconds=Seconds(0.0)) as there:
        status, headers, body = await there.stage.ask("POST", INFER, b"x")
        told = json.loads(body)
        assert (status, told["code"], told["retryable"]) == (503, "model-not-ready", True)
        assert headers["retry-after"] == "5"
        task = there.of()
        assert task is not None
        assert task.id in told["error"]
        assert task.state is TaskState.PENDING


async def test_a_request_waits_for_its_model_no_longer_than_it_says() -> None:
    async with resident_models(Heard()) as there:
        client = await there.stage.connect()
        client.ask("POST", INFER, b"x", X_Timeout_Seconds="0.05")
        await there.wanted()
        there.gateway.clock.advance(0.1)
        assert (await client.answer())[0] == 503


async def test_the_leader_learns_at_once_that_a_model_which_was_idle_is_used() -> None:
    async with resident_models(Heard()) as there:
        client = await there.stage.connect()
        client.ask("POST", INFER, b"x")
        await there.load()
        assert (await client.answer())[0] == 200
        there.gateway.clock.advance(400.0)
        made: list[str] = []
        there.gateway.store.listen(lambda events: made.extend(event.kind for event in events))
        client.ask("POST", INFER, b"x")
        await until(lambda: "request.made" in made)


@pytest.mark.parametrize("is_pinned", [False, True])
async def test_request_without_its_model_says_what_is_known_of_one_in_its_way(is_pinned: bool) -> None:
    models = {name: ModelRules(gpu_mb=Mib(50 * GIB)) for name in ("any", "other")}
    async with resident_models(Heard(), *map(SimulatedModel, models), models=models) as there:
        gateway, client = there.gateway, await there.stage.connect()
        client.ask("POST", INFER, b"x")
        resident = await there.load()
        assert (await client.answer())[0] == 200
        if is_pinned:
            pin = Request("pin", resident.id, resident.tenant, "pin", {"pinned": True}, gateway.clock.now())
            await gateway.store.request(pin)
            await gateway.turn()
        client.ask("POST", "/v2/models/other/infer", b"x", X_Priority="20", X_Timeout_Seconds="0.05")
        await there.wanted("other")
        gateway.clock.advance(0.1)
        gateway.world.measure([a_sample("gpu0", gateway.clock.now())])
        status, headers, body = await client.answer()
        told = json.loads(body)["error"]
        assert (status, headers["retry-after"]) == (503, "5")
        assert ('model "any" is pinned' if is_pinned else "room for it is expected in 5 s") in told


@pytest.mark.parametrize("asks", ["while it leaves", "later"])
async def test_request_for_a_model_that_made_room_for_an_equal_wants_it_back(
    asks: str,
) -> None:
    models = {name: ModelRules(gpu_mb=Mib(50 * GIB)) for name in ("any", "other")}
    async with resident_models(Heard(), *map(SimulatedModel, models), models=models) as there:
        gateway, client = there.gateway, await there.stage.connect()
        client.ask("POST", INFER, b"x")
        await there.load()
        assert (await client.answer())[0] == 200
        client.ask("POST", "/v2/models/other/infer", b"x")
        rival = await there.wanted("other")
        gateway.clock.advance(100.0)
        await gateway.hear(ModelsInUse(frozenset()))
        gateway.world.measure([a_sample("gpu0", gateway.clock.now())])
        await gateway.plan(rival.id)
        model = await there.wanted()
        assert model.state is TaskState.STOPPING
        wants: list[str] = []
        gateway.store.listen(
            lambda events: wants.extend(event.kind for event in events if event.kind == "request.made")
        )
        late = await there.stage.connect()
        if asks == "while it leaves":
            late.ask("POST", INFER, b"x")
        await there.index()
        assert gateway.task(model.id).state is TaskState.PENDING
        if asks == "later":
            assert wants == []
            late.ask("POST", INFER, b"x")
        await until(lambda: bool(wants))


async def test_request_priority_is_that_of_its_model_up_to_what_its_token_may() -> None:
    async with resident_models(Heard(), cold_seconds=Seconds(0.0)) as there:
        await there.stage.ask("POST", INFER, b"x", X_Priority="20")
        assert (await there.wanted()).priority == 20
        await there.stage.ask("POST", INFER, b"x", X_Priority="90")
        assert (await there.wanted()).priority == 50, "the token may no more"


LONG_ENOUGH = Seconds(3600.0)
"""For a request to wait until its model has failed to load three times."""


async def fail_to_load(there: ResidentModels) -> None:
    """As often as it is tried."""
    task = await there.wanted()
    for _ in range(3):
        there.gateway.clock.advance(60.0)
        there.gateway.world.measure([a_sample("gpu0", there.gateway.clock.now())])
        await there.gateway.plan(task.id)
        known = there.gateway.task(task.id)
        failure = Failure("load_failed", "no such layer")
        now = there.gateway.clock.now()
        await there.gateway.hear(Ended(known.id, known.fence, now, Ending.FAILED, failure=failure))
        await there.index()
        there.gateway.world.measure([a_sample("gpu0", now + 1)])


@pytest.mark.parametrize(
    "again", ["later", "with changed files", "by hand", "by hand over Triton's protocol"]
)
async def test_failed_load_is_told_to_later_requests_until_the_next_try_is_due(
    again: str,
) -> None:
    async with resident_models(Heard(), cold_seconds=LONG_ENOUGH) as there:
        client = await there.stage.connect()
        client.ask("POST", INFER, b"x")
        await fail_to_load(there)
        assert (await client.answer())[0] == 502
        there.gateway.clock.advance(10.0)
        status, headers, body = await there.stage.ask("POST", INFER, b"x")
        assert (status, headers["retry-after"]) == (502, "20")
        assert "no such layer" in json.loads(body)["error"]
        assert there.of() is None, "nothing is loaded for it"
        path = INFER
        match again:
            case "later":
                there.gateway.clock.advance(20.0)
            case "with changed files":
                there.host.models["any"].revision = "2"
            case "by hand":
                boss = await there.gateway.client("boss")
                assert (await boss.post("/models/any/load", json={})).status_code == 202
            case _:
                path = "/v2/repository/models/any/load"
        client.ask("POST", path, b"x" if path == INFER else b"")
        await there.load()
        assert (await client.answer())[0] == 200


async def test_a_failed_load_is_reported_in_the_words_of_the_server() -> None:
    async with resident_models(Heard(), cold_seconds=LONG_ENOUGH) as there:
        client = await there.stage.connect()
        client.ask("POST", INFER, b"x")
        await fail_to_load(there)
        status, _, body = await client.answer()
        assert (status, json.loads(body)["code"]) == (502, "model-not-loaded")
        assert "no such layer" in json.loads(body)["error"]


async def test_size_of_an_unknown_model_is_estimated_as_its_files_plus_a_quarter() -> None:
    async with resident_models(Heard(), SimulatedModel("any", Mib(8 * GIB)), models={}) as there:
        client = await there.stage.connect()
        client.ask("POST", INFER, b"x")
        assert (await there.load()).demand.gpu_mb == 10 * GIB
        assert (await client.answer())[0] == 200


@pytest.mark.parametrize(("rules", "gpus"), [(ModelRules(), 0), (ModelRules(Mib(8 * GIB)), 1)])
async def test_a_model_on_cpus_leases_no_gpu_memory_unless_the_operator_says_so(
    rules: ModelRules, gpus: int
) -> None:
    on_cpus = SimulatedModel("any", Mib(8 * GIB), on_cpu=True)
    async with resident_models(Heard(), on_cpus, models={"any": rules}, devices=("gpu0",)) as there:
        client = await there.stage.connect()
        client.ask("POST", INFER, b"x")
        task = await there.load()
        assert task.demand.gpus == gpus
        assert len(there.gateway.world.leases_of(task)) == gpus
        assert model_of(task).sized
        assert (await client.answer())[0] == 200


async def test_a_model_that_was_measured_before_takes_that_size_and_a_margin() -> None:
    async with resident_models(Heard(), SimulatedModel("any", Mib(8 * GIB)), models={}) as there:
        world = there.gateway.world
        kinds = {ledger.device.kind for ledger in world.ledgers.values()}
        world.learned.put(topic_of("default", "any", *kinds), a_sketch([20 * GIB]))
        client = await there.stage.connect()
        client.ask("POST", INFER, b"x")
        assert (await there.load()).demand.gpu_mb == pytest.approx(23 * GIB, rel=0.03)
        assert (await client.answer())[0] == 200


async def test_the_metrics_show_by_server_how_accurate_the_sizes_of_models_are() -> None:
    async with resident_models(Heard()) as there:
        client, asked = await there.stage.connect(), there.gateway.admin
        client.ask("POST", INFER, b"x")
        await there.load()
        assert "gpubroker_model_size_ratio{" not in (await asked.get("/metrics")).text
        world = there.gateway.world
        kinds = {ledger.device.kind for ledger in world.ledgers.values()}
        world.learned.put(topic_of("default", "any", *kinds), a_sketch([25 * GIB]))
        told = (await asked.get("/metrics")).text
        [ratio] = re.findall(r'^gpubroker_model_size_ratio\{server="main"\} (\S+)$', told, re.MULTILINE)
        assert float(ratio) == pytest.approx(2.0, rel=0.03)
        assert 'gpubroker_model_size_enough_ratio{server="main"} 1.0' in told


async def test_a_model_that_the_server_does_not_have_is_answered_by_it() -> None:
    async with resident_models(heard := Heard(), models={}) as there:
        status, _, _ = await there.stage.ask("POST", "/v2/models/nothing/infer", b"x")
        assert status == 200, "whatever it says"
        assert there.of("nothing") is None
        assert len(heard.bodies) == 1


async def test_a_named_model_that_the_server_does_not_have_takes_no_memory() -> None:
    async with resident_models(Heard(), models={"lost": ModelRules(Mib(50 * GIB))}) as there:
        assert (await there.stage.ask("POST", "/v2/models/lost/infer", b"x"))[0] == 200, "whatever it says"
        assert there.of("lost") is None


async def test_requests_that_are_no_work_for_a_model_do_not_wait() -> None:
    async with resident_models(Heard()) as there:
        for path in ("/v2/models/any/config", "/v2/models/any/ready", "/v2/models/stats"):
            assert (await there.stage.ask("GET", path))[0] == 200
        assert there.of() is None


async def test_load_and_unload_over_the_triton_protocol_go_through_the_ledger() -> None:
    async with resident_models(heard := Heard()) as there:
        client = await there.stage.connect()
        client.ask("POST", "/v2/repository/models/any/load", b"")
        task = await there.load()
        assert (await client.answer())[0] == 200
        client.ask("POST", "/v2/repository/models/any/unload", b"")
        await until(lambda: there.gateway.task(task.id).state is TaskState.STOPPING)
        assert len(heard.heads) == 1
        await there.index()
        assert (await client.answer())[0] == 200
        assert there.of() is None


async def test_a_request_whose_client_leaves_during_the_load_is_not_sent() -> None:
    async with resident_models(heard := Heard()) as there:
        client = await there.stage.connect()
        client.ask("POST", INFER, b"x")
        await there.wanted()
        await client.close()
        await there.load()
        await asyncio.sleep(0)
        assert heard.bodies == []


async def test_names_that_clients_invent_leave_nothing_behind() -> None:
    def locks() -> int:
        return sum(type(known) is asyncio.Lock for known in gc.get_objects())

    async with resident_models(Heard(), models={}) as there:
        gc.freeze()  # what was there before is not looked at: in a process with many tests that takes long
        for n in range(20):
            await there.stage.ask("POST", f"/v2/models/nothing{n}/infer", b"x")
        gc.collect()
        assert locks() < 20
