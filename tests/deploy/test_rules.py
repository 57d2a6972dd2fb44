"""The rules for Prometheus are the alerts of the page on monitoring, and Prometheus accepts them."""

import re
import shutil
from pathlib import Path
from typing import Any

import yaml
from gpubroker_server.telemetry import metrics
from gpubroker_server.telemetry.exposition import Buckets, counter, gauge, histogram, text_of

from tests.alerts import documented
from tests.deploy.programs import DEPLOY, ROOT, output_of
from tests.gateway.test_documentation import METRICS

FOLDER = DEPLOY / "prometheus"
RUNBOOK = ROOT / "docs/how-to/answer-alerts.md"
GROUPS: dict[str, list[dict[str, Any]]] = {
    group["name"]: group["rules"]
    for group in yaml.safe_load((FOLDER / "rules.yaml").read_text(encoding="utf-8"))["groups"]
}


def test_each_documented_alert_is_a_rule() -> None:
    told = [(alert.text, alert.hold_seconds) for alert in documented()]
    assert [(rule["expr"], _seconds(rule.get("for", "0s"))) for rule in GROUPS["gpubroker"]] == told


def test_each_alert_has_its_section_in_the_runbook() -> None:
    sections = re.findall(r"^## (Gpubroker\w+)$", RUNBOOK.read_text(encoding="utf-8"), re.MULTILINE)
    assert sections == [rule["alert"] for rules in GROUPS.values() for rule in rules if "alert" in rule]


def test_rules_ask_for_metrics_that_there_are() -> None:
    listed = set(re.findall(r"^\| `(\w+)` \|", METRICS, re.MULTILINE))
    listed |= {f"{name}_bucket" for name in listed if name.endswith("_seconds")}
    asked = {
        name
        for rules in GROUPS.values()
        for rule in rules
        for name in re.findall(r"\bgpubroker_\w+", rule["expr"])
    }
    assert asked - listed == set()


def test_prometheus_accepts_rules_and_configuration(tmp_path: Path) -> None:
    copy = shutil.copytree(FOLDER, tmp_path / "prometheus")
    (copy / "token").write_text("gpb_example")
    assert "SUCCESS" in output_of("promtool", "check", "config", copy / "prometheus.yml")


def test_promtool_has_nothing_to_say_of_any_metric() -> None:
    """Each with a value, whether this process would show it or not."""
    shown = [
        (counter if row.is_counter else gauge)(row.name, row.about, row.labels, [(row.labels, 1.0)])
        for row in metrics.METRICS
    ]
    for name, labels in metrics.HISTOGRAMS.items():
        shown.append(histogram(name, "How long it took.", labels, (1.0,), [Buckets(labels, (1, 1), 0.5)]))
    text = text_of(shown).decode()
    assert len(re.findall("^# TYPE ", text, re.MULTILINE)) == len(shown)
    assert output_of("promtool", "check", "metrics", given=text) == ""


def test_each_alert_fires_when_it_should() -> None:
    output_of("promtool", "test", "rules", FOLDER / "rules.test.yaml")
    cases = yaml.safe_load((FOLDER / "rules.test.yaml").read_text(encoding="utf-8"))["tests"]
    expected = {
        check["alertname"]
        for case in cases
        for check in case.get("alert_rule_test", ())
        if check.get("exp_alerts")
    }
    assert expected == {rule["alert"] for rules in GROUPS.values() for rule in rules if "alert" in rule}


def _seconds(text: str) -> float:
    return float(text[:-1]) * {"s": 1, "m": 60, "h": 3600}[text[-1]]
