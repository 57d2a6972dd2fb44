"""Refusals of POST /tasks: each has a pointer, what was found, and what to do."""

import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.builders import GIB, a_device
from tests.gateway.harness import PYTHON, Client, Gateway, a_body, fault, problem

PICKLED = base64.b64encode(b"pickle").decode()


async def test_an_unknown_field_is_named_with_the_one_that_was_meant(api: Client) -> None:
    response = await api.post("/tasks", json=a_body(resources={"gpu_memory": 1}, nmae="x"))
    assert fault(response, "/resources/gpu_memory") == 'unknown field "gpu_memory"; did you mean "gpu_mb"?'
    assert fault(response, "/nmae") == 'unknown field "nmae"; did you mean "name"?'


async def test_a_large_bound_is_written_in_full(api: Client) -> None:
    response = await api.post("/tasks", json=a_body(resources={"gpu_mb": 99_999_999}))
    assert fault(response, "/resources/gpu_mb") == "must be at most 16777216; found 99999999"


async def test_a_wrong_part_of_an_object_is_the_last_word(api: Client) -> None:
    response = await api.post("/tasks", json=a_body(env={"LD_PRELOAD": "x"}))
    assert fault(response, "/env").endswith("; leave it out")
    response = await api.post("/tasks", json=a_body(env=["LD_PRELOAD"]))
    assert fault(response, "/env") == "must be an object; found an array"


async def test_a_function_of_ones_own_is_to_be_sent(api: Client) -> None:
    refused = await api.post("/tasks", json=a_body({"entrypoint": "train:fit"}))
    document = problem(refused, refused.status_code, "entrypoint-not-allowed")
    assert document["detail"].endswith("send the folder that it is in (--upload, upload=)")


async def test_a_field_at_the_wrong_level_is_refused_with_the_right_one(api: Client) -> None:
    response = await api.post("/tasks", json=a_body(gpu_mb=1, args=[]))
    assert fault(response, "/gpu_mb") == 'unknown field "gpu_mb"; did you mean "resources.gpu_mb"?'
    assert fault(response, "/args") == 'unknown field "args"; did you mean "run.args"?'


async def test_a_field_unlike_any_other_is_refused_with_the_list_of_fields(api: Client) -> None:
    response = await api.post("/tasks", json=a_body({"command": ["a"], "zzz": 1}))
    assert fault(response, "/run/zzz") == 'unknown field "zzz"; known are command, working_directory'


async def test_all_faults_come_in_one_answer(api: Client) -> None:
    body = {
        "run": {"entrypoint": 1},
        "priority": "urgent",
        "timeout_seconds": -1,
        "labels": {"a b": "c"},
        "x": 1,
    }
    document = problem(await api.post("/tasks", json=body), 422, "validation-failed")
    pointers = {found["pointer"] for found in document["errors"]}
    assert pointers == {"/run/entrypoint", "/priority", "/timeout_seconds", "/labels/a b", "/x"}
    assert "(and 4 more)" in document["detail"]


async def test_pointers_are_escaped_as_rfc_6901_says(api: Client) -> None:
    fault(await api.post("/tasks", json=a_body(labels={"a/b~c": "x"})), "/labels/a~1b~0c")


@pytest.mark.parametrize(
    ("pointer", "fields"),
    [
        ("/resources/gpu_mb", {"resources": {"gpu_mb": "18GiB"}}),
        ("/resources/gpu_mb", {"resources": {"gpu_mb": True}}),
        ("/resources/gpu_mb", {"resources": {"gpu_mb": 1024.0}}),
        ("/resources/gpu_mb", {"resources": {"gpu_mb": -1}}),
        ("/resources/gpu_mb", {"resources": {"gpu_mb": 0}}),
        ("/resources/gpu_mb", {"resources": {"gpu_mb": 10**12}}),
        ("/resources/gpus", {"resources": {"gpus": 1025}}),
        ("/resources/gpus", {"resources": {"gpus": -1}}),
        ("/resources/gpu_fraction", {"resources": {"gpu_fraction": 0}}),
        ("/resources/gpu_fraction", {"resources": {"gpu_fraction": 1.5}}),
        ("/resources/exclusive", {"resources": {"exclusive": 1}}),
        ("/resources/cpu", {"resources": {"cpu": -0.5}}),
        ("/resources/cpu", {"resources": {"cpu": True}}),
        ("/resources/memory_mb", {"resources": {"memory_mb": -1}}),
        ("/resources/custom/licence", {"resources": {"custom": {"licence": 0}}}),
        ("/resources", {"resources": {"gpu_mb": 1, "gpu_fraction": 0.5}}),
        ("/resources", {"resources": {"gpu_mb": 1, "gpus": 0}}),
        ("/resources", {"resources": []}),
        ("/priority", {"priority": 101}),
        ("/priority", {"priority": -1}),
        ("/priority", {"priority": 50.5}),
        ("/priority", {"priority": True}),
        ("/priority", {"priority": "high"}),
        ("/max_retries", {"max_retries": 101}),
        ("/retry_on", {"retry_on": []}),
        ("/retry_on", {"retry_on": "timeout"}),
        ("/retry_on/0", {"retry_on": ["preemption"]}),
        ("/timeout_seconds", {"timeout_seconds": 0}),
        ("/timeout_seconds", {"timeout_seconds": 31 * 86400}),
        ("/grace_seconds", {"grace_seconds": 3601}),
        ("/placement", {"placement": "scatter"}),
        ("/result_format", {"result_format": "pickle"}),
        ("/name", {"name": "x" * 201}),
        ("/name", {"name": "two\nlines"}),
        ("/name", {"name": "nul\0"}),
        ("/model_type", {"model_type": 7}),
        ("/labels", {"labels": {f"k{i}": "v" for i in range(33)}}),
        ("/labels/k", {"labels": {"k": "v" * 256}}),
        ("/labels/k", {"labels": {"k": 1}}),
        ("/labels/" + "k" * 64, {"labels": {"k" * 64: "v"}}),
        ("/env/A", {"env": {"A": "nul\0"}}),
        ("/env", {"env": {f"K{i}": "v" for i in range(65)}}),
        ("/env", {"env": {"A": "x" * 33_000}}),
        ("/env", {"env": {"1A": "x"}}),
        ("/env", {"env": {"A-B": "x"}}),
        ("/env", {"env": {"": "x"}}),
        ("/run", {"run": {}}),
        ("/run", {"run": "myteam.a:b"}),
        ("/run", {"run": {"entrypoint": "myteam.a:b", "command": ["true"]}}),
        ("/run/entrypoint", {"run": {"entrypoint": "no colon"}}),
        ("/run/entrypoint", {"run": {"entrypoint": "myteam.a:b; rm"}}),
        ("/run/args", {"run": {"entrypoint": "myteam.a:b", "args": {}}}),
        ("/run/command", {"run": {"command": []}}),
        ("/run/command", {"run": {"command": "ls -l"}}),
        ("/run/command/1", {"run": {"command": ["ls", "nul\0"]}}),
        ("/run/working_directory", {"run": {"command": ["ls"], "working_directory": "relative"}}),
        ("/run/function", {"run": {"function": "not base64!", "python": PYTHON}}),
        ("/run/function", {"run": {"function": PICKLED[:-1], "python": PYTHON}}),
        ("/run/function", {"run": {"function": "", "python": PYTHON}}),
        ("/run/python", {"run": {"function": PICKLED}}),
        ("/run/python", {"run": {"function": PICKLED, "python": "3"}}),
        ("/run/runtime", {"run": {"function": PICKLED, "python": PYTHON, "runtime": 2}}),
    ],
)
async def test_a_value_out_of_bounds_is_refused_with_its_pointer(
    api: Client, pointer: str, fields: dict[str, Any]
) -> None:
    fault(await api.post("/tasks", json={**a_body(), **fields}), pointer)


@pytest.mark.parametrize(
    ("fields", "pointer", "says"),
    [
        ({"run": {"comand": ["ls"]}}, "/run", 'unknown field "comand"; did you mean "command"?'),
        ({"run": {"cmd": ["ls"]}}, "/run", 'did you mean "command"?'),
        ({"run": {"entrypoint": "a:b", "command": ["ls"]}}, "/run", 'found "entrypoint", "command"'),
        ({"run": {"entrypoint": "a.b"}}, "/run/entrypoint", "must be module:function"),
        ({"run": {"command": []}}, "/run/command", "must have at least 1 item; it is empty"),
        (
            {"name": "evil\x1b[31m"},
            "/name",
            r"must be one line without control characters; found 'evil\x1b[31m'",
        ),
    ],
)
async def test_a_refusal_suggests_a_value_and_has_no_control_characters(
    api: Client, fields: dict[str, Any], pointer: str, says: str
) -> None:
    assert says in fault(await api.post("/tasks", json={**a_body(), **fields}), pointer)


@pytest.mark.parametrize(
    "name", ["CUDA_VISIBLE_DEVICES", "NVIDIA_X", "RAY_ADDRESS", "GPUBROKER_TOKEN", "LD_PRELOAD", "PYTHONPATH"]
)
async def test_variables_that_the_broker_sets_are_refused_by_name(api: Client, name: str) -> None:
    assert f'"{name}"' in fault(await api.post("/tasks", json=a_body(env={name: "1"})), "/env")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize(
    "place", ['"resources": {"cpu": %s}', '"timeout_seconds": %s', '"resources": {"custom": {"licence": %s}}']
)
async def test_nan_and_infinity_are_refused(api: Client, number: str, place: str) -> None:
    body = '{"run": {"entrypoint": "myteam.a:b"}, ' + place % number + "}"
    problem(await api.post("/tasks", content=body), 422, "validation-failed")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_nan_and_infinity_in_arguments_are_refused(api: Client, number: str) -> None:
    body = '{"run": {"entrypoint": "myteam.a:b", "kwargs": {"deep": [{"x": ' + number + "}]}}}"
    assert "NaN" in fault(await api.post("/tasks", content=body), "/run")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"run": {"entrypoint": "a:b"},}',
        b"\xff\xfe",
        b'{"run": {"entrypoint": "\xff"}}',
        b'{"run": {"entrypoint": "\\ud800"}}',
        b'{"run": ' + b"[" * 100_000,
        b'{"run": {"entrypoint": "myteam.a:b", "args": ' + b"[" * 300 + b"]" * 300 + b"}}",
        b'{"priority": ' + b"9" * 5000 + b"}",
    ],
    ids=["empty", "cut", "comma", "no-utf8", "bad-utf8", "surrogate", "unclosed", "deep", "long-number"],
)
async def test_a_body_that_is_not_json_is_refused_as_malformed(api: Client, body: bytes) -> None:
    problem(await api.post("/tasks", content=body), 400, "malformed-json")


@pytest.mark.parametrize("body", ["[]", "null", '"text"', "7", "true"])
async def test_json_that_is_not_an_object_is_refused(api: Client, body: str) -> None:
    assert "must be an object" in fault(await api.post("/tasks", content=body), "")


async def test_a_body_of_another_type_is_refused_with_the_type_to_use(api: Client) -> None:
    response = await api.post("/tasks", data={"run": "x"})
    assert "application/json" in problem(response, 415, "unsupported-media-type")["detail"]


async def test_an_encoded_body_is_refused_unread(api: Client) -> None:
    response = await api.post("/tasks", content=b"\x1f\x8b", headers={"Content-Encoding": "gzip"})
    assert '"gzip"' in problem(response, 415, "unsupported-media-type")["detail"]


async def test_a_body_over_the_limit_is_refused_by_its_content_length() -> None:
    async with Gateway(body_bytes=1000) as gateway:
        response = await gateway.admin.post("/tasks", json=a_body(name="x" * 1000))
        detail = problem(response, 413, "payload-too-large")["detail"]
        for part in ("1000 bytes", "POST /objects", "broker.put", "limits.body_bytes"):
            assert part in detail


async def test_a_chunked_body_over_the_limit_is_refused() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(1000):
            yield b" " * 100

    async with Gateway(body_bytes=1000) as gateway:
        problem(await gateway.admin.post("/tasks", content=pieces()), 413, "payload-too-large")


async def test_a_chunked_body_below_the_limit_is_read(api: Client) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for byte in json.dumps(a_body()).encode():
            yield bytes([byte])

    assert (await api.post("/tasks", content=pieces())).status_code == 202


async def test_a_demand_larger_than_any_device_is_refused_with_the_largest(api: Client) -> None:
    response = await api.post("/tasks", json=a_body(resources={"gpu_mb": 90 * GIB}))
    document = problem(response, 422, "exceeds-capacity")
    assert "90.0 GiB" in document["detail"]
    assert "80.0 GiB of H100" in document["detail"]
    assert document["errors"][0]["pointer"] == "/resources/gpu_mb"


async def test_an_unknown_custom_resource_is_refused(api: Client) -> None:
    response = await api.post("/tasks", json=a_body(resources={"custom": {"tpu": 1}}))
    assert problem(response, 422, "unknown-resource")["errors"][0]["pointer"] == "/resources/custom/tpu"


@pytest.mark.parametrize(
    "entrypoint",
    [
        "os:system",
        "myteam:train",
        "tools:resize2",
        "xmyteam.a:b",
        "myteam.training:os.system",
        "tools:Image",
        "tools:Image.io.remove",
    ],
)
async def test_an_entrypoint_outside_the_list_is_refused_with_the_list(api: Client, entrypoint: str) -> None:
    document = problem(
        await api.post("/tasks", json=a_body({"entrypoint": entrypoint})), 422, "entrypoint-not-allowed"
    )
    assert "myteam.*:*, tools:resize" in document["detail"]
    assert document["errors"][0]["pointer"] == "/run/entrypoint"


@pytest.mark.parametrize("entrypoint", ["myteam.a.b:train", "tools:resize", "tools:Image.crop"])
async def test_an_entrypoint_on_the_list_is_accepted(api: Client, entrypoint: str) -> None:
    await api.submit({"entrypoint": entrypoint})


async def test_a_function_of_another_python_minor_is_refused_with_both_named(api: Client) -> None:
    response = await api.post("/tasks", json=a_body({"function": PICKLED, "python": "3.10"}))
    document = problem(response, 422, "python-mismatch")
    assert "Python 3.10" in document["detail"]
    assert f"Python {PYTHON}" in document["detail"]


async def test_a_function_of_a_newer_cloudpickle_is_refused_with_both_named(api: Client) -> None:
    run = {"function": PICKLED, "python": PYTHON, "cloudpickle": "2.2"}
    await api.submit(run)
    document = problem(
        await api.post("/tasks", json=a_body({**run, "cloudpickle": "4.0"})), 422, "python-mismatch"
    )
    assert document["errors"][0]["pointer"] == "/run/cloudpickle"
    assert "cloudpickle 4.0" in document["detail"]
    assert "by the older 3.1" in document["detail"]


async def test_a_priority_above_the_cap_is_refused_with_the_cap(gateway: Gateway) -> None:
    capped = await gateway.client("capped", "tasks:write", max_priority=60)
    assert (await capped.post("/tasks", json=a_body(priority=60))).status_code == 202
    response = await capped.post("/tasks", json=a_body(priority="critical"))
    assert "priority 95 is above 60" in problem(response, 403, "priority-not-allowed")["detail"]


async def test_a_default_priority_above_the_cap_is_lowered_to_it(gateway: Gateway) -> None:
    """Of tasks, arrays, batches and leases, also where a model type or a tenant says it."""
    capped = await gateway.client("capped", max_priority=40)
    task = (await capped.post("/tasks", json=a_body())).json()
    typed = (await capped.post("/tasks", json=a_body(model_type="llm"))).json()
    batch = (await capped.post("/tasks/batch", json={"tasks": [a_body()]})).json()["items"][0]
    lease = (await capped.post("/leases", json={"holder": "me", "gpu_mb": 1024})).json()
    ids = [task["id"], typed["id"], batch["id"], lease["id"]]
    assert [gateway.world.tasks[it].priority for it in ids] == [40] * 4
    modest = await gateway.client("modest", tenant="modest")
    typed = (await modest.post("/tasks", json=a_body(model_type="llm"))).json()
    assert typed["priority"] == 69, "the cap of its tenant"
    simulated = (await capped.post("/tasks/simulate", json={})).status_code
    assert simulated == 200


@pytest.mark.parametrize(
    ("run", "scope"),
    [({"command": ["true"]}, "tasks:command"), ({"function": PICKLED, "python": PYTHON}, "tasks:code")],
)
async def test_commands_and_functions_need_a_scope_of_their_own(
    gateway: Gateway, run: dict[str, Any], scope: str
) -> None:
    plain = await gateway.client("plain", "tasks:write")
    assert scope in problem(await plain.post("/tasks", json=a_body(run)), 403, "forbidden")["detail"]
    trusted = await gateway.client("trusted", "tasks:write", scope)
    assert (await trusted.post("/tasks", json=a_body(run))).status_code == 202


@pytest.mark.parametrize("key", ["", "x" * 256, "two words", 'qu"ote', '"open'])
async def test_a_bad_idempotency_key_is_refused_by_its_header(api: Client, key: str) -> None:
    fault(await api.post("/tasks", json=a_body(), headers={"Idempotency-Key": key}), "header:Idempotency-Key")


async def test_a_refused_task_is_not_stored(gateway: Gateway, api: Client) -> None:
    await api.post("/tasks", json=a_body(priority=101))
    await api.post("/tasks", json=a_body(resources={"gpu_mb": 90 * GIB}))
    assert not gateway.world.tasks


async def test_a_larger_device_that_joins_lifts_the_refusal(gateway: Gateway, api: Client) -> None:
    body = a_body(resources={"gpu_mb": 90 * GIB})
    problem(await api.post("/tasks", json=body), 422, "exceeds-capacity")
    await gateway.join(a_device(), a_device("gpu1", mb=141 * GIB))
    assert (await api.post("/tasks", json=body)).status_code == 202
