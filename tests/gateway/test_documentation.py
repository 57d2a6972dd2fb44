"""Every error code and every metric has its section in the docs."""

import re

import pytest
from gpubroker_server.broker.fleet import COUNTED
from gpubroker_server.http.problems import CATALOGUE
from gpubroker_server.telemetry import metrics

from tests.architecture.source_tree import ROOT
from tests.gateway.harness import DOCUMENT, Client, Gateway, problem

ERRORS = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
METRICS = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")


def test_every_error_code_has_its_section_and_no_section_lacks_a_code() -> None:
    assert re.findall(r"^## (.+)$", ERRORS, re.MULTILINE) == list(CATALOGUE)


@pytest.mark.parametrize("code", CATALOGUE)
async def test_type_of_a_problem_leads_to_its_section(gateway: Gateway, code: str) -> None:
    nobody = gateway.with_secret(None)
    page = (await nobody.get(f"/problems/{code}")).json()
    assert (page["code"], page["status"]) == (code, CATALOGUE[code].status)
    assert f"## {code}\n\n{page['text']}" in ERRORS


async def test_a_refusal_names_the_page_below_the_prefix_of_a_proxy(gateway: Gateway, api: Client) -> None:
    assert problem(await api.get("/tasks/task_0"), 404, "not-found")["type"] == "/problems/not-found"
    gateway.change(root_path="/gpubroker")
    behind = await gateway.with_secret(None).get("/tasks")
    assert problem(behind, 401, "unauthenticated")["type"] == "/gpubroker/problems/unauthenticated"
    unknown = await gateway.with_secret(None).get("/problems/no-such-code")
    assert 'no code "no-such-code"' in problem(unknown, 404, "not-found")["detail"]


def test_every_section_states_status_and_whether_trying_again_helps() -> None:
    stated = re.findall(r"^## (\S+)\n\n\*\*(\d+)(, retryable)?\.\*\*", ERRORS, re.MULTILINE)
    assert [(code, int(status), bool(retryable)) for code, status, retryable in stated] == [
        (code, kind.status, kind.retryable) for code, kind in CATALOGUE.items()
    ]


def test_every_failure_of_a_task_is_listed() -> None:
    """Failures that the service, its agents and the runtime name."""
    named = re.compile(
        r'(?:Failure|failed|failure = |_ended_lost)\(\s*(?:run, )?"([a-z_]+)"'
        r"|^(?:MALFORMED|NOT_YOUR_PROCESS|ENTRYPOINT_NOT_ALLOWED|SECRET_MISSING|ARRAY_IMPORT_FAILED"
        r'|ARRAY_RESULTS_TOO_LARGE|OBJECT_MISSING|RAY_UNUSABLE|_FAILED) = "([a-z_]+)"',
        re.MULTILINE,
    )
    sources = [
        path for part in ("service", "client/gpubroker/runtime") for path in (ROOT / part).rglob("*.py")
    ]
    kinds = {a or b for path in sources for a, b in named.findall(path.read_text(encoding="utf-8"))}
    listed = re.findall(r"^\| `(\w+)` \|", ERRORS, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert kinds == set(listed)


def test_every_metric_is_listed_with_its_labels() -> None:
    rows = re.findall(r"^\| `(\w+)` \|([^|]*)\|", METRICS, re.MULTILINE)
    listed = {name: tuple(re.findall(r"`(\w+)`", labels)) for name, labels in rows}
    told = {f"{row.name}_total" if row.is_counter else row.name: row.labels for row in metrics.METRICS}
    assert listed == {**told, **metrics.HISTOGRAMS}


def test_every_event_about_the_health_of_the_fleet_is_counted_and_listed() -> None:
    page = (ROOT / "docs/how-to/keep-the-fleet-healthy.md").read_text(encoding="utf-8")
    told = re.compile(r'otice\(\s*f?"((?:fleet|memory|worker)\.\w+)')
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "service").rglob("*.py"))
    beginnings = {kind for text in sources for kind in told.findall(text)}
    assert sorted(re.findall(r"^\| `(\w+\.\w+)` \|", page, re.MULTILINE)) == sorted(COUNTED)
    assert {kind for kind in beginnings if not any(it.startswith(kind) for it in COUNTED)} == set()
    assert {kind for kind in COUNTED if not any(kind.startswith(it) for it in beginnings)} == set()


def test_operations_have_a_name_a_summary_and_the_problems_they_answer() -> None:
    names = []
    for operations in DOCUMENT["paths"].values():
        for operation in operations.values():
            names.append(operation["operationId"])
            assert operation["summary"]
            assert "application/problem+json" in operation["responses"]["default"]["content"]
    assert len(names) == len(set(names))


def test_no_component_is_named_after_our_modules() -> None:
    """FastAPI does that if two schemas have the same name."""
    assert [name for name in DOCUMENT["components"]["schemas"] if "__" in name] == []


def test_every_forecast_has_the_same_schema() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    assert [name for name, told in schemas.items() if "p50_seconds" in told.get("properties", {})] == [
        "Expected"
    ]
