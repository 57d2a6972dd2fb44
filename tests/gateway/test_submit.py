"""POST /tasks: what is accepted, which defaults apply, what the answer has."""

import asyncio
import base64
import json

import pytest
from gpubroker_server.core.domain.orders import Failure
from gpubroker_server.core.domain.units import TaskId

from tests.builders import GIB
from tests.gateway.harness import PATIENCE_SECONDS, PYTHON, Client, Gateway, a_body, before, problem


async def test_an_accepted_task_is_in_the_store_when_the_answer_arrives(
    gateway: Gateway, api: Client
) -> None:
    response = await api.post("/tasks", json=a_body(name="nightly"))
    assert response.status_code == 202
    task = response.json()
    assert response.headers["location"] == f"/tasks/{task['id']}"
    record = await gateway.store.record(TaskId(task["id"]))
    assert record is not None
    assert record.task.name == "nightly"
    assert task["pending"]["reason"] == "PendingEvaluation"


async def test_fields_left_out_of_a_submit_get_defaults(api: Client) -> None:
    task = (await api.post("/tasks", json=a_body())).json()
    assert (task["priority"], task["band"]) == (54, "batch")
    assert (task["max_retries"], task["timeout_seconds"], task["grace_seconds"]) == (0, None, 30.0)
    assert task["retry_on"] == ["failure"]
    assert task["resources"] == {
        "gpus": 0,
        "gpu_mb": None,
        "gpu_fraction": None,
        "exclusive": False,
        "cpu": 1.0,
        "memory_mb": 0,
        "custom": {},
        "kinds": [],
        "min_power": 0,
        "min_device_mb": 0,
        "nodes": {},
        "prefer_kinds": [],
        "prefer_nodes": {},
        "pool": "",
        "roles": [],
        "bundles": None,
        "strategy": None,
        "min_ranks": None,
    }


async def test_all_fields_of_a_submit_are_returned(gateway: Gateway, api: Client) -> None:
    said = {
        "name": "train-7",
        "priority": 72,
        "model_type": "llm",
        "placement": "spread",
        "max_retries": 2,
        "retry_on": ["failure", "timeout"],
        "timeout_seconds": 3600.0,
        "grace_seconds": 5.0,
        "labels": {"run": "nightly", "team": "vision/detect"},
        "result_format": "cloudpickle",
    }
    resources = {
        "gpu_mb": 18 * GIB,
        "gpus": 1,
        "exclusive": True,
        "cpu": 4.0,
        "memory_mb": 512,
        "custom": {"licence": 2},
    }
    run = {"entrypoint": "myteam.training:train", "args": [1, "two", [None]], "kwargs": {"lr": 0.1, "é": "ü"}}
    task = (
        await api.post("/tasks", json=a_body(run, **said, resources=resources, env={"MODE": "fast"}))
    ).json()
    assert {name: task[name] for name in said} == said
    assert {name: task["resources"][name] for name in resources} == resources
    run_as = {"kind": "entrypoint", "entrypoint": "myteam.training:train", "command": None, "model": None}
    assert task["run"] == run_as
    spec = (await gateway.store.specs([task["id"]]))[task["id"]]
    assert json.loads(spec.arguments) == {"args": run["args"], "kwargs": run["kwargs"]}
    assert spec.env == {"MODE": "fast"}


@pytest.mark.parametrize("size", [{"gpu_mb": 1024}, {"gpu_fraction": 0.25}, {"exclusive": True}])
async def test_a_gpu_size_alone_means_one_gpu_and_no_cpu(api: Client, size: dict[str, object]) -> None:
    task = (await api.post("/tasks", json=a_body(resources=size))).json()
    assert (task["resources"]["gpus"], task["resources"]["cpu"]) == (1, 0.0)


async def test_a_gpu_task_that_states_no_cpu_takes_none(api: Client) -> None:
    task = (await api.post("/tasks", json=a_body(resources={"gpu_mb": 1024}))).json()
    assert task["resources"]["cpu"] == 0.0


@pytest.mark.parametrize(
    ("name", "number"),
    [("critical", 95), ("interactive", 79), ("batch", 54), ("background", 24), ("idle", 4)],
)
async def test_the_name_of_a_band_means_its_middle_value(api: Client, name: str, number: int) -> None:
    task = (await api.post("/tasks", json=a_body(priority=name))).json()
    assert (task["priority"], task["band"]) == (number, name)


@pytest.mark.parametrize(
    ("fields", "shares"),
    [
        ({"resources": {"cpu": 0.5}}, True),
        ({"resources": {"cpu": 1}}, False),
        ({"resources": {"cpu": 0.5, "gpu_mb": 100}}, False),
        ({"resources": {"cpu": 0.5}, "env": {"A": "b"}}, False),
        ({"resources": {"cpu": 0.5}, "run": {"command": ["true"]}}, False),
    ],
)
async def test_only_small_entrypoints_share_a_process(
    gateway: Gateway, api: Client, fields: dict[str, object], shares: bool
) -> None:
    response = await api.post("/tasks", json={**a_body(), **fields})
    assert gateway.task(response.json()["id"]).shareable is shares


@pytest.mark.parametrize("name", ["BASH_ENV", "PATH", "http_proxy", "SSL_CERT_FILE", "HF_ENDPOINT", "SEEDS"])
@pytest.mark.parametrize("path", ["/tasks", "/tasks/batch"])
async def test_token_without_code_sets_only_the_variables_the_operator_lists(
    gateway: Gateway, path: str, name: str
) -> None:
    writer = await gateway.client("writer", "tasks:write")
    task = a_body(env={"SEED": "1", "WANDB_MODE": "offline", name: "x"})
    is_batch = path.endswith("batch")
    answer = await writer.post(path, json={"tasks": [task]} if is_batch else task)
    refusal = answer.json()["items"][0]["problem"] if is_batch else problem(answer, 403, "forbidden")
    assert refusal["code"] == "forbidden"
    at = "/tasks/0" if is_batch else ""
    assert [fault["pointer"] for fault in refusal["errors"]] == [f"{at}/env/{name}"]
    assert "env_allowed" in refusal["detail"]
    assert gateway.world.tasks == {}


@pytest.mark.parametrize(
    ("scopes", "name"),
    [
        (["tasks:write"], "WANDB_MODE"),
        (["tasks:write", "tasks:code"], "PATH"),
        (["tasks:write", "tasks:command"], "PATH"),
    ],
)
async def test_a_listed_variable_or_a_scope_for_code_is_enough(
    gateway: Gateway, scopes: list[str], name: str
) -> None:
    writer = await gateway.client("writer", *scopes)
    assert (await writer.post("/tasks", json=a_body(env={name: "x"}))).status_code == 202


async def test_a_command_keeps_its_arguments_and_its_directory(gateway: Gateway, api: Client) -> None:
    run = {"command": ["python", "-c", "print('a b')\n"], "working_directory": "/data"}
    task = (await api.post("/tasks", json=a_body(run))).json()
    assert task["run"]["command"] == run["command"]
    spec = (await gateway.store.specs([task["id"]]))[task["id"]]
    assert (spec.kind, spec.working_directory, spec.arguments) == ("command", "/data", b"")


async def test_a_function_is_stored_byte_for_byte_and_never_unpickled(gateway: Gateway, api: Client) -> None:
    poison = b"cos\nsystem\n(S'touch /tmp/opened'\ntR."
    run = {
        "function": base64.b64encode(poison).decode(),
        "python": PYTHON,
        "cloudpickle": "3.1",
        "runtime": 1,
    }
    task = (await api.post("/tasks", json=a_body(run))).json()
    spec = (await gateway.store.specs([task["id"]]))[task["id"]]
    assert (spec.kind, spec.arguments, spec.python) == ("function", poison, PYTHON)


async def test_large_arguments_become_a_blob(gateway: Gateway, api: Client) -> None:
    run = {"entrypoint": "myteam.training:train", "args": ["x" * 70_000]}
    task = (await api.post("/tasks", json=a_body(run))).json()
    spec = (await gateway.store.specs([task["id"]]))[task["id"]]
    assert spec.arguments == b""
    assert json.loads(gateway.blobs.objects[spec.arguments_digest or ""])["args"] == run["args"]


@pytest.mark.parametrize("sent", ['"key-1"', "key-1"])
async def test_the_same_key_and_body_answer_with_the_first_task(api: Client, sent: str) -> None:
    first = await api.post("/tasks", json=a_body(), headers={"Idempotency-Key": '"key-1"'})
    again = await api.post("/tasks", json=a_body(), headers={"Idempotency-Key": sent})
    assert again.status_code == 202
    assert again.json()["id"] == first.json()["id"]
    assert again.headers["location"] == first.headers["location"]
    assert again.headers["idempotency-replayed"] == "true"
    assert "idempotency-replayed" not in first.headers
    assert len((await api.get("/tasks")).json()["items"]) == 1


async def test_the_same_key_with_another_body_is_refused_and_stores_nothing(api: Client) -> None:
    await api.post("/tasks", json=a_body(), headers={"Idempotency-Key": "k"})
    other = await api.post("/tasks", json=a_body(name="other"), headers={"Idempotency-Key": "k"})
    assert "nothing was stored" in problem(other, 422, "idempotency-key-reused")["detail"]
    assert len((await api.get("/tasks")).json()["items"]) == 1


async def test_two_tenants_may_use_the_same_key(gateway: Gateway, api: Client) -> None:
    other = await gateway.client("other", tenant="vision")
    mine = await api.post("/tasks", json=a_body(), headers={"Idempotency-Key": "k"})
    theirs = await other.post("/tasks", json=a_body(name="b"), headers={"Idempotency-Key": "k"})
    assert theirs.status_code == 202
    assert theirs.json()["id"] != mine.json()["id"]


async def test_a_refused_submit_does_not_use_up_its_key(api: Client) -> None:
    await api.post("/tasks", json=a_body(nmae="x"), headers={"Idempotency-Key": "k"})
    assert (await api.post("/tasks", json=a_body(), headers={"Idempotency-Key": "k"})).status_code == 202


async def test_prefer_wait_returns_the_result_with_the_answer(gateway: Gateway, api: Client) -> None:
    sending = asyncio.create_task(api.post("/tasks", json=a_body(), headers={"Prefer": "wait=30"}))
    task_id = await gateway.next_task()
    await gateway.waits(task_id)
    await gateway.end(task_id, b'{"loss": 0.25}')
    response = await before(PATIENCE_SECONDS, sending)
    assert response.status_code == 201
    assert response.headers["preference-applied"] == "wait=30"
    assert (response.json()["state"], response.json()["result"]) == ("succeeded", {"loss": 0.25})


async def test_prefer_wait_answers_with_the_task_when_the_time_is_over(api: Client) -> None:
    response = await api.post("/tasks", json=a_body(), headers={"Prefer": "respond-async, wait=0"})
    assert response.status_code == 202
    assert response.headers["preference-applied"] == "wait=0"
    assert "result" not in response.json()


async def test_a_wait_above_the_limit_is_cut_to_it() -> None:
    async with Gateway(wait_seconds=0) as gateway:
        response = await gateway.admin.post("/tasks", json=a_body(), headers={"Prefer": "wait=3600"})
        assert response.headers["preference-applied"] == "wait=0"


async def test_an_unknown_preference_is_ignored(api: Client) -> None:
    response = await api.post("/tasks", json=a_body(), headers={"Prefer": "wait=soon"})
    assert response.status_code == 202
    assert "preference-applied" not in response.headers


async def test_a_replayed_submit_can_wait_too(gateway: Gateway, api: Client) -> None:
    headers = {"Idempotency-Key": "k"}
    task_id = (await api.post("/tasks", json=a_body(), headers=headers)).json()["id"]
    await gateway.end(task_id, failure=Failure("exception", "boom", "Traceback ..."))
    again = await api.post("/tasks", json=a_body(), headers={**headers, "Prefer": "wait=5"})
    assert again.status_code == 201
    assert again.json()["error"] == {"kind": "exception", "message": "boom", "traceback": "Traceback ..."}


async def test_content_type_may_be_missing_or_a_kind_of_json(api: Client) -> None:
    body = json.dumps(a_body()).encode()
    for headers in (
        {},
        {"Content-Type": "application/json; charset=utf-8"},
        {"Content-Type": "application/x+json"},
    ):
        assert (await api.post("/tasks", content=body, headers=headers)).status_code == 202


async def test_a_trailing_slash_makes_no_difference(api: Client) -> None:
    response = await api.post("/tasks/", json=a_body())
    assert response.status_code == 202
    assert (await api.get(f"/tasks/{response.json()['id']}/")).status_code == 200
