"""A real Prometheus scrapes a live service, evaluates the rules, and answers the dashboard's queries."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.programs import DEPLOY, program
from tests.deploy.prometheus_server import PrometheusServer, a_prometheus
from tests.e2e.service_process import GIB, ServiceProcess, until

DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/overview.json").read_text(encoding="utf-8"))
QUERIES = [
    (f"{panel['title']}: {target['legendFormat']}", target["expr"])
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
]
ABSENT = ("gpubroker_model_requests", "gpubroker_model_wait", "gpubroker_tenant_guaranteed")
"""Of what this service doesn't have: models, quotas."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    program("prometheus")
    with ServiceProcess(tmp_path_factory.mktemp("service") / "data", engine="simulated") as service:
        yield service


@pytest.fixture(scope="module")
def prometheus(
    service: ServiceProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrometheusServer]:
    token = service.broker.create_token("prometheus", scopes=["metrics:read"]).token
    target = service.url.removeprefix("http://")
    with a_prometheus(tmp_path_factory.mktemp("prometheus") / "files", target, token) as server:
        yield server


def test_a_token_that_may_read_metrics_and_nothing_else_is_enough(prometheus: PrometheusServer) -> None:
    until(lambda: prometheus.value("gpubroker_leader_known") == 1, "the leader is known")
    [target] = prometheus.targets()
    assert (target["health"], target["lastError"]) == ("up", "")
    assert prometheus.value("gpubroker:gpu_memory_leased:ratio") in (None, 0.0)


def test_without_a_token_the_service_tells_nothing_and_the_alert_says_so(
    service: ServiceProcess, tmp_path: Path
) -> None:
    target = service.url.removeprefix("http://")
    with a_prometheus(tmp_path / "files", target, "gpb_wrong") as refused:
        until(lambda: refused.targets()[0]["health"] == "down", "the scrape is refused")
        assert "401" in refused.targets()[0]["lastError"]
        until(lambda: bool(refused.query('ALERTS{alertname="GpubrokerGatewayDown"}')), "the alert is raised")
        assert refused.query("gpubroker_leader_known") == []


def test_all_rules_are_evaluated_without_an_error(prometheus: PrometheusServer) -> None:
    until(lambda: all(rule["health"] != "unknown" for rule in prometheus.rules()), "each has its turn")
    assert [(rule["name"], rule["lastError"]) for rule in prometheus.rules() if rule["health"] != "ok"] == []


@pytest.fixture(scope="module")
def busy(service: ServiceProcess, prometheus: PrometheusServer) -> PrometheusServer:
    """The service has had work of each kind that the dashboard shows."""
    broker = service.broker
    task = broker.submit("tests.e2e.work:add", kwargs={"seconds": 0.01}, gpu_mb=GIB)
    broker.wait(task)
    broker.get(task)
    for _ in range(3):  # one more than there are GPUs
        broker.submit("tests.e2e.work:add", kwargs={"seconds": 3600}, gpu_mb=24 * GIB)
    until(lambda: bool(prometheus.query("gpubroker_pending_oldest_seconds")), "one of them waits")
    return prometheus


def test_what_the_leader_finds_of_the_fleet_is_scraped(busy: PrometheusServer) -> None:
    done = 'gpubroker_items_total{component="finished"}'
    until(lambda: (busy.value(done) or 0) >= 1, "the leader counts what is done")
    assert busy.value('gpubroker_fleet_events_total{kind="fleet.NODE_JOINED"}') == 1
    assert busy.value('gpubroker_target_max_ratio{measure="gpu_utilization", scope="all"}') == 0.8
    assert busy.value('gpubroker_backpressure_active{measure="queue_length"}') == 0


@pytest.mark.parametrize(("title", "query"), QUERIES, ids=[title for title, _ in QUERIES])
def test_the_dashboards_query_finds_something(busy: PrometheusServer, title: str, query: str) -> None:
    if any(name in query for name in ABSENT):
        assert busy.query(query) == []
    else:
        until(lambda: bool(busy.query(query)), f"there is something for {title}")
