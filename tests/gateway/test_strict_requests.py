"""Query parameters that an operation does not have, and times that are no times, are refused everywhere."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.gateway.harness import DOCUMENT, Client, Gateway, a_body, fault, problem

OPERATIONS = [
    (method, path) for path, operations in DOCUMENT["paths"].items() for method in sorted(operations)
]
NO_TIMES = ["20261221", "12", "-5", "1.5e9", "2026-12-21", "2026-12-21T22:00", "P1D", ""]


async def test_a_dry_run_asked_for_in_the_query_of_a_submit_runs_no_task(api: Client) -> None:
    refused = await api.post("/tasks?dry_run=true", json=a_body())
    assert fault(refused, "query:dry_run").startswith('unknown parameter "dry_run"')
    assert (await api.get("/tasks")).json()["items"] == []


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
async def test_every_operation_refuses_an_unknown_query_parameter(
    api: Client, method: str, path: str
) -> None:
    takes_json = "application/json" in DOCUMENT["paths"][path][method].get("requestBody", {}).get(
        "content", {}
    )
    body: dict[str, Any] = {"json": {}} if takes_json else {}
    url = path.replace("{", "").replace("}", "")
    answer = await api.request(method.upper(), url, params={"qq": "1"}, **body)
    assert fault(answer, "query:qq").startswith('unknown parameter "qq"')


async def test_unknown_parameters_are_refused_together_with_faults_of_the_body(api: Client) -> None:
    answer = await api.post("/leases?holder=me", json={"holder": "", "gpu_md": 1})
    pointers = {one["pointer"] for one in problem(answer, 422, "validation-failed")["errors"]}
    assert pointers == {"query:holder", "/holder", "/gpu_md"}


@pytest.mark.parametrize("time", NO_TIMES)
@pytest.mark.parametrize("field", ["not_before", "deadline_at"])
async def test_a_time_that_is_not_written_out_is_refused_at_submit(
    api: Client, field: str, time: str
) -> None:
    assert _hint(fault(await api.post("/tasks", json={**a_body(), field: time}), f"/{field}"))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tasks/batch", lambda task: {"tasks": [task]}),
        ("/tasks/simulate", lambda task: task),
        ("/arrays", lambda task: {**task, "items": {"values": [1]}}),
        ("/worker-sets", lambda task: {**task, "count": 1}),
    ],
    ids=["batch", "simulation", "array", "worker set"],
)
async def test_a_time_that_is_not_written_out_is_refused_in_every_body(
    api: Client, path: str, body: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    answer = await api.post(path, json=body({**a_body(), "not_before": "20261221"}))
    # A batch answers for each task, the others for the body.
    refused = answer.json()["items"][0]["problem"] if path == "/tasks/batch" else answer.json()
    assert any(
        found["pointer"].endswith("/not_before") and _hint(found["detail"]) for found in refused["errors"]
    )
    assert (await api.get("/tasks")).json()["items"] == []


@pytest.mark.parametrize("time", [*NO_TIMES, 20261221])
async def test_a_time_that_is_not_written_out_is_refused_in_a_change(
    gateway: Gateway, api: Client, time: Any
) -> None:
    task = await api.submit(held=True)
    for field in ("not_before", "deadline_at"):
        assert _hint(fault(await api.patch(f"/tasks/{task}", json={field: time}), f"/{field}"))


@pytest.mark.parametrize("time", NO_TIMES)
async def test_a_time_that_is_not_written_out_is_refused_in_filters(api: Client, time: str) -> None:
    for name in ("submitted_from", "submitted_before", "finished_from", "finished_before"):
        assert _hint(fault(await api.get("/tasks", params={name: time}), f"query:{name}"))
        assert _hint(fault(await api.post("/tasks/cancel", json={name: time}), f"/{name}"))


@pytest.mark.parametrize("time", [*NO_TIMES, 12])
async def test_a_time_that_is_not_written_out_is_refused_in_a_signal(api: Client, time: Any) -> None:
    body = {"progress": 1.0, "progress_at": time}
    assert _hint(fault(await api.post("/streams/nightly/signals", json=body), "/progress_at"))


def _hint(detail: str) -> bool:
    return detail.endswith("; give a time with its zone, such as 2026-11-21T22:00:00Z")
