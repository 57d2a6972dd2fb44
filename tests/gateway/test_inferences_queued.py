"""Queued inferences over HTTP: accepted, refused, and their answers fetched."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from gpubroker_server.adapters.triton.http_backend import HttpBackend, TritonServer
from gpubroker_server.broker.inference_dispatch import object_parts
from gpubroker_server.core.admission.defaults import Defaults, NamedDefaults
from gpubroker_server.core.domain.model_orders import IndexedModel, ModelState, ServerIndex
from gpubroker_server.core.domain.models import ModelKey, ModelRules
from gpubroker_server.core.domain.orders import Ended, Ending, Failure
from gpubroker_server.core.domain.policy import InferenceServers
from gpubroker_server.core.domain.server_rules import ServerRules
from gpubroker_server.core.domain.task import Task, TaskState, model_of
from gpubroker_server.core.domain.units import Mib, Seconds, TaskId
from gpubroker_server.core.serving.batching import FORMAT, InferenceResponse, packed, request_in
from gpubroker_server.core.serving.tensors import tensor_of
from gpubroker_server.inference.holders import AGAIN_SECONDS, QueuedModels
from gpubroker_server.inference.protocols.triton.checks import TRITON
from gpubroker_server.inference.servers import Contents, Endpoint, Server
from gpubroker_server.ports.inferences import InferenceFailed
from msgspec.structs import replace

from tests.builders import GIB, a_sample
from tests.gateway.harness import Gateway, fault, problem
from tests.simulated_host import SimulatedHost, SimulatedModel
from tests.tensor_values import values_of

RULES = ServerRules(
    "main",
    "n1",
    models={"llm": ModelRules(Mib(50 * GIB), load_seconds=Seconds(20.0)), "huge": ModelRules(Mib(90 * GIB))},
)


@asynccontextmanager
async def a_gateway(*, serving: InferenceServers | None = None, **limits: Any) -> AsyncIterator[Gateway]:
    """With one server. Its models are in the ledger unless `serving` is given."""
    async with Gateway(**limits) as gateway:
        policy = replace(gateway.policy, serving=serving or InferenceServers(ledger=("main",)))
        host = SimulatedHost("main", (SimulatedModel("llm"), SimulatedModel("huge")))
        lab = Server("lab", HttpBackend(TritonServer("lab", "localhost", 1, b"localhost:1")), TRITON)
        lab.contents = Contents(frozenset({b"llm", b"lab-only"}))
        served = [] if serving and not serving.ledger else [(RULES, host)]
        gateway.change(policy=policy, served=served, servers=[lab] if serving else [])
        gateway.admin = await gateway.client("boss")
        yield gateway


OPEN = InferenceServers(others=("lab",))


def a_body(*values: float, **fields: Any) -> dict[str, Any]:
    tensor = {"name": "x", "datatype": "FP32", "shape": [len(values), 1], "data": list(values)}
    return {"model": "llm", "inputs": [tensor], **fields}


async def ask(gateway: Gateway, *values: float, **fields: Any) -> str:
    response = await gateway.admin.post("/inferences", json=a_body(*values, **fields))
    assert response.status_code == 202, response.text
    assert response.headers["location"] == f"/tasks/{response.json()['id']}"
    return str(response.json()["id"])


async def send(gateway: Gateway) -> None:
    """The inferences that can be sent now."""
    await gateway.turn()


async def end(
    gateway: Gateway, id: str, answer: InferenceResponse | None = None, failure: Failure | None = None
) -> None:
    task = gateway.task(id)
    ending = Ending.FAILED if answer is None else Ending.SUCCEEDED
    result = None if answer is None else packed(answer)
    report = Ended(task.id, task.fence, gateway.clock.now(), ending, result, FORMAT, failure)
    await gateway.hear(report)


async def test_inference_is_accepted_as_a_task_and_stored_as_the_model_gets_it() -> None:
    async with a_gateway(serving=OPEN) as gateway:
        id = await ask(
            gateway, 1, 2, priority="critical", labels={"team": "vision"}, name="nightly", version="3",
            id="mine", outputs=[{"name": "y"}], parameters={"k": 0.5}, max_retries=2,
        )  # fmt: skip
        task = gateway.task(id)
        assert (task.demand.answered_by, task.priority, task.max_retries) == ("llm", 95, 2)
        assert (task.demand.cpu, task.demand.gpus) == (0.0, 0)
        spec = (await gateway.store.specs([task.id]))[task.id]
        request = request_in(spec.arguments)
        assert values_of(request.inputs[0]) == [1.0, 2.0]
        assert (request.version, request.id, request.outputs) == ("3", "mine", ("y",))
        view = (await gateway.admin.get(f"/tasks/{id}")).json()
        assert view["run"] == {"kind": "inference", "entrypoint": None, "command": None, "model": "llm"}
        listed = (await gateway.admin.get("/tasks?kind=inference")).json()["items"]
        assert [item["id"] for item in listed] == [id]


async def test_an_inference_has_the_priority_of_a_direct_request() -> None:
    async with a_gateway(serving=OPEN) as gateway:
        assert gateway.task(await ask(gateway, 1)).priority == 79
        low = await gateway.client("low", max_priority=60)
        accepted = await low.post("/inferences", json=a_body(1))
        assert accepted.json()["priority"] == 60
        gateway.change(defaults=Defaults(model_types={"vision": NamedDefaults(priority=30)}))
        assert gateway.task(await ask(gateway, 1, model_type="vision")).priority == 30


async def test_an_inference_has_the_priority_that_the_operator_gave_its_model() -> None:
    async with a_gateway() as gateway:
        rules = replace(RULES, models={"llm": ModelRules(Mib(50 * GIB), priority=66)})
        gateway.change(served=[(rules, SimulatedHost("main", (SimulatedModel("llm"),)))])
        assert gateway.task(await ask(gateway, 1)).priority == 66


async def test_a_large_object_is_named_by_the_task_and_not_copied() -> None:
    async with a_gateway(serving=OPEN) as gateway:
        data = bytes(100_000)
        id = (await gateway.admin.post("/objects", content=data)).json()["id"]
        named = {"name": "x", "datatype": "FP32", "object": id}
        task = await ask(gateway, inputs=[{**named, "shape": [25_000]}])
        spec = (await gateway.store.specs([TaskId(task)]))[TaskId(task)]
        [tensor] = request_in(spec.arguments).inputs
        assert (tensor.stored, tensor.size_bytes, tensor.data) == (id, len(data), b"")
        assert spec.objects == (id,)
        read = b"".join([part async for part in object_parts(gateway.blobs, id, len(data))])
        assert read == data
        wrong = a_body(inputs=[{**named, "shape": [24_999]}])
        refused = await gateway.admin.post("/inferences", json=wrong)
        assert "came with 100000 bytes" in fault(refused, "/inputs/0/object")
        await gateway.admin.delete(f"/objects/{id}")
        await gateway.blobs.delete(id)
        with pytest.raises(InferenceFailed, match="gone or damaged; upload them and submit it again"):
            [part async for part in object_parts(gateway.blobs, id, len(data))]


async def test_the_objects_of_an_inference_have_the_limit_of_a_direct_request() -> None:
    serving = replace(OPEN, body_bytes=150_000)
    async with a_gateway(serving=serving) as gateway:
        id = (await gateway.admin.post("/objects", content=bytes(100_000))).json()["id"]
        named = {"datatype": "FP32", "shape": [25_000], "object": id}
        assert (await ask(gateway, inputs=[{"name": "x", **named}])) != ""
        both = a_body(inputs=[{"name": "x", **named}, {"name": "y", **named}])
        refused = await gateway.admin.post("/inferences", json=both)
        assert "may have 150000 bytes" in fault(refused, "/inputs")


class Listing:
    """A server that says what it has."""

    def __init__(self, *models: IndexedModel) -> None:
        self.models = {model.model: model for model in models}

    async def check(self, server: Server, endpoint: Endpoint, within_seconds: Seconds) -> None:
        return

    async def index(self, server: Server, within_seconds: Seconds) -> dict[str, IndexedModel]:
        return self.models

    async def change(self, server: Server, model: str, *, loads: bool, within_seconds: Seconds) -> str:
        return "it lists only"


async def test_an_inference_whose_model_fails_to_load_says_why() -> None:
    async with a_gateway() as gateway:
        id = await ask(gateway, 1)
        assert "last load failed" not in (await gateway.admin.get(f"/tasks/{id}/explain")).json()["message"]
        for _ in range(3):
            gateway.clock.advance(60.0)
            gateway.world.measure([a_sample("gpu0", gateway.clock.now())])
            holder = gateway.world.models.of(ModelKey("main", "llm"))
            assert holder is not None
            await gateway.plan(holder.id)
            holder = gateway.task(holder.id)
            failure = Failure("load_failed", "no such layer")
            report = Ended(holder.id, holder.fence, gateway.clock.now(), Ending.FAILED, failure=failure)
            await gateway.hear(report)
            await gateway.hear(ServerIndex("main", gateway.clock.now(), {}))
            gateway.world.measure([a_sample("gpu0", gateway.clock.now())])
        told = (await gateway.admin.get(f"/tasks/{id}/explain")).json()
        assert told["message"].endswith("its last load failed: no such layer")


@pytest.mark.parametrize(
    ("models", "says"),
    [
        ((), 'no model server has model "llm" (asked: lab)'),
        (
            (IndexedModel("llm", ModelState.ABSENT, (), "bad config"),),
            "and not in memory (bad config); load it",
        ),
    ],
)
async def test_an_inference_whose_model_is_nowhere_says_so(
    models: tuple[IndexedModel, ...], says: str
) -> None:
    async with a_gateway(serving=OPEN) as gateway:
        nowhere = HttpBackend(TritonServer("lab", "localhost", 1, b"localhost:1"))
        server = Server("lab", nowhere, Listing(IndexedModel("llm", ModelState.READY)))
        gateway.change(servers=[server])
        id = await ask(gateway, 1, not_before="1970-01-20T00:00:00Z")
        gateway.change(servers=[Server("lab", nowhere, Listing(*models))])
        assert says in (await gateway.admin.get(f"/tasks/{id}/explain")).json()["message"]


async def test_the_model_s_answer_is_the_result_as_json() -> None:
    async with a_gateway(serving=OPEN) as gateway:
        id = await ask(gateway, 1)
        await send(gateway)
        assert gateway.task(id).state is TaskState.RUNNING
        outputs = tensor_of("y", "FP32", [2, 1], [0.5, 3]), tensor_of("t", "BYTES", [1], ["ü"])
        await end(gateway, id, InferenceResponse("llm", "1", outputs, {"k": 1}, "mine"))
        told = (await gateway.admin.get(f"/tasks/{id}/result")).json()
        assert told["format"] == "json"
        assert told["result"] == {
            "model_name": "llm",
            "model_version": "1",
            "id": "mine",
            "parameters": {"k": 1},
            "outputs": [
                {"name": "y", "datatype": "FP32", "shape": [2, 1], "data": [0.5, 3.0]},
                {"name": "t", "datatype": "BYTES", "shape": [1], "data": ["ü"]},
            ],
        }
        assert (await gateway.admin.get(f"/tasks/{id}/wait")).json()["result"] == told["result"]


async def test_large_requests_and_answers_are_objects() -> None:
    async with a_gateway(serving=OPEN, inline_bytes=64) as gateway:
        values = list(map(float, range(20_000)))
        id = await ask(gateway, *values)
        spec = (await gateway.store.specs([TaskId(id)]))[TaskId(id)]
        assert (spec.arguments, spec.arguments_digest in gateway.blobs.objects) == (b"", True)
        await send(gateway)
        await end(gateway, id, InferenceResponse("llm", "1", (tensor_of("y", "FP32", [20_000], values),)))
        told = (await gateway.admin.get(f"/tasks/{id}/result")).json()
        assert told["result"]["outputs"][0]["data"] == values


async def test_a_stored_result_that_is_not_an_answer_is_returned_as_bytes() -> None:
    async with a_gateway(serving=OPEN) as gateway:
        id = await ask(gateway, 1)
        await send(gateway)
        task = gateway.task(id)
        report = Ended(task.id, task.fence, gateway.clock.now(), Ending.SUCCEEDED, b"\xff", FORMAT)
        await gateway.hear(report)
        assert (await gateway.admin.get(f"/tasks/{id}/result")).json()["data_base64"] == "/w=="


async def test_a_model_s_refusal_is_the_task_s_error() -> None:
    async with a_gateway(serving=OPEN) as gateway:
        id = await ask(gateway, 1)
        await send(gateway)
        await end(gateway, id, failure=Failure("inference_refused", "unexpected shape"))
        view = (await gateway.admin.get(f"/tasks/{id}")).json()
        assert (view["state"], view["error"]["message"]) == ("failed", "unexpected shape")


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"model": "a/b"}, "/model"),
        ({"inputs": []}, "/inputs"),
        ({"version": "one"}, "/version"),
        ({"inputs": [{"name": "x", "datatype": "FP8", "shape": [1], "data": [1]}]}, "/inputs/0/datatype"),
        ({"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1]}]}, "/inputs/0/data"),
        ({"inputs": [{"name": "x", "datatype": "INT8", "shape": [1], "data": [300]}]}, "/inputs/0/data"),
        ({"outputs": [{"name": "y"}, {"name": "y"}]}, "/outputs/1/name"),
        ({"deadline_seconds": 5, "deadline_at": "2099-01-01T00:00:00Z"}, ""),
        ({"resources": {}}, "/resources"),
        ({"after": ["task_00000000000000000000000000"]}, "/after/0/task"),
    ],
)
async def test_a_malformed_inference_is_refused_with_the_field(change: dict[str, Any], pointer: str) -> None:
    async with a_gateway(serving=OPEN) as gateway:
        fault(await gateway.admin.post("/inferences", json={**a_body(1), **change}), pointer)
        assert gateway.world.tasks == {}


def with_bytes(data: bytes, *tensors: dict[str, Any], head_bytes: int | None = None) -> dict[str, Any]:
    """A body as Triton's clients write it, with the name of the model."""
    head = json.dumps({"model": "llm", "inputs": list(tensors)}).encode()
    length = str(len(head) if head_bytes is None else head_bytes)
    headers = {"Inference-Header-Content-Length": length, "Content-Type": "application/octet-stream"}
    return {"content": head + data, "headers": headers}


def behind(name: str, size: int, **fields: Any) -> dict[str, Any]:
    return {
        "name": name,
        "datatype": "INT16",
        "shape": [2],
        "parameters": {"binary_data_size": size},
        **fields,
    }


async def test_values_may_follow_the_json_as_binary_data() -> None:
    async with a_gateway(serving=OPEN) as gateway:
        inline = {"name": "b", "datatype": "FP32", "shape": [1], "data": [0.5]}
        text = behind("c", 10, datatype="BYTES")
        sent = with_bytes(b"\x01\0\xff\xff\x02\0\0\0ab\0\0\0\0", behind("a", 4), inline, text)
        response = await gateway.admin.post("/inferences", **sent)
        assert response.status_code == 202, response.text
        [spec] = (await gateway.store.specs([TaskId(response.json()["id"])])).values()
        tensors = request_in(spec.arguments).inputs
        assert [values_of(tensor) for tensor in tensors] == [[1, -1], [0.5], ["ab", ""]]


@pytest.mark.parametrize(
    ("sent", "pointer"),
    [
        (with_bytes(b"\0\0\0", behind("a", 3)), "/inputs/0/parameters/binary_data_size"),
        (with_bytes(b"\0\0\0", behind("a", 4)), "/inputs/0/parameters/binary_data_size"),
        (with_bytes(b"\0" * 5, behind("a", 4)), "/inputs"),
        (with_bytes(b"\0" * 4, behind("a", 4, data=[1, 2])), "/inputs/0/parameters/binary_data_size"),
        (with_bytes(b"", {"name": "a", "datatype": "INT16", "shape": [1]}), "/inputs/0/data"),
        (with_bytes(b"", head_bytes=10**6), "header:Inference-Header-Content-Length"),
        (with_bytes(b"", {"name": "a"}), "/inputs/0/datatype"),
    ],
)
async def test_binary_data_that_does_not_match_the_json_is_refused(
    sent: dict[str, Any], pointer: str
) -> None:
    async with a_gateway(serving=OPEN) as gateway:
        fault(await gateway.admin.post("/inferences", **sent), pointer)


async def test_without_a_server_the_refusal_names_the_setting() -> None:
    async with Gateway() as gateway:
        response = await gateway.admin.post("/inferences", json=a_body(1))
        assert "set triton.servers" in problem(response, 404, "not-found")["detail"]


async def test_inference_needs_its_scope_and_a_priority_within_the_tokens_cap() -> None:
    async with a_gateway(serving=OPEN) as gateway:
        submitter = await gateway.client("submitter", "tasks:write")
        problem(await submitter.post("/inferences", json=a_body(1)), 403, "forbidden")
        asker = await gateway.client("asker", "models:infer", max_priority=50)
        too_high = await asker.post("/inferences", json=a_body(1, priority=51))
        problem(too_high, 403, "priority-not-allowed")
        assert (await asker.post("/inferences", json=a_body(1, priority=50))).status_code == 202


async def test_the_model_type_fills_what_an_inference_leaves_out() -> None:
    nightly = NamedDefaults(priority=20, max_retries=4, timeout_seconds=Seconds(90.0))
    async with a_gateway(serving=OPEN) as gateway:
        gateway.change(defaults=Defaults(model_types={"nightly": nightly}))
        filled = gateway.task(await ask(gateway, 1, model_type="nightly"))
        stated = gateway.task(await ask(gateway, 1, model_type="nightly", priority=30, max_retries=0))
        assert (filled.priority, filled.max_retries, filled.timeout_seconds) == (20, 4, 90.0)
        assert (stated.priority, stated.max_retries, stated.timeout_seconds) == (30, 0, 90.0)
        view = (await gateway.admin.get(f"/tasks/{filled.id}")).json()
        assert view["model_type"] == "nightly"


async def test_same_key_and_body_are_one_inference_and_another_body_is_refused() -> None:
    async with a_gateway(serving=OPEN) as gateway:
        key = {"Idempotency-Key": "k1"}
        first = await gateway.admin.post("/inferences", json=a_body(1), headers=key)
        again = await gateway.admin.post("/inferences", json=a_body(1), headers=key)
        assert again.json()["id"] == first.json()["id"]
        assert again.headers["idempotency-replayed"] == "true"
        other = await gateway.admin.post("/inferences", json=a_body(2), headers=key)
        problem(other, 422, "idempotency-key-reused")
        gateway.change(policy=replace(gateway.policy, serving=InferenceServers()))
        client = await gateway.client("later")
        later = await client.post("/inferences", json=a_body(1), headers=key)
        assert (later.status_code, later.headers["Location"]) == (202, first.headers["Location"])


def holder(gateway: Gateway, model: str = "llm") -> Task:
    task = gateway.world.models.of(ModelKey("main", model))
    assert task is not None
    return task


async def load(gateway: Gateway) -> None:
    await gateway.plan(holder(gateway).id)
    models = {"llm": IndexedModel("llm", ModelState.READY)}
    await gateway.hear(ServerIndex("main", gateway.clock.now(), models))


async def test_an_inference_makes_its_model_wanted_at_its_priority() -> None:
    async with a_gateway() as gateway:
        id = await ask(gateway, 1, priority=30)
        assert (holder(gateway).priority, holder(gateway).state) == (30, TaskState.PENDING)
        models = (await gateway.admin.get("/tasks?kind=model")).json()["items"]
        assert [model["id"] for model in models] == [holder(gateway).id]
        told = (await gateway.admin.get(f"/tasks/{id}")).json()["pending"]
        assert (told["reason"], "waits for room" in told["message"]) == ("ModelLoading", True)
        explained = (await gateway.admin.get(f"/tasks/{id}/explain")).json()
        assert (explained["reason"], explained["remedies"], explained["devices"]) == ("ModelLoading", [], [])
        assert (told["start"], explained["start"]) == (None, None), "unknown"
        urgent = await ask(gateway, 1, priority=60)
        await gateway.turn()
        assert holder(gateway).priority == 60
        await gateway.admin.post(f"/tasks/{urgent}/cancel")
        await gateway.turn()
        assert holder(gateway).priority == 30, "that of those that still wait"
        await load(gateway)
        await send(gateway)
        assert gateway.task(id).state is TaskState.RUNNING
        running = (await gateway.admin.get(f"/tasks/{id}/explain")).json()
        assert running["message"].startswith("running on model llm")


async def test_an_inference_shows_its_start_while_its_model_is_loading() -> None:
    async with a_gateway() as gateway:
        id = await ask(gateway, 1)
        await gateway.plan(holder(gateway).id)
        told = (await gateway.admin.get(f"/tasks/{id}")).json()["pending"]["start"]
        explained = (await gateway.admin.get(f"/tasks/{id}/explain")).json()["start"]
        assert told == explained
        assert (told["basis"], told["p50_seconds"]) == ("stated", 20.0)


async def test_an_inference_for_an_unknown_or_too_large_model_is_refused() -> None:
    async with a_gateway() as gateway:
        unknown = await gateway.admin.post("/inferences", json=a_body(1, model="unheard"))
        assert '"unheard"' in problem(unknown, 404, "not-found")["detail"]
        huge = await gateway.admin.post("/inferences", json=a_body(1, model="huge"))
        problem(huge, 422, "exceeds-capacity")


async def test_an_inference_that_may_not_start_yet_wants_no_model() -> None:
    async with a_gateway() as gateway:
        await ask(gateway, 1, not_before="1975-01-01T00:00:00Z")
        assert gateway.world.models.of(ModelKey("main", "llm")) is None


async def test_a_model_without_a_holder_is_wanted_again_while_inferences_wait() -> None:
    async with a_gateway() as gateway:
        await ask(gateway, 1, priority=40)
        assert gateway.residencies is not None
        queued_models = QueuedModels(gateway.residencies)
        await queued_models.check()
        first = holder(gateway)
        for lost in (first, None):
            if lost is not None:
                await gateway.admin.post("/models/llm/unload")
            await queued_models.check()
            assert holder(gateway).id != first.id
        second = holder(gateway)
        assert (model_of(second).asked_at, model_of(second).queued) == (gateway.clock.now(), True)
        await gateway.admin.post("/models/llm/unload")
        await queued_models.check()
        assert gateway.world.models.of(ModelKey("main", "llm")) is None, (
            "not at once: it may fail again and again"
        )
        gateway.clock.advance(AGAIN_SECONDS)
        await queued_models.check()
        assert holder(gateway).priority == 40
        await gateway.admin.post("/models/llm/unload")
        for seconds in (AGAIN_SECONDS, AGAIN_SECONDS - 1.0):
            gateway.clock.advance(seconds)
            await queued_models.check()
            assert gateway.world.models.of(ModelKey("main", "llm")) is None, "each time later"
        gateway.clock.advance(1.0)
        await queued_models.check()
        assert holder(gateway).priority == 40


async def test_cancelling_a_waiting_inference_ends_it() -> None:
    async with a_gateway(serving=OPEN) as gateway:
        id = await ask(gateway, 1)
        response = await gateway.admin.post(f"/tasks/{id}/cancel")
        assert (response.status_code, response.json()["state"]) == (202, "cancelled")


async def test_nan_and_infinity_are_read_as_triton_reads_them() -> None:
    async with a_gateway(serving=OPEN) as gateway:

        async def sent(datatype: str, value: str, k: str = "0.5") -> httpx.Response:
            tensor = f'{{"name": "x", "datatype": "{datatype}", "shape": [1], "data": [{value}]}}'
            content = f'{{"model": "llm", "inputs": [{tensor}], "parameters": {{"k": {k}}}}}'
            headers = {"Content-Type": "application/json"}
            return await gateway.admin.post("/inferences", content=content, headers=headers)

        for datatype in ("FP16", "BF16", "FP32", "FP64"):
            for value in ("NaN", "Infinity", "-Infinity"):
                accepted = await sent(datatype, value)
                assert accepted.status_code == 202, accepted.text
                id = TaskId(accepted.json()["id"])
                request = request_in((await gateway.store.specs([id]))[id].arguments)
                assert request.inputs == (tensor_of("x", datatype, [1], [float(value)]),)
        fault(await sent("INT32", "NaN"), "/inputs/0/data")
        assert "/parameters/k" in (await sent("FP32", "NaN", k="NaN")).text
