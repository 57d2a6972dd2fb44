"""Secrets over HTTP: who may set and use them, and that no answer has the text of one."""

import json
from typing import Any

import httpx
import pytest
from gpubroker_server.core.domain.units import Position, TaskId
from gpubroker_server.gateway.admin.secrets import MAX_BYTES, MAX_SECRETS
from structlog.testing import capture_logs

from tests.gateway.harness import Client, Gateway, a_body, fault, problem

TEXT = "wandb-0123456789abcdef"
COMMAND = {"command": ["true"]}
NAMED = a_body(COMMAND, env={"WANDB_KEY": "secret:WANDB"})


async def set_secret(client: Client, name: str = "WANDB", text: str | bytes = TEXT) -> httpx.Response:
    return await client.put(f"/secrets/{name}", content=text)


async def test_secret_is_set_listed_by_name_deleted_and_each_change_audited(
    gateway: Gateway,
) -> None:
    client = gateway.admin
    assert (await set_secret(client)).status_code == 204
    assert (await set_secret(client, text="another")).status_code == 204
    assert (await client.get("/secrets")).json() == {"items": [{"name": "WANDB"}]}
    assert (await client.delete("/secrets/WANDB")).status_code == 204
    assert "GET /secrets" in problem(await client.delete("/secrets/WANDB"), 404, "not-found")["detail"]
    notes = [(note.actor, note.tenant, note.action, note.subject) for note in gateway.store.audited()]
    done = [
        ("admin", "default", action, "WANDB") for action in ("secret.set", "secret.set", "secret.deleted")
    ]
    assert notes == done


async def test_secrets_of_another_tenant_are_not_there(gateway: Gateway) -> None:
    await set_secret(gateway.admin)
    other = await gateway.client("other", tenant="acme")
    assert (await other.get("/secrets")).json() == {"items": []}
    assert "no secret" in fault(await other.post("/tasks", json=NAMED), "/env/WANDB_KEY")
    problem(await other.delete("/secrets/WANDB"), 404, "not-found")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a b", TEXT),
        (".hidden", TEXT),
        ("A", ""),
        ("A", b"\xff" + TEXT.encode()),
        ("A", f"{TEXT}\0"),
        ("A", TEXT + "x" * MAX_BYTES),
    ],
)
async def test_what_no_variable_can_hold_is_refused_without_being_quoted(
    gateway: Gateway, name: str, text: str | bytes
) -> None:
    response = await set_secret(gateway.admin, name, text)
    problem(response, 422, "validation-failed")
    assert "wandb-0123" not in response.text
    assert (await gateway.admin.get("/secrets")).json() == {"items": []}


async def test_a_tenant_cannot_fill_the_disk_with_secrets(gateway: Gateway) -> None:
    for number in range(MAX_SECRETS):
        await gateway.secrets.put("default", f"S{number}", "x")
    assert "delete some" in fault(await set_secret(gateway.admin), "")
    assert (await set_secret(gateway.admin, "S7")).status_code == 204


SUBMITS: dict[str, tuple[str, Any]] = {
    "alone": ("/tasks", NAMED),
    "in a batch": ("/tasks/batch", {"tasks": [NAMED, a_body(COMMAND)], "all_or_nothing": True}),
}


@pytest.mark.parametrize(("path", "body"), SUBMITS.values(), ids=SUBMITS)
async def test_a_task_that_names_a_secret_needs_it_and_the_scope(
    gateway: Gateway, path: str, body: Any
) -> None:
    scopes = ["tasks:write", "tasks:read", "tasks:command"]
    without = await gateway.client("without", *scopes)
    user = await gateway.client("user", *scopes, "secrets:use")
    missing = await user.post(path, json=body)
    assert missing.status_code in {400, 422}
    assert "gpubroker secrets set NAME" in missing.text
    await set_secret(gateway.admin)
    refused = await without.post(path, json=body)
    assert refused.status_code in {403, 422}
    assert "secrets:use" in refused.text
    assert (await user.post(path, json=body)).status_code == 202
    assert (await without.post("/tasks", json=a_body(COMMAND, env={"SEED": "1"}))).status_code == 202


async def test_a_simulated_submit_says_what_the_submit_would(gateway: Gateway) -> None:
    assert "gpubroker secrets set NAME" in (await gateway.admin.post("/tasks/simulate", json=NAMED)).text


async def test_a_retry_needs_the_secret_and_the_scope_anew(gateway: Gateway) -> None:
    await set_secret(gateway.admin)
    task = await gateway.admin.submit(COMMAND, env=NAMED["env"])
    await gateway.end(task)
    without = await gateway.client("without", "tasks:write", "tasks:read", "tasks:command")
    refused = problem(await without.post(f"/tasks/{task}/retry"), 403, "forbidden")
    assert "secrets:use" in refused["detail"]
    assert (await gateway.admin.post(f"/tasks/{task}/retry")).status_code == 202
    await gateway.admin.delete("/secrets/WANDB")
    fault(await gateway.admin.post(f"/tasks/{task}/retry"), "/env/WANDB_KEY")


async def test_the_text_is_in_no_answer_no_event_no_log_and_no_row(gateway: Gateway) -> None:
    with capture_logs() as lines:
        await set_secret(gateway.admin)
        task = await gateway.admin.submit(COMMAND, env=NAMED["env"])
        await gateway.end(task)
        paths = [f"/tasks/{task}", f"/tasks/{task}/explain", f"/tasks/{task}/result", "/tasks", "/secrets"]
        answers = [(await gateway.admin.get(path)).text for path in paths]
    events = await gateway.store.events(Position(0), 1000)
    record = await gateway.store.record(TaskId(task))
    assert record is not None
    assert record.spec.env == NAMED["env"]
    assert TEXT not in json.dumps(
        [answers, lines, list(map(repr, (*events, *gateway.store.audited(), record)))]
    )
