"""The alerts of docs/how-to/monitor.md, evaluated as Prometheus evaluates them, on metrics that were scraped.

Expressions are parsed by a complete parser of PromQL. Of the language only what that page uses is evaluated;
the rest is refused, so an alert that this cannot judge is noticed.
"""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import httpx
import promql_parser as promql
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.service_process import ServiceProcess, until
from tests.patience import PATIENCE_SECONDS

PAGE = Path(__file__).resolve().parents[1] / "docs/how-to/monitor.md"

HURRY = 10.0
SCRAPE_SECONDS = 0.1
"""Between two scrapes."""

Labels = frozenset[tuple[str, str]]
Series = tuple[str, Labels]
"""Name and labels."""
Vector = Mapping[Labels, float]


class Scrapes:
    """What Prometheus knows of its targets."""

    def __init__(self, **targets: Callable[[], str | None]) -> None:
        """Each answers with its metrics, or None if it cannot be reached."""
        self._targets = targets
        self._at: list[float] = []
        self._history: dict[Series, list[tuple[float, float]]] = {}
        self._now: dict[Series, float] = {}
        """Of the newest scrape alone: what a target does not show any more is gone at once."""

    def scrape(self, at: float) -> None:
        self._now = {}
        for instance, read in self._targets.items():
            text = read()
            whose = ("instance", instance), ("job", "gpubroker")
            self._now["up", frozenset(whose)] = float(text is not None)
            for family in text_string_to_metric_families(text or ""):
                for sample in family.samples:
                    self._now[sample.name, frozenset((*sample.labels.items(), *whose))] = sample.value
        for series, value in self._now.items():
            self._history.setdefault(series, []).append((at, value))
        self._at.append(at)

    def evaluate(self, expression: promql.Expr) -> Vector:
        match expression:
            case promql.VectorSelector():
                return {labels: self._now[name, labels] for name, labels in self._selected(expression)}
            case promql.BinaryExpr() if isinstance(expression.rhs, promql.NumberLiteral):
                holds = {"<": float.__lt__, ">": float.__gt__}[str(expression.op)]
                found = self.evaluate(expression.lhs)
                return {labels: value for labels, value in found.items() if holds(value, expression.rhs.val)}
            case promql.AggregateExpr():
                return self._aggregate(expression)
            case promql.Call() if expression.func.name == "changes":
                selector = expression.args[0].vector_selector
                since = self._at[-1] - expression.args[0].range.total_seconds()
                return {
                    labels: self._changes((name, labels), since) for name, labels in self._selected(selector)
                }
        raise NotImplementedError(f"tests/alerts.py does not evaluate {expression}")

    def _selected(self, selector: promql.VectorSelector) -> Iterator[Series]:
        matchers = selector.matchers.matchers
        assert all(matcher.op == promql.MatchOp.Equal for matcher in matchers), selector
        wanted = {(matcher.name, matcher.value) for matcher in matchers}
        return (series for series in self._now if series[0] == selector.name and wanted <= series[1])

    def _aggregate(self, expression: promql.AggregateExpr) -> Vector:
        over = {"min": min, "max": max}[str(expression.op)]
        by = set() if expression.modifier is None else set(expression.modifier.labels)
        groups: dict[Labels, list[float]] = {}
        for labels, value in self.evaluate(expression.expr).items():
            groups.setdefault(frozenset(pair for pair in labels if pair[0] in by), []).append(value)
        return {labels: over(values) for labels, values in groups.items()}

    def _changes(self, series: Series, since: float) -> float:
        values = [value for at, value in self._history[series] if at > since]
        return float(sum(before != after for before, after in pairwise(values)))


@dataclass(frozen=True, eq=False)
class Alert:
    text: str
    expression: promql.Expr
    hold_seconds: float
    """It fires when the expression has held for so long."""

    @property
    def metric(self) -> str:
        """By which tests name it."""
        [name] = set(re.findall(r"\b(?:gpubroker_\w+|up\b)", self.text))
        return name


@cache
def documented() -> tuple[Alert, ...]:
    """In the order of the page."""
    rows = re.findall(r"^\| `(.+?)` \| (\w*) *\|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return tuple(
        Alert(text, promql.parse(text), promql.parse_duration(held).total_seconds() if held else 0.0)
        for text, held in rows
    )


@dataclass
class Alertmanager:
    """Which of the documented alerts fire."""

    scrapes: Scrapes
    _at: float = 0.0
    _since: dict[tuple[Alert, Labels], float] = field(default_factory=dict)

    def look(self, at: float) -> None:
        self.scrapes.scrape(at)
        holding = [(one, labels) for one in documented() for labels in self.scrapes.evaluate(one.expression)]
        self._at, self._since = at, {one: self._since.get(one, at) for one in holding}

    def firing(self, hurry: float = 1.0) -> set[str]:
        """Their metrics, at the last look. `hurry`: how many times sooner than documented."""
        return {
            alert.metric
            for (alert, _), since in self._since.items()
            if self._at - since >= alert.hold_seconds / hurry
        }


class Prometheus:
    """Scrapes these gateways, and judges all alerts twice: as documented, and ten times sooner."""

    def __init__(self, *gateways: ServiceProcess) -> None:
        targets = {gateway.data_dir.name: partial(metrics_of, gateway) for gateway in gateways}
        self._alerts = Alertmanager(Scrapes(**targets))
        self.fired: set[str] = set()
        """As documented, until now."""

    def soon(self) -> set[str]:
        time.sleep(SCRAPE_SECONDS)
        self._alerts.look(time.monotonic())
        self.fired |= self._alerts.firing()
        return self._alerts.firing(HURRY)

    def until(self, *alerts: str) -> None:
        until(lambda: self.soon() == set(alerts), f"these alerts fire: {alerts}")


def metrics_of(gateway: ServiceProcess) -> str | None:
    known = json.loads((gateway.data_dir / "client.json").read_text(encoding="utf-8"))
    headers = {"Authorization": f"Bearer {known['token']}"}
    try:
        return httpx.get(f"{known['url']}/metrics", headers=headers, timeout=PATIENCE_SECONDS).text
    except httpx.TransportError:
        return None
